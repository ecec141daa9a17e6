"""Which neighbours will not come: those that are gone, hang, or are in a later round."""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable

import grpc
from grpc import aio

from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.transport.connections import Connections
from spark_node.transport.deadline import LOOKS, Deadlines, Suspicion
from spark_node.transport.mailbox import Mailbox
from spark_node.transport.traffic import Traffic, reason_name

log = logging.getLogger(__name__)

_SECOND_LOOK = 0.25
"""Seconds between the two looks that find a connection broken; gRPC tries to make it again after about 0.2."""
_JOINING_SECONDS = 10.0
"""The time that a process which was started in a neighbour's place has to say where it is."""


class SignsOfLife:
    """What a peer knows of its neighbours while it waits for them. Whoever is lost is not waited for in that round."""

    def __init__(
        self, connections: Connections, mailbox: Mailbox, deadlines: Deadlines, suspicion: Suspicion, traffic: Traffic
    ) -> None:
        self._connections, self._mailbox, self._traffic = connections, mailbox, traffic
        self._deadlines, self._suspicion = deadlines, suspicion
        self.lost: defaultdict[int, set[str]] = defaultdict(set)
        """By round: neighbours that will not say anything more in it."""
        self.rounds: dict[str, int] = {}
        """The round that each peer last said it was in."""
        self.on_broken: Callable[[int, str], None] = lambda k, peer: None
        """The connection to a neighbour broke in round k: its process may be gone, with what it had been told."""

    def enter(self, k: int) -> None:
        """Round k begins: who was lost in earlier ones does not matter any more."""
        self.lost = defaultdict(set, {r: peers for r, peers in self.lost.items() if r >= k})

    async def watch(self, k: int, peer: str) -> None:
        """Notice that a neighbour's process is gone: its connection breaks, and no new one can be made.

        Or one can, to the process that was started in its place: that one says that it will not be in this round.
        """
        fresh = peer not in self._connections
        channel = self._connections.to(peer)
        broke = not fresh and channel.get_state() is grpc.ChannelConnectivity.IDLE
        while True:
            state = channel.get_state(try_to_connect=True)
            if broke and state is grpc.ChannelConnectivity.READY:
                if await self._is_past(k, peer, channel):
                    log.warning("round %d: %s was started again", k, peer)
                    await self.lose(k, peer, "restarted")
                    return
                self.on_broken(k, peer)
                broke = False
            elif state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await asyncio.sleep(_SECOND_LOOK)
                if channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    log.warning("round %d: the connection to %s broke and cannot be made again", k, peer)
                    self.on_broken(k, peer)
                    await self.lose(k, peer, "unreachable")
                    return
            await self._connections.changed(channel, state)
            broke = broke or state is grpc.ChannelConnectivity.READY

    async def look_after(self, k: int, peer: str, usual: float) -> None:
        """Tell a late neighbour that is slow, which answers a call while it computes, from one that will not come.

        That one hangs, or has gone on to a later round without us. Who waits for it is late for others in turn;
        without this look all would wait, and ever longer. It ends when the neighbour is lost.
        """
        patience, missed = self._deadlines.look, 0
        enough = 1 if self._suspicion.suspects(peer) else LOOKS
        began = time.monotonic()
        await asyncio.sleep(math.inf if not patience else 0.0 if enough == 1 else usual)
        while peer not in self.lost[k]:
            start = time.monotonic()
            try:
                receipt = await self._connections.standing_of(self._connections.to(peer), patience)
                self.rounds[peer], missed = receipt.round, 0
                if receipt.round > k:
                    log.warning("round %d: %s is in round %d already", k, peer, receipt.round)
                    await self.lose(k, peer, reason_name(pb.REASON_STALE))
                    return
            except aio.AioRpcError:
                missed = 0  # one that is gone is `watch`'s to notice
            except TimeoutError:
                overdue = time.monotonic() - start - patience
                if overdue < patience / 4:  # else this very process waits for a processor, and so may the neighbour
                    missed += 1
            if missed >= enough and peer not in self.lost[k]:
                log.warning("round %d: %s gives no sign of life", k, peer)
                await self.lose(k, peer, "hanging")
            elif not missed:
                await asyncio.sleep(self._deadlines.until_next_look(time.monotonic() - began))

    async def _is_past(self, k: int, peer: str, channel: aio.Channel) -> bool:
        """Whether a neighbour says that round k is over where it is; one that has not joined yet is asked again."""
        while True:
            try:
                receipt = await self._connections.standing_of(channel, _JOINING_SECONDS)
            except (aio.AioRpcError, TimeoutError):
                return False  # it is gone again: the state of the connection tells
            if receipt.reason != pb.REASON_EARLY:
                self.rounds[peer] = receipt.round
                return receipt.round > k
            await asyncio.sleep(_SECOND_LOOK)

    async def lose(self, k: int, peer: str, reason: str) -> None:
        """Nobody waits for a peer that cannot be reached, or that is in a later round or another graph."""
        self._traffic.rejected[reason] += 1
        if peer not in self.lost[k] and reason in ("unreachable", "hanging"):
            self._suspicion.failed(peer)
        self.lost[k].add(peer)
        await self._mailbox.give_up()
