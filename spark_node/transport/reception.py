"""The receiving end: what neighbours deliver is checked, limited, and put into the mailbox."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection

from spark_node.config import NetworkSettings, SecuritySettings
from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.membership import Roster
from spark_node.package.chunks import Assembly
from spark_node.package.errors import MissingFactor, PackageError
from spark_node.package.peer import PeerCodec
from spark_node.security.identity import Identity, Role
from spark_node.security.limits import Guard
from spark_node.transport.deadline import Suspicion
from spark_node.transport.frames import read
from spark_node.transport.mailbox import Mailbox
from spark_node.transport.traffic import REASONS, Traffic, reason_name

log = logging.getLogger(__name__)

HELD_SECONDS = 10.0
"""The most that a message waits for the start of the run, or for a member list, before it is told to come again."""
Arriving = AsyncIterator[bytes] | bytes
"""A message as it comes: chunk by chunk, or all of it at once."""
_INNOCENT = (
    pb.REASON_NONE, pb.REASON_EARLY, pb.REASON_BUSY, pb.REASON_STALE, pb.REASON_DUPLICATE, pb.REASON_NOT_A_NEIGHBOUR,
    pb.REASON_MISSING_FACTOR, pb.REASON_CUT_OFF,
)  # fmt: skip
"""Answers that an honest peer may get: it is behind, ahead, or has another member list. All others are strikes."""


class Reception:
    """What a peer does with what arrives. Nothing is stored before its envelope was judged."""

    def __init__(
        self,
        peer: str,
        codec: PeerCodec,
        roster: Roster,
        network: NetworkSettings,
        limits: SecuritySettings,
        mailbox: Mailbox,
        suspicion: Suspicion,
        traffic: Traffic,
    ) -> None:
        self._peer, self._codec, self._roster = peer, codec, roster
        self._network, self._limits, self._package = network, limits, codec.terms.settings
        self._mailbox, self._suspicion, self._traffic = mailbox, suspicion, traffic
        self.guard = Guard(limits, self._package.max_message_bytes)
        self.stages: Collection[str] = ()
        """Those of the run's algorithm; messages of no other are taken, once they are known."""
        self.on_newer_members: Callable[[], None] = lambda: None
        self._receiving = 0
        self._generations: dict[str, int] = {}
        self._dismissed: set[str] = set()

    @property
    def _knows_its_round(self) -> bool:
        """False until the first round is entered: what comes before may be of rounds that this peer will not be in."""
        return self._mailbox.round > 0

    def standing(self) -> "pb.Receipt":
        """Where this peer stands."""
        reason = pb.REASON_NONE if self._knows_its_round else pb.REASON_EARLY
        return pb.Receipt(reason=reason, round=self._mailbox.round)

    def takes_from(self, peer: str, k: int) -> bool:
        """Whether a neighbour's message of round k would be taken: it is neither dismissed nor cut off."""
        return peer not in self._dismissed and not self.guard.is_cut_off(peer, k)

    async def receive(self, arriving: Arriving, certified: str | None, connection: str) -> "pb.Receipt":
        """Deliver: limits first, then the envelope before anything is stored, the header before the message is kept.

        `certified` is the name in the sender's certificate, None without certificates: then a connection is a sender.
        """
        who = connection if certified is None else certified
        if not self.guard.enter(who):
            await self.strike(who)
            cut_off = self.guard.is_cut_off(who, self._mailbox.round)
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
            await self._mailbox.give_up()

    async def strike(self, who: str) -> None:
        """A sender did what no honest one does; it is cut off, and not waited for, when that was once too often."""
        if self.guard.strike(who, self._mailbox.round):
            log.warning("round %d: %s broke limits too often and is cut off", self._mailbox.round, who)
            await self._mailbox.give_up()

    async def _within_limits(self, arriving: Arriving, certified: str | None, who: str) -> "pb.Receipt":
        if self._receiving > self._network.streams:
            return self.refuse(pb.REASON_BUSY, "too many messages at once")
        try:
            return await self._assemble(self._metered(arriving, who), certified, who)
        except _OverLimit as error:
            return self.refuse(error.reason, error.detail)
        except MissingFactor as error:
            return self.refuse(pb.REASON_MISSING_FACTOR, error.detail, error.digests)
        except PackageError as error:
            if self.guard.is_cut_off(who, self._mailbox.round):
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

    async def _assemble(self, arriving: AsyncIterator[bytes], certified: str | None, who: str) -> "pb.Receipt":
        envelope: pb.Envelope | None = None
        whole = Assembly(self._package.max_message_bytes)
        async for raw in arriving:
            frame = read(raw)
            if envelope is None:
                envelope = frame.envelope or pb.Envelope()
                reason = await self._judge_patiently(envelope, certified, who)
                if reason != pb.REASON_NONE:
                    return self.refuse(reason, f"round {envelope.round}, {envelope.stage[:32]}")
                if self._mailbox.held(envelope.sender) + frame.total > self._limits.pending_bytes:
                    return self.refuse(pb.REASON_BUSY, "enough of this sender's messages wait here")
            whole.put(frame.total, frame.offset, frame.data)
        if envelope is None:
            return self.refuse(pb.REASON_MALFORMED, "a delivery of nothing")
        data = whole.finish()
        kind = self._codec.inspect(data, envelope.round, envelope.sender)
        self._traffic.received[(envelope.sender, kind)] += len(data)
        reason = self._judge(envelope, certified, who)  # the world moved meanwhile
        if reason != pb.REASON_NONE:
            return self.refuse(reason, f"round {envelope.round}, {envelope.stage[:32]}")
        self._suspicion.heard(envelope.sender)
        await self._mailbox.put(envelope.round, envelope.stage, envelope.sender, data)
        return pb.Receipt(round=self._mailbox.round)

    async def _judge_patiently(self, envelope: "pb.Envelope", certified: str | None, who: str) -> "pb.Reason":
        """A message that is too early by a moment is held: sending it again would cost all its bytes.

        So are those of a member list that is on its way to us, and all before this peer knows its first round.
        """
        end = time.monotonic() + HELD_SECONDS
        while True:
            reason = self._judge(envelope, certified, who)
            unknown = envelope.members_version > self._roster.version or not self._knows_its_round
            if reason != pb.REASON_EARLY or not unknown or time.monotonic() > end:
                return reason
            await asyncio.sleep(0.1)

    def _judge(self, envelope: "pb.Envelope", certified: str | None, who: str) -> "pb.Reason":
        if self.guard.is_cut_off(who, envelope.round):
            return pb.REASON_CUT_OFF
        if certified not in (None, envelope.sender):
            return pb.REASON_WRONG_SENDER
        if envelope.run != self._codec.terms.run:
            return pb.REASON_WRONG_RUN
        if self.stages and envelope.stage not in self.stages:
            return pb.REASON_WRONG_STAGE
        if envelope.members_version > self._roster.version:
            self.on_newer_members()
        if not self._knows_its_round:
            return pb.REASON_EARLY
        reason = self._mailbox.admits(envelope.round, envelope.stage, envelope.sender)
        if reason in (pb.REASON_STALE, pb.REASON_EARLY, pb.REASON_DUPLICATE):
            return reason
        if envelope.sender not in self._roster.neighbours(self._peer, envelope.round):
            # One of us has an older member list: the newer one is on its way.
            newer = envelope.members_version > self._roster.version
            return pb.REASON_EARLY if newer else pb.REASON_NOT_A_NEIGHBOUR
        return pb.REASON_NONE

    def refuse(self, reason: "pb.Reason", detail: str, missing: tuple[bytes, ...] = ()) -> "pb.Receipt":
        self._traffic.refused[reason_name(reason)] += 1
        return pb.Receipt(reason=reason, detail=detail[:256], round=self._mailbox.round, missing=missing)


class _OverLimit(Exception):
    """A message that came too fast, or stopped coming."""

    def __init__(self, reason: "pb.Reason", detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail
