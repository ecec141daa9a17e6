"""Messages over gRPC: what a peer sends to its neighbours of a round, and gathers from them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from spark_node.config import NetworkSettings, SecuritySettings
from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.learning.messages import Message, Weights, kind_of
from spark_node.membership import Roster
from spark_node.package.chunks import Assembly
from spark_node.package.errors import PackageError
from spark_node.package.peer import PeerCodec
from spark_node.package.reader import decode
from spark_node.security.tls import Security
from spark_node.transport.connections import Connections
from spark_node.transport.deadline import Deadlines, Suspicion
from spark_node.transport.frames import deliveries
from spark_node.transport.mailbox import Mailbox
from spark_node.transport.reception import Reception
from spark_node.transport.signs_of_life import SignsOfLife
from spark_node.transport.traffic import Traffic, reason_name

log = logging.getLogger(__name__)

_OFFERED_AGAIN = (0.1, 0.2, 0.5, 1.0)
"""Seconds until a message is offered again to a neighbour that cannot be reached; the last from then on."""
_GONE = 2
"""Times that it is offered again before nobody waits for that neighbour any more."""
_STREAM, _WHOLE, _MODEL = (f"/spark.v1.Peer/{method}" for method in ("Deliver", "DeliverWhole", "Model"))
AGAIN = (pb.REASON_EARLY, pb.REASON_BUSY, pb.REASON_TOO_FAST)
"""Answers after which the same message is sent again a little later."""
_WILL_NOT_COME = (
    pb.REASON_STALE, pb.REASON_NOT_A_NEIGHBOUR, pb.REASON_WRONG_RUN,
    pb.REASON_CUT_OFF, pb.REASON_UNAUTHENTICATED, pb.REASON_REVOKED, pb.REASON_EXPIRED, pb.REASON_WRONG_ROLE,
)  # fmt: skip
"""Answers of peers that will say nothing to us in this round (any more)."""


@dataclass(frozen=True)
class _Ready:
    """A message and its bytes: encoding it once more, after others, would change what int8 weights still owe."""

    stage: str
    message: Message
    pieces: list[bytes]


class GrpcTransport:
    """One peer's way to its neighbours: `send` and `gather` of Transport. What arrives is its reception's to judge."""

    def __init__(
        self,
        peer: str,
        codec: PeerCodec,
        roster: Roster,
        network: NetworkSettings,
        traffic: Traffic,
        compute: Callable[..., Awaitable[Any]],
        security: Security,
        limits: SecuritySettings,
    ) -> None:
        self.peer, self.codec, self.roster, self.traffic = peer, codec, roster, traffic
        self._network, self._package = network, codec.terms.settings
        self._compute = compute
        self.mailbox = Mailbox(network.ahead)
        self.deadlines = Deadlines(
            network.deadline_floor, network.deadline_ceiling, network.deadline_spread, network.sign_of_life
        )
        self.suspicion = Suspicion(network.suspicion_floor)
        self.connections = Connections(roster, security, self._package, network, codec.terms.run)
        self.life = SignsOfLife(self.connections, self.mailbox, self.deadlines, self.suspicion, traffic)
        self.reception = Reception(peer, codec, roster, network, limits, self.mailbox, self.suspicion, traffic)
        self._framed: tuple[tuple[int, bytes], bytes, list[bytes]] | None = None
        self._encoding = asyncio.Lock()
        self._offers: dict[asyncio.Task[pb.Reason], tuple[int, str]] = {}
        """Messages on their way: of which round, and to whom."""
        self._taken: dict[tuple[int, str], _Ready] = {}
        """What neighbours took that were not in its round yet. A process started in the place of one has none of it."""
        self.life.on_broken = self._offer_again
        self._wasted = 0.0

    # What a round calls.

    async def enter(self, k: int) -> None:
        """Round k begins: connections to peers that are no neighbours any more, and wait for nothing, are closed."""
        await self.mailbox.enter(k)
        self.reception.guard.round_begins(k)
        self.life.enter(k)
        peers = set(self.roster.neighbours(self.peer, k))
        for offer, (r, peer) in self._offers.items():
            if r < k - self._network.ahead:
                offer.cancel()  # who is that far behind takes up a later round
            else:
                peers.add(peer)
        await self.connections.keep(peers)

    async def send(self, peer: str, stage: str, k: int, message: Message) -> None:
        """Deliver a message, again where the neighbour asks for that; a neighbour that cannot be reached is lost.

        To this peer, for this round: the message is still offered, for one that is just starting waits for it.
        """
        limit, gone = self.deadlines.of(stage), asyncio.Event()
        delivery = self._offer(peer, k, lambda: self._deliver(peer, stage, k, message, gone), limit)
        look = asyncio.create_task(self.life.look_after(k, peer, self.deadlines.usual(stage)))
        lost = asyncio.create_task(gone.wait())
        try:
            granted = self.suspicion.granted(peer, limit)
            await asyncio.wait({delivery, look, lost}, timeout=granted, return_when=asyncio.FIRST_COMPLETED)
        finally:
            look.cancel()
            lost.cancel()
        if look.done() and not delivery.done():
            look.result()
            return
        try:
            reason = delivery.result() if delivery.done() else pb.REASON_LATE
        except aio.AioRpcError as error:
            log.warning("round %d, %s: %s cannot be reached (%s)", k, stage, peer, error.code().name)
            await self.life.lose(k, peer, "unreachable")
            return
        if gone.is_set() and not delivery.done():
            await self.life.lose(k, peer, "unreachable")
            return
        if reason in (pb.REASON_NONE, pb.REASON_DUPLICATE):
            return
        name = reason_name(reason)
        log.warning("round %d, %s: %s did not take the message: %s", k, stage, peer, name)
        unheard = isinstance(message, Weights) and message.request and reason == pb.REASON_LATE
        if reason in _WILL_NOT_COME or unheard:  # a request that came too late is not answered
            await self.life.lose(k, peer, name)
        else:
            self.traffic.rejected[name] += 1

    async def gather(self, stage: str, k: int, peers: Iterable[str], deadline: float | None) -> dict[str, Message]:
        """The sound messages of these neighbours, all or those that came in time; and what others had sent by then."""
        wanted, expired = set(peers), set[str]()

        def due() -> set[str]:
            there = wanted - self.life.lost[k] - expired
            return {peer for peer in there if self.reception.takes_from(peer, k)}

        limit = self.deadlines.of(stage) if deadline is None else deadline
        granted = {peer: self.suspicion.granted(peer, limit) for peer in wanted}
        self.traffic.suspected.update(peer for peer in wanted if self.suspicion.suspects(peer))
        watching = [asyncio.create_task(self.life.watch(k, peer)) for peer in wanted]
        watching += [asyncio.create_task(self._expire(p, granted[p], expired)) for p in wanted if granted[p] < limit]
        usual = self.deadlines.usual(stage)
        watching += [asyncio.create_task(self.life.look_after(k, peer, usual)) for peer in wanted]
        start, arrivals = time.monotonic(), [0.0]
        try:
            found = await self.mailbox.take(k, stage, due, limit, arrivals.append)
        finally:
            for task in watching:
                task.cancel()
            self._taken.clear()
        for seconds in arrivals[1:]:
            self.deadlines.seen(stage, seconds)
        late = due() - set(found) | (expired - set(found) - self.life.lost[k])
        if wanted - set(found):
            self._wasted += time.monotonic() - start - arrivals[-1]
        for peer in late:
            log.warning("round %d, %s: %s did not come within %.1f s; left out", k, stage, peer, granted[peer])
            self.traffic.refused["late"] += 1
            self.suspicion.failed(peer)
        there = wanted | set(self.roster.neighbours(self.peer, k))
        messages: dict[str, Message]
        messages, unusable = await self._compute(self._decode, k, {p: found[p] for p in sorted(there & set(found))})
        for peer, error in unusable.items():
            log.warning("round %d, %s: %s sent what cannot be used: %s", k, stage, peer, error)
            self.traffic.refused[error.refusal.value] += 1
            await self.reception.strike(peer)
        return messages

    def _decode(self, k: int, arrived: dict[str, memoryview]) -> tuple[dict[str, Message], dict[str, PackageError]]:
        """The sound messages, and what is wrong with the others. In one go: each way to another thread wakes two."""
        messages, unusable = dict[str, Message](), dict[str, PackageError]()
        for peer, data in arrived.items():
            try:
                messages[peer] = self.codec.decode(data, k, peer)
            except PackageError as error:
                unusable[peer] = error
        return messages, unusable

    def round_took(self, seconds: float) -> None:
        """A round is over. The wait for those who never came says nothing about how long rounds take."""
        self.deadlines.round_took(max(0.0, seconds - self._wasted))
        self._wasted = 0.0

    def network_round(self, k: int) -> int:
        """The round that at least half of round k's neighbours have reached, as far as they have said; at least k.

        A few that claim to be far ahead cannot move it.
        """
        reached = sorted(self.life.rounds.get(peer, 0) for peer in self.roster.neighbours(self.peer, k))
        return max(k, reached[(len(reached) - 1) // 2]) if reached else k

    async def newest_model(self, peer: str) -> Weights | None:
        """A member's newest model, for a peer that comes late or was cut off; None where it has none."""
        call = self.connections.to(peer).unary_stream(
            _MODEL,
            request_serializer=pb.ModelRequest.SerializeToString,
            response_deserializer=pb.ModelReply.FromString,
        )
        whole = Assembly(self._package.max_message_bytes)
        async for reply in call(pb.ModelRequest(run=self.codec.terms.run, member=self.peer)):
            if not reply.found:
                return None
            whole.add(reply.chunk)
        data = whole.finish()
        self.traffic.received[(peer, "weights")] += len(data)
        found: Message = await self._compute(lambda: decode(data, self.codec.terms, sender=peer).message)
        return found if isinstance(found, Weights) else None

    async def close(self) -> None:
        for offer in self._offers:
            offer.cancel()
        await self.connections.close()

    # Sending.

    def _offer(
        self, peer: str, k: int, deliver: Callable[[], Awaitable["pb.Reason"]], seconds: float
    ) -> "asyncio.Task[pb.Reason]":
        """Deliver beside everything else, for so long at the most, whether somebody still waits for it or not."""

        async def within() -> "pb.Reason":
            try:
                async with asyncio.timeout(seconds):
                    return await deliver()
            except TimeoutError:
                return pb.REASON_LATE

        def over(offer: "asyncio.Task[pb.Reason]") -> None:
            del self._offers[offer]
            if not offer.cancelled():
                offer.exception()

        offer = asyncio.create_task(within())
        self._offers[offer] = k, peer
        offer.add_done_callback(over)
        return offer

    def _offer_again(self, k: int, peer: str) -> None:
        """The connection to a neighbour broke, and it was not in this round yet: who is started in its place will be.

        A process that is still the same knows the message, and says so.
        """
        ready, gone = self._taken.pop((k, peer), None), asyncio.Event()
        if ready is not None:
            gone.set()
            self._offer(peer, k, lambda: self._hand_over(peer, k, ready, gone), self.deadlines.of(ready.stage))

    async def _deliver(self, peer: str, stage: str, k: int, message: Message, gone: asyncio.Event) -> "pb.Reason":
        ready = _Ready(stage, message, await self._encoded(message, k, peer))
        return await self._hand_over(peer, k, ready, gone)

    async def _hand_over(self, peer: str, k: int, ready: _Ready, gone: asyncio.Event) -> "pb.Reason":
        """Until the neighbour takes the message or says why it does not; `gone` is set where it cannot be reached."""
        stage, message, pieces = ready.stage, ready.message, ready.pieces
        pause, retries = 0.02, 0
        while True:
            try:
                receipt = await self._attempt(peer, stage, k, message, pieces)
            except aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                if retries == _GONE and not gone.is_set():
                    log.warning("round %d, %s: %s cannot be reached (%s)", k, stage, peer, error.code().name)
                    gone.set()
                # A connection that was closed under us, or a peer that restarts.
                await asyncio.sleep(_OFFERED_AGAIN[min(retries, len(_OFFERED_AGAIN) - 1)])
                retries += 1
                continue
            if receipt.reason == pb.REASON_MISSING_FACTOR:
                pieces = await self._compute(lambda: self.codec.encode(message, k, peer, whole=True))
            elif receipt.reason in AGAIN:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 1.0)
            elif receipt.reason == pb.REASON_STALE and receipt.round <= k:
                return pb.REASON_LATE  # a stage of this round that is over there; it may still say its part of others
            else:
                if receipt.reason in (pb.REASON_NONE, pb.REASON_DUPLICATE) and receipt.round < k:
                    self._taken[k, peer] = ready
                return receipt.reason

    async def _encoded(self, message: Message, k: int, peer: str) -> list[bytes]:
        """A message's bytes for a neighbour; the first neighbour's are made aside, and others take the same."""
        async with self._encoding:
            ready = self.codec.ready(message, k)
            found: list[bytes] = await self._compute(self.codec.encode, message, k, peer) if ready is None else ready
            return found

    async def _attempt(self, peer: str, stage: str, k: int, message: Message, pieces: list[bytes]) -> "pb.Receipt":
        kind, count = kind_of(message), 0
        envelope = pb.Envelope(
            run=self.codec.terms.run, round=k, stage=stage, sender=self.peer, members_version=self.roster.version
        )

        def parts() -> Iterator[bytes]:
            nonlocal count
            for delivery in deliveries(envelope, pieces, self._package.chunk_bytes):
                count += len(delivery)
                yield delivery

        channel = self.connections.to(peer)
        try:
            if sum(map(len, pieces)) <= self._package.chunk_bytes:
                whole = self._framed_once(envelope, pieces)
                count = len(whole)
                call = channel.unary_unary(_WHOLE, response_deserializer=pb.Receipt.FromString)
                receipt: pb.Receipt = await call(whole)
            else:
                call = channel.stream_unary(_STREAM, response_deserializer=pb.Receipt.FromString)
                receipt = await call(parts())
        finally:
            self.traffic.sent[(peer, kind)] += count
        self.life.rounds[peer] = receipt.round
        self.traffic.raw[(peer, kind)] += message.nbytes
        self.traffic.messages[(peer, kind)] += 1
        return receipt

    def _framed_once(self, envelope: "pb.Envelope", pieces: list[bytes]) -> bytes:
        """A message of one chunk; weights that go to all neighbours are put together for the first only."""
        key = (id(pieces), envelope.SerializeToString())
        if self._framed is None or self._framed[0] != key:
            whole = next(deliveries(envelope, pieces, self._package.chunk_bytes))
            self._framed = (key, whole, pieces)  # holds the pieces, so that their id stays theirs
        return self._framed[1]

    async def _expire(self, peer: str, seconds: float, expired: set[str]) -> None:
        """A neighbour under suspicion is not waited for as long as the others."""
        await asyncio.sleep(seconds)
        expired.add(peer)
        await self.mailbox.give_up()
