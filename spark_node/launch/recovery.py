"""How a peer comes back: the state it begins with, the checkpoints it leaves, and where it goes on after a break."""

import asyncio
import logging
from pathlib import Path

from grpc import aio
from torch import Tensor

from spark_node.checkpoint import Checkpoint, Store, join_states, part_of
from spark_node.config import CheckpointSettings
from spark_node.learning.messages import check
from spark_node.membership import Roster
from spark_node.node import Compute, Node
from spark_node.package.errors import PackageError
from spark_node.package.peer import PeerCodec
from spark_node.rendezvous import Rendezvous
from spark_node.transport.grpc import GrpcTransport

log = logging.getLogger(__name__)

_ASKED = 8
"""Members that are asked for their model, at most, before a pause."""
_ASK_SECONDS, _PATIENCE, _PAUSE = 10.0, 30.0, 0.5
_PORT = "port"


class Recovery:
    """One peer's way into the run, whether it is new, was killed or was cut off."""

    def __init__(
        self,
        node: Node,
        codec: PeerCodec,
        transport: GrpcTransport,
        line: Rendezvous,
        store: Store | None,
        settings: CheckpointSettings,
        compute: Compute,
        *,
        classes: int,
        rounds: int,
    ) -> None:
        """`rounds`: of the run."""
        self._rounds = rounds
        self._node, self._codec, self._transport, self._line = node, codec, transport, line
        self._store, self._settings, self._compute, self._classes = store, settings, compute, classes
        self.failures = 0
        """Checkpoints that could not be written."""
        self.saved = 0
        """The round of the newest checkpoint."""
        self.returned = False
        """Whether the run was on when this peer came."""

    @property
    def _roster(self) -> Roster:
        return self._transport.roster

    async def begin(self) -> tuple[int, Tensor]:
        """The peer's first round, and the weights it brings; its state is set.

        A run that starts, or starts again, does so with the round that its first member list names. Who comes back
        while it is on takes up the round after the latest. Its own checkpoint counts unless that is very old; without
        one it starts from a neighbour's weights, and in round 1 from those that all share.
        """
        peer = self._node.peer
        self.returned = self._line.furthest > 0
        first = max(self._roster.round_with(peer, 1), self._line.furthest + 1)
        first = self._roster.round_with(peer, first)
        await self._transport.enter(first)  # whoever is in an earlier round hears at once that this peer is not
        if not await self._resume(first) and first > 1:
            await self._take_weights(first)
        if self.returned:
            first = await self._meet(first)
        return first, self._node.algorithm.weights

    async def _meet(self, first: int) -> int:
        """The round to begin with, once the network is in the one before; until then newer lists may hold from it.

        Nobody comes to one past the last: who comes back too late for all rounds is done.
        """
        while first <= self._rounds and self._line.latest < first - 1 and not self._transport.mailbox.has_any(first):
            await asyncio.sleep(_PAUSE)
            await self._line.refresh()
            if (later := self._roster.round_with(self._node.peer, first)) > first:
                first = later
                await self._transport.enter(first)
        return first

    async def _resume(self, first: int) -> bool:
        """Whether the peer's own checkpoint could be taken up."""
        if self._store is None:
            return False
        await self._compute(self._store.forget_after, first - 1)
        checkpoint = await self._compute(self._store.newest)
        if checkpoint is None:
            return False
        behind = first - 1 - checkpoint.round
        if behind > self._settings.oldest:
            log.warning("the checkpoint of round %d is %d rounds old; not used", checkpoint.round, behind)
            return False
        try:
            self._node.algorithm.restore(part_of(checkpoint.state, "algorithm"))
        except ValueError as error:
            log.warning("the checkpoint of round %d does not fit: %s", checkpoint.round, error)
            return False
        self._codec.restore(part_of(checkpoint.state, "codec"))
        self.saved = checkpoint.round
        log.info("goes on from its checkpoint of round %d", checkpoint.round)
        return True

    async def go_on(self, k: int) -> int:
        """The round to take up after the last: k, or where the network is if that has gone on without this peer."""
        reached = self._transport.network_round(k)
        target = reached + 1 if reached > k else k
        if target > k:
            await self._line.refresh()
        target = self._roster.round_with(self._node.peer, target)
        if target > k:
            log.warning("the network has gone on: from round %d straight to round %d", k, target)
            await self._transport.enter(target)
            await self._take_weights(target)
        return target

    async def _take_weights(self, k: int) -> None:
        """Start round k from the weights of one of its neighbours, without velocity; keep one's own if none answers."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _PATIENCE
        while loop.time() < end:
            for peer in self._candidates(k):
                found = await self._weights_of(peer)
                if found is not None:
                    self._node.algorithm.restore({"w": found})
                    self._codec.restore({})
                    log.info("starts round %d from the weights of %s", k, peer)
                    return
            await asyncio.sleep(_PAUSE)
        log.warning("no member has handed out its weights; goes on with those that are here")

    def _candidates(self, k: int) -> list[str]:
        """This round's neighbours first, then others."""
        me = self._node.peer
        neighbours = self._roster.neighbours(me, k)
        others = [peer for peer in self._roster.members(k) if peer != me and peer not in neighbours]
        return [*neighbours, *others][:_ASKED]

    async def _weights_of(self, peer: str) -> Tensor | None:
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                found = await self._transport.newest_model(peer)
        except (TimeoutError, aio.AioRpcError, PackageError) as error:
            log.info("%s does not hand out its weights (%s)", peer, type(error).__name__)
            return None
        if found is None:
            return None
        algorithm = self._node.algorithm
        reason = check(found, algorithm.weights.numel(), algorithm.package_parameters, self._classes)
        if reason is not None:
            log.warning("%s hands out %s", peer, reason)
            return None
        return found.w

    async def save(self, k: int, last: bool) -> None:
        """A checkpoint after round k, where one is due. A disk that is full costs the checkpoint, not the training."""
        if self._store is None or (k % self._settings.every and not last):
            return
        state = join_states(algorithm=self._node.algorithm.state(), codec=self._codec.state())
        try:
            await self._compute(self._store.save, Checkpoint(k, state))
            self.saved = k
        except OSError as error:
            self.failures += 1
            log.error("round %d: no checkpoint (%s); that of round %d is kept", k, error, self.saved)


def remembered_port(folder: Path | None) -> int:
    """The port of the peer's last life: one that comes back there has its place in the run at once. 0: none."""
    try:
        port = int((folder / _PORT).read_text()) if folder is not None else 0
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 65_536 else 0


def remember_port(folder: Path | None, port: int) -> None:
    """For the next life."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _PORT).write_text(f"{port}\n")
    except OSError as error:
        log.warning("the port is not remembered: %s", error)
