"""Messages over gRPC: a service that takes what neighbours send, and connections to this round's neighbours."""

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from spark_node.config import NetworkSettings, PackageSettings, SecuritySettings
from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.learning.messages import Message, Weights, kind_of
from spark_node.membership import Roster
from spark_node.package.chunks import Assembly
from spark_node.package.errors import MissingFactor, PackageError, Refusal
from spark_node.package.peer import PeerCodec
from spark_node.package.reader import decode
from spark_node.security.identity import Identity, Role
from spark_node.security.limits import Guard
from spark_node.security.tls import Security
from spark_node.transport.deadline import LOOKS, Deadlines, Suspicion
from spark_node.transport.frames import deliveries, read
from spark_node.transport.mailbox import Mailbox

log = logging.getLogger(__name__)

_OFFERED_AGAIN = (0.1, 0.2, 0.5, 1.0)
"""Seconds until a message is offered again to a neighbour that cannot be reached; the last from then on."""
_GONE = 2
"""Times that it is offered again before nobody waits for that neighbour any more."""
_SECOND_LOOK = 0.25
"""Seconds between the two looks that find a connection broken; gRPC tries to make it again after about 0.2."""
_HANDSHAKE_MS = 20_000
"""The time that a connection has to show a certificate."""
HELD_SECONDS = 10.0
"""The most that a message waits for the start of the run, or for a member list, before it is told to come again."""
Arriving = AsyncIterator[bytes] | bytes
"""A message as it comes: chunk by chunk, or all of it at once."""
_STREAM, _WHOLE, _MODEL, _STANDING = (
    f"/spark.v1.Peer/{method}" for method in ("Deliver", "DeliverWhole", "Model", "Standing")
)
AGAIN = (pb.REASON_EARLY, pb.REASON_BUSY, pb.REASON_TOO_FAST)
"""Answers after which the same message is sent again a little later."""
_WILL_NOT_COME = (
    pb.REASON_STALE, pb.REASON_NOT_A_NEIGHBOUR, pb.REASON_WRONG_RUN,
    pb.REASON_CUT_OFF, pb.REASON_UNAUTHENTICATED, pb.REASON_REVOKED, pb.REASON_EXPIRED, pb.REASON_WRONG_ROLE,
)  # fmt: skip
"""Answers of peers that will say nothing to us in this round (any more)."""
_INNOCENT = (
    pb.REASON_NONE, pb.REASON_EARLY, pb.REASON_BUSY, pb.REASON_STALE, pb.REASON_DUPLICATE, pb.REASON_NOT_A_NEIGHBOUR,
    pb.REASON_MISSING_FACTOR, pb.REASON_CUT_OFF,
)  # fmt: skip
"""Answers that an honest peer may get: it is behind, ahead, or has another member list. All others are strikes."""


def options(package: PackageSettings, network: NetworkSettings) -> list[tuple[str, Any]]:
    """Channel and server options: bounded messages, probes through the quiet phases of a round, no shared ports."""
    limit = 2 * package.chunk_bytes + 2**16
    probe = int(1000 * network.keepalive)
    return [
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.keepalive_time_ms", probe),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", probe // 2),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 20_000),  # the time a connection may take; a refusal comes at once
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.so_reuseport", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: what arrives is as large as it looks
    ]


def server_options(
    package: PackageSettings, network: NetworkSettings, security: SecuritySettings
) -> list[tuple[str, Any]]:
    """Those of a service that anybody may knock at."""
    return [
        *options(package, network),
        ("grpc.max_allowed_incoming_connections", security.connections),
        ("grpc.max_concurrent_streams", 2 * security.streams_per_sender),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ]


@dataclass
class Traffic:
    """Bytes as they leave for gRPC and come from it, by edge and kind; refusals by reason."""

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    raw: Counter[tuple[str, str]] = field(default_factory=Counter)
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    received: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Messages that this peer did not take."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Messages of this peer that a neighbour did not take."""
    observed: Counter[str] = field(default_factory=Counter)
    """Bytes handed to observers, by kind."""
    suspected: Counter[str] = field(default_factory=Counter)
    """Waits for a neighbour that were shortened because it had failed before."""


class GrpcTransport:
    """One peer's way to its neighbours: `send` and `gather` of Transport, and the receiving end of Deliver."""

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
        self._security, self._limits = security, limits
        self.guard = Guard(limits, codec.terms.settings.max_message_bytes)
        self.stages: Collection[str] = ()
        """Those of the run's algorithm; messages of no other are taken, once they are known."""
        self.peer, self.codec, self.roster, self.traffic = peer, codec, roster, traffic
        self._network, self._package = network, codec.terms.settings
        self._compute = compute
        self.mailbox = Mailbox(network.ahead)
        self.deadlines = Deadlines(
            network.deadline_floor, network.deadline_ceiling, network.deadline_spread, network.sign_of_life
        )
        self.suspicion = Suspicion(network.suspicion_floor)
        self._channels: dict[tuple[str, str], aio.Channel] = {}
        self._changes: dict[aio.Channel, tuple[grpc.ChannelConnectivity, asyncio.Task[None]]] = {}
        self._lost: defaultdict[int, set[str]] = defaultdict(set)
        self._framed: tuple[tuple[int, bytes], bytes, list[bytes]] | None = None
        self._encoding = asyncio.Lock()
        self._offers: dict[asyncio.Task[pb.Reason], tuple[int, str]] = {}
        """Messages on their way: of which round, and to whom."""
        self._ending: set[asyncio.Task[Any]] = set()
        """What nobody waits for any more, but must not be cancelled (`_let_end`)."""
        self._receiving, self._wasted = 0, 0.0
        self._standing: dict[str, int] = {}
        self._generations: dict[str, int] = {}
        self._dismissed: set[str] = set()
        self.on_newer_members: Callable[[], None] = lambda: None

    @property
    def knows_its_round(self) -> bool:
        """False until the first round is entered: what comes before may be of rounds that this peer will not be in."""
        return self.mailbox.round > 0

    def standing(self) -> "pb.Receipt":
        """Where this peer stands."""
        reason = pb.REASON_NONE if self.knows_its_round else pb.REASON_EARLY
        return pb.Receipt(reason=reason, round=self.mailbox.round)

    # What a round calls.

    async def enter(self, k: int) -> None:
        """Round k begins: connections to peers that are no neighbours any more, and wait for nothing, are closed.

        So are those that broke: gRPC waits ever longer before it tries again, and a neighbour that was started again
        meanwhile would seem to be gone still.
        """
        await self.mailbox.enter(k)
        self.guard.round_begins(k)
        self._lost = defaultdict(set, {r: peers for r, peers in self._lost.items() if r >= k})
        peers = set(self.roster.neighbours(self.peer, k))
        for offer, (r, peer) in self._offers.items():
            if r < k - self._network.ahead:
                offer.cancel()  # who is that far behind takes up a later round
            else:
                peers.add(peer)
        needed = {self._line(peer) for peer in peers}
        for line, channel in list(self._channels.items()):
            if line not in needed or channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await self._close(self._channels.pop(line))

    async def send(self, peer: str, stage: str, k: int, message: Message) -> None:
        """Deliver a message, again where the neighbour asks for that; a neighbour that cannot be reached is lost.

        To this peer, for this round: the message is still offered, for one that is just starting waits for it.
        """
        limit, gone = self.deadlines.of(stage), asyncio.Event()
        delivery = self._offer(peer, stage, k, message, gone, limit)
        look = asyncio.create_task(self._look_after(k, peer, self.deadlines.usual(stage)))
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
            await self._lose(k, peer, "unreachable")
            return
        if gone.is_set() and not delivery.done():
            await self._lose(k, peer, "unreachable")
            return
        if reason in (pb.REASON_NONE, pb.REASON_DUPLICATE):
            return
        name = reason_name(reason)
        log.warning("round %d, %s: %s did not take the message: %s", k, stage, peer, name)
        unheard = isinstance(message, Weights) and message.request and reason == pb.REASON_LATE
        if reason in _WILL_NOT_COME or unheard:  # a request that came too late is not answered
            await self._lose(k, peer, name)
        else:
            self.traffic.rejected[name] += 1

    async def gather(self, stage: str, k: int, peers: Iterable[str], deadline: float | None) -> dict[str, Message]:
        """The sound messages of these neighbours, all or those that came in time; and what others had sent by then."""
        wanted, expired = set(peers), set[str]()

        def due() -> set[str]:
            there = wanted - self._lost[k] - self._dismissed - expired
            return {peer for peer in there if not self.guard.is_cut_off(peer, k)}

        limit = self.deadlines.of(stage) if deadline is None else deadline
        granted = {peer: self.suspicion.granted(peer, limit) for peer in wanted}
        self.traffic.suspected.update(peer for peer in wanted if self.suspicion.suspects(peer))
        watching = [asyncio.create_task(self._watch(k, peer)) for peer in wanted]
        watching += [asyncio.create_task(self._expire(p, granted[p], expired)) for p in wanted if granted[p] < limit]
        usual = self.deadlines.usual(stage)
        watching += [asyncio.create_task(self._look_after(k, peer, usual)) for peer in wanted]
        start, arrivals = time.monotonic(), [0.0]
        try:
            found = await self.mailbox.take(k, stage, due, limit, arrivals.append)
        finally:
            for task in watching:
                task.cancel()
        for seconds in arrivals[1:]:
            self.deadlines.seen(stage, seconds)
        late = due() - set(found) | (expired - set(found) - self._lost[k])
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
            await self.strike(peer)
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
        reached = sorted(self._standing.get(peer, 0) for peer in self.roster.neighbours(self.peer, k))
        return max(k, reached[(len(reached) - 1) // 2]) if reached else k

    async def newest_model(self, peer: str) -> Weights | None:
        """A member's newest model, for a peer that comes late or was cut off; None where it has none."""
        call = self._channel(peer).unary_stream(
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
        for channel in self._channels.values():
            await self._close(channel)
        self._channels.clear()

    async def _close(self, channel: aio.Channel) -> None:
        if channel in self._changes:
            self._let_end(self._changes.pop(channel)[1])
        await channel.close(None)  # which is a change of its state

    def _let_end(self, task: "asyncio.Task[Any]") -> None:
        """Leave a call or a watch of a connection to end by itself, whatever comes of it.

        gRPC never frees what it had begun for one that is cancelled: a kilobyte of a call (grpc/grpc#43360), and of a
        watch the future that it would have told.
        """

        def ended(task: "asyncio.Task[Any]") -> None:
            self._ending.discard(task)
            if not task.cancelled():
                task.exception()

        self._ending.add(task)
        task.add_done_callback(ended)

    # Sending.

    def _offer(
        self, peer: str, stage: str, k: int, message: Message, gone: asyncio.Event, seconds: float
    ) -> "asyncio.Task[pb.Reason]":
        """Deliver beside everything else, for so long at the most, whether somebody still waits for it or not."""

        async def within() -> "pb.Reason":
            try:
                async with asyncio.timeout(seconds):
                    return await self._deliver(peer, stage, k, message, gone)
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

    async def _deliver(self, peer: str, stage: str, k: int, message: Message, gone: asyncio.Event) -> "pb.Reason":
        """Until the neighbour takes the message or says why it does not; `gone` is set where it cannot be reached."""
        pieces = await self._encoded(message, k, peer)
        pause, retries = 0.02, 0
        while True:
            try:
                receipt = await self._attempt(peer, stage, k, message, pieces)
            except aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                if retries == _GONE:
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

        channel = self._channel(peer)
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
        self._standing[peer] = receipt.round
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

    def _channel(self, peer: str) -> aio.Channel:
        line = self._line(peer)
        if line not in self._channels:
            chosen = options(self._package, self._network)
            self._channels[line] = self._security.channel(line[0], Role.PEER, peer, chosen)
        return self._channels[line]

    def _line(self, peer: str) -> tuple[str, str]:
        """Where a neighbour is reached, and as whom it must show itself there."""
        return self.roster.address(peer), self._security.expected(Role.PEER, peer)

    async def _watch(self, k: int, peer: str) -> None:
        """Notice that a neighbour's process is gone: its connection breaks, and no new one can be made.

        Or one can, to the process that was started in its place: that one says that it will not be in this round.
        """
        fresh = self._line(peer) not in self._channels
        channel = self._channel(peer)
        broke = not fresh and channel.get_state() is grpc.ChannelConnectivity.IDLE
        while True:
            state = channel.get_state(try_to_connect=True)
            if broke and state is grpc.ChannelConnectivity.READY:
                if await self._is_past(k, peer, channel):
                    log.warning("round %d: %s was started again", k, peer)
                    await self._lose(k, peer, "restarted")
                    return
                broke = False
            elif state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await asyncio.sleep(_SECOND_LOOK)
                if channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    log.warning("round %d: the connection to %s broke and cannot be made again", k, peer)
                    await self._lose(k, peer, "unreachable")
                    return
            await self._change(channel, state)
            broke = broke or state is grpc.ChannelConnectivity.READY

    async def _change(self, channel: aio.Channel, state: grpc.ChannelConnectivity) -> None:
        """Until the connection's state is another one.

        One watch a connection, for all stages and rounds: it ends when the state changes, which on a sound connection
        is when it is closed (`_let_end` says why it is not cancelled before).
        """
        seen, change = self._changes.get(channel, (None, None))
        if change is None or change.done() or seen is not state:
            change = asyncio.create_task(channel.wait_for_state_change(state))
            self._changes[channel] = state, change
        await asyncio.shield(change)

    async def _look_after(self, k: int, peer: str, usual: float) -> None:
        """Tell a late neighbour that is slow, which answers a call while it computes, from one that will not come.

        That one hangs, or has gone on to a later round without us. Who waits for it is late for others in turn;
        without this look all would wait, and ever longer. It ends when the neighbour is lost.
        """
        patience, missed = self.deadlines.look, 0
        enough = 1 if self.suspicion.suspects(peer) else LOOKS
        began = time.monotonic()
        await asyncio.sleep(math.inf if not patience else 0.0 if enough == 1 else usual)
        while peer not in self._lost[k]:
            start = time.monotonic()
            try:
                receipt = await self._standing_of(self._channel(peer), patience)
                self._standing[peer], missed = receipt.round, 0
                if receipt.round > k:
                    log.warning("round %d: %s is in round %d already", k, peer, receipt.round)
                    await self._lose(k, peer, reason_name(pb.REASON_STALE))
                    return
            except aio.AioRpcError:
                missed = 0  # one that is gone is `_watch`'s to notice
            except TimeoutError:
                overdue = time.monotonic() - start - patience
                if overdue < patience / 4:  # else this very process waits for a processor, and so may the neighbour
                    missed += 1
            if missed >= enough and peer not in self._lost[k]:
                log.warning("round %d: %s gives no sign of life", k, peer)
                await self._lose(k, peer, "hanging")
            elif not missed:
                await asyncio.sleep(self.deadlines.until_next_look(time.monotonic() - began))

    async def _standing_of(self, channel: aio.Channel, seconds: float) -> "pb.Receipt":
        """Where a neighbour says that it is."""
        call = channel.unary_unary(
            _STANDING,
            request_serializer=pb.StandingRequest.SerializeToString,
            response_deserializer=pb.Receipt.FromString,
        )

        async def answer() -> "pb.Receipt":
            receipt: pb.Receipt = await call(pb.StandingRequest(run=self.codec.terms.run), timeout=2 * seconds)
            return receipt

        self._let_end(answering := asyncio.create_task(answer()))
        async with asyncio.timeout(
            seconds
        ):  # before gRPC's own end of it, whose timers may be late (launch/scheduling.py)
            return await asyncio.shield(answering)

    async def _is_past(self, k: int, peer: str, channel: aio.Channel) -> bool:
        """Whether a neighbour says that round k is over where it is; one that has not joined yet is asked again."""
        while True:
            try:
                receipt = await self._standing_of(channel, HELD_SECONDS)
            except (aio.AioRpcError, TimeoutError):
                return False  # it is gone again: the state of the connection tells
            if receipt.reason != pb.REASON_EARLY:
                self._standing[peer] = receipt.round
                return receipt.round > k
            await asyncio.sleep(_SECOND_LOOK)

    async def _expire(self, peer: str, seconds: float, expired: set[str]) -> None:
        """A neighbour under suspicion is not waited for as long as the others."""
        await asyncio.sleep(seconds)
        expired.add(peer)
        await self.mailbox.give_up()

    async def _lose(self, k: int, peer: str, reason: str) -> None:
        """Nobody waits for a peer that cannot be reached, or that is in a later round or another graph."""
        self.traffic.rejected[reason] += 1
        if peer not in self._lost[k] and reason in ("unreachable", "hanging"):
            self.suspicion.failed(peer)
        self._lost[k].add(peer)
        await self.mailbox.give_up()

    # Receiving.

    async def receive(self, arriving: Arriving, certified: str | None, connection: str) -> "pb.Receipt":
        """Deliver: limits first, then the envelope before anything is stored, the header before the message is kept.

        `certified` is the name in the sender's certificate, None without certificates: then a connection is a sender.
        """
        who = connection if certified is None else certified
        if not self.guard.enter(who):
            await self.strike(who)
            cut_off = self.guard.is_cut_off(who, self.mailbox.round)
            reason = pb.REASON_CUT_OFF if cut_off else pb.REASON_TOO_FAST
            return self.refuse(reason, "too much at once; a sender that goes on with that is cut off")
        self._receiving += 1
        try:
            receipt = await self._within_limits(arriving, certified, who)
        finally:
            self._receiving -= 1
            self.guard.leave(who)
        if receipt.reason not in _INNOCENT:
            await self.strike(who)
        return receipt

    def welcome(self, identity: Identity) -> None:
        """A sender has shown a certificate that holds."""
        self._generations[identity.name] = identity.generation
        self._dismissed.discard(identity.name)

    async def dismiss(self, identity: Identity) -> None:
        """A sender's certificate is over: nobody waits for what will not be taken. Its successor is not its victim."""
        if identity.role is Role.PEER and identity.generation >= self._generations.get(identity.name, 0):
            self._dismissed.add(identity.name)
            await self.mailbox.give_up()

    async def strike(self, who: str) -> None:
        """A sender did what no honest one does; it is cut off, and not waited for, when that was once too often."""
        if self.guard.strike(who, self.mailbox.round):
            log.warning("round %d: %s broke limits too often and is cut off", self.mailbox.round, who)
            await self.mailbox.give_up()

    async def _within_limits(self, arriving: Arriving, certified: str | None, who: str) -> "pb.Receipt":
        if self._receiving > self._network.streams:
            return self.refuse(pb.REASON_BUSY, "too many messages at once")
        try:
            return await self._receive(self._metered(arriving, who), certified, who)
        except _OverLimit as error:
            return self.refuse(error.reason, error.detail)
        except MissingFactor as error:
            return self.refuse(pb.REASON_MISSING_FACTOR, error.detail, error.digests)
        except PackageError as error:
            if self.guard.is_cut_off(who, self.mailbox.round):
                return self.refuse(pb.REASON_CUT_OFF, error.detail)
            return self.refuse(REASONS[error.refusal], error.detail)

    async def _metered(self, arriving: Arriving, who: str) -> AsyncIterator[bytes]:
        """What arrives, as long as it comes neither too fast nor not at all."""
        if isinstance(arriving, bytes):
            yield self._paid_for(arriving, who)
            return
        while True:
            try:
                async with asyncio.timeout(self._limits.silence):
                    raw = await anext(arriving)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise _OverLimit(pb.REASON_SILENT, f"nothing came for {self._limits.silence:.0f} s") from None
            yield self._paid_for(raw, who)

    def _paid_for(self, raw: bytes, who: str) -> bytes:
        if not self.guard.spend(who, len(raw)):
            raise _OverLimit(pb.REASON_TOO_FAST, "too many bytes a second")
        return raw

    async def _receive(self, arriving: AsyncIterator[bytes], certified: str | None, who: str) -> "pb.Receipt":
        envelope: pb.Envelope | None = None
        whole = Assembly(self._package.max_message_bytes)
        async for raw in arriving:
            frame = read(raw)
            if envelope is None:
                envelope = frame.envelope or pb.Envelope()
                reason = await self._judge_patiently(envelope, certified, who)
                if reason != pb.REASON_NONE:
                    return self.refuse(reason, f"round {envelope.round}, {envelope.stage[:32]}")
                if self.mailbox.held(envelope.sender) + frame.total > self._limits.pending_bytes:
                    return self.refuse(pb.REASON_BUSY, "enough of this sender's messages wait here")
            whole.put(frame.total, frame.offset, frame.data)
        if envelope is None:
            return self.refuse(pb.REASON_MALFORMED, "a delivery of nothing")
        data = whole.finish()
        kind = self.codec.inspect(data, envelope.round, envelope.sender)
        self.traffic.received[(envelope.sender, kind)] += len(data)
        reason = self._judge(envelope, certified, who)  # the world moved meanwhile
        if reason != pb.REASON_NONE:
            return self.refuse(reason, f"round {envelope.round}, {envelope.stage[:32]}")
        self.suspicion.heard(envelope.sender)
        await self.mailbox.put(envelope.round, envelope.stage, envelope.sender, data)
        return pb.Receipt(round=self.mailbox.round)

    async def _judge_patiently(self, envelope: "pb.Envelope", certified: str | None, who: str) -> "pb.Reason":
        """A message that is too early by a moment is held: sending it again would cost all its bytes.

        So are those of a member list that is on its way to us, and all before this peer knows its first round.
        """
        end = time.monotonic() + HELD_SECONDS
        while True:
            reason = self._judge(envelope, certified, who)
            unknown = envelope.members_version > self.roster.version or not self.knows_its_round
            if reason != pb.REASON_EARLY or not unknown or time.monotonic() > end:
                return reason
            await asyncio.sleep(0.1)

    def _judge(self, envelope: "pb.Envelope", certified: str | None, who: str) -> "pb.Reason":
        if self.guard.is_cut_off(who, envelope.round):
            return pb.REASON_CUT_OFF
        if certified not in (None, envelope.sender):
            return pb.REASON_WRONG_SENDER
        if envelope.run != self.codec.terms.run:
            return pb.REASON_WRONG_RUN
        if self.stages and envelope.stage not in self.stages:
            return pb.REASON_WRONG_STAGE
        if envelope.members_version > self.roster.version:
            self.on_newer_members()
        if not self.knows_its_round:
            return pb.REASON_EARLY
        reason = self.mailbox.admits(envelope.round, envelope.stage, envelope.sender)
        if reason in (pb.REASON_STALE, pb.REASON_EARLY, pb.REASON_DUPLICATE):
            return reason
        if envelope.sender not in self.roster.neighbours(self.peer, envelope.round):
            # One of us has an older member list: the newer one is on its way.
            newer = envelope.members_version > self.roster.version
            return pb.REASON_EARLY if newer else pb.REASON_NOT_A_NEIGHBOUR
        return pb.REASON_NONE

    def refuse(self, reason: "pb.Reason", detail: str, missing: tuple[bytes, ...] = ()) -> "pb.Receipt":
        self.traffic.refused[reason_name(reason)] += 1
        return pb.Receipt(reason=reason, detail=detail[:256], round=self.mailbox.round, missing=missing)


class _OverLimit(Exception):
    """A message that came too fast, or stopped coming."""

    def __init__(self, reason: "pb.Reason", detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def reason_name(reason: "pb.Reason") -> str:
    """REASON_TOO_LARGE -> too_large, as metrics and logs say it."""
    return str(pb.Reason.Name(reason)).removeprefix("REASON_").lower()


REASONS: dict[Refusal, Any] = {refusal: pb.Reason.Value(f"REASON_{refusal.name}") for refusal in Refusal}
"""What a codec's refusal is called on the wire."""
REASON_BY_NAME: dict[str, Any] = {name.removeprefix("REASON_").lower(): number for name, number in pb.Reason.items()}
