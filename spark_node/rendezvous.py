"""A peer's line to the orchestrator: join, keep the lease, learn of other members, leave.

Training never waits for it: while the orchestrator is away, rounds go on with the members there are.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc import aio

from spark_node.config import TopologySettings
from spark_node.errors import ConfigError
from spark_node.generated.spark.v1 import orchestrator_pb2 as pb
from spark_node.generated.spark.v1 import orchestrator_pb2_grpc as rpc
from spark_node.membership import Roster
from spark_node.security.identity import Role
from spark_node.security.tls import ORCHESTRATOR, Security, trouble_with

log = logging.getLogger(__name__)

_CALL_SECONDS = 30.0
_RETRY_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
"""The most that a round waits for an orchestrator that has answered so far; one that is silent is not waited for."""
_WAITING_SECONDS, _QUIET_SECONDS = 1.0, 60.0
"""The longest between two renewals, before the start and after it."""


class JoinRefused(ConfigError):
    """The orchestrator does not take this peer; the message says why and what to do."""


async def patiently(target: str, call: Callable[[], Awaitable[Any]], patience: float) -> Any:
    """The orchestrator's answer to a call, asked for again while it is away; ConfigError after `patience` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience
    while True:
        try:
            return await call()
        except aio.AioRpcError as error:
            denied = error.code() is grpc.StatusCode.PERMISSION_DENIED
            trouble = trouble_with(error) or (f"it refuses us: {error.details()}" if denied else "")
            if trouble:
                raise JoinRefused(f"network.orchestrator = {target!r}: {trouble}") from None
            if loop.time() > end:
                said = f"network.orchestrator = {target!r}: not reached in {patience:.0f} s"
                raise ConfigError(f"{said} ({error.code().name}); is it running?") from None
            await asyncio.sleep(_RETRY_SECONDS)


class Rendezvous:
    """One peer's membership of a run."""

    def __init__(
        self, orchestrator: str, name: str, address: str, metrics_address: str, signature: str, security: Security
    ) -> None:
        self._target = orchestrator
        self._member = pb.Member(name=name, address=address, metrics_address=metrics_address)
        self._signature = signature
        self._channel = security.channel(
            orchestrator, Role.ORCHESTRATOR, ORCHESTRATOR, [("grpc.max_receive_message_length", 2**25)]
        )
        self._stub = rpc.OrchestratorStub(self._channel)
        self._lease = 5.0
        self._due = 0.0
        """When the lease should be renewed next, by the event loop's clock."""
        self._hurry = asyncio.Event()
        self.started = asyncio.Event()
        self.roster: Roster | None = None
        self.run = ""
        self.furthest = self.latest = 0
        """The latest round that any member had reported, when we joined and when we last heard."""
        self._held: tuple[int, ...] = ()
        self.round = 0
        self.bytes_sent = self.bytes_received = 0
        self._reporting: asyncio.Task[None] | None = None
        self._answers = True

    @property
    def control_bytes(self) -> int:
        """What was exchanged with the orchestrator, both ways."""
        return self.bytes_sent + self.bytes_received

    def _count(self, request: Message, reply: Message) -> None:
        self.bytes_sent += request.ByteSize()
        self.bytes_received += reply.ByteSize()

    async def ask_run(self, patience: float) -> str:
        """Which run the orchestrator has; waits for it up to `patience` seconds."""
        request = pb.DescribeRequest(version=2**63)
        reply = await patiently(self._target, lambda: self._stub.Describe(request, timeout=_CALL_SECONDS), patience)
        self._count(request, reply)
        return str(reply.run.run)

    async def join(self, patience: float, held: Sequence[int] = ()) -> Roster:
        """Take part; waits for the orchestrator up to `patience` seconds. `held`: rounds of our checkpoints."""
        self._held = tuple(held)
        loop = asyncio.get_running_loop()
        end = loop.time() + patience
        while True:
            reply = await patiently(self._target, self._join, end - loop.time())
            # A name is free again when the lease of the process that had it has run out.
            if reply.refusal != pb.JOIN_REFUSAL_NAME_TAKEN or loop.time() > end:
                break
            await asyncio.sleep(_RETRY_SECONDS)
        if reply.refusal:
            raise JoinRefused(f"the orchestrator at {self._target} refuses {self._member.name}: {reply.detail}")
        self._take(reply)
        assert self.roster is not None
        return self.roster

    async def _join(self) -> "pb.JoinReply":
        version = self.roster.version if self.roster is not None else 0
        request = pb.JoinRequest(
            run=self.run,
            member=self._member,
            signature=self._signature,
            round=self.round,
            version=version,
            held=self._held,
        )
        reply: pb.JoinReply = await self._stub.Join(request, timeout=_CALL_SECONDS)
        self._count(request, reply)
        return reply

    def _take(self, reply: "pb.JoinReply") -> None:
        described = reply.run
        self.run, self._lease = described.run, reply.lease_seconds
        if self.roster is None:
            settings = TopologySettings(described.topology, described.degree, described.fresh)
            self.roster = Roster(described.seed, settings)
        self.furthest = self.latest = reply.round
        self._learn([*reply.before, reply.members], described.started)
        self._renew_in(1 / 2)

    def _learn(self, lists: Sequence["pb.Members"], started: bool) -> None:
        assert self.roster is not None
        for members in lists:
            if members.version:
                self.roster.add(members.version, members.from_round, {m.name: m.address for m in members.members})
        if started:
            self.started.set()

    def hurry(self) -> None:
        """Renew now: somebody has a newer member list."""
        self._hurry.set()

    async def entering(self, k: int) -> None:
        """Report a round. Returns once the orchestrator has answered the report before.

        A new member list holds from two rounds after the latest that any peer has reported. So a peer that reports
        every round, and begins none before its last report was answered, knows each list before that holds.
        """
        self.round = k
        if self._reporting is not None:
            done, _ = await asyncio.wait({self._reporting}, timeout=_ANSWER_SECONDS if self._answers else 0.0)
            self._answers = self._answers and bool(done)
        self._reporting = asyncio.create_task(self._report())

    async def _report(self) -> None:
        try:
            await self._renew()
            self._answers = True
        except aio.AioRpcError:
            self._answers = False

    async def refresh(self) -> None:
        """Learn of the newest members now, where the orchestrator answers soon."""
        with contextlib.suppress(aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._renew()

    async def keep(self) -> None:
        """Renew the lease for ever; an orchestrator that does not know us (any more) is joined again.

        A round's report renews it too: where rounds are shorter than half a lease, nothing more is said.
        """
        loop = asyncio.get_running_loop()
        while True:
            while not self._hurry.is_set() and (wait := self._due - loop.time()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._hurry.wait()
            self._hurry.clear()
            try:
                await self._renew()
            except aio.AioRpcError as error:
                log.info("the orchestrator is away (%s); going on without it", error.code().name)
                await asyncio.sleep(_RETRY_SECONDS)

    def _renew_in(self, share: float) -> None:
        """The next renewal is due when that share of the lease is over; sooner before the start, which it tells of."""
        longest = _WAITING_SECONDS if not self.started.is_set() else _QUIET_SECONDS
        self._due = asyncio.get_running_loop().time() + min(share * self._lease, longest)

    async def _renew(self) -> None:
        assert self.roster is not None
        self._renew_in(1 / 6)  # where this call fails
        request = pb.RenewRequest(
            run=self.run,
            name=self._member.name,
            address=self._member.address,
            round=self.round,
            version=self.roster.version,
        )
        reply: pb.RenewReply = await self._stub.Renew(request, timeout=_CALL_SECONDS)
        self._count(request, reply)
        if reply.known:
            self.latest = reply.round
            self._learn([*reply.before, reply.members], reply.started)
            self._renew_in(1 / 2)
            return
        again = await self._join()
        if again.refusal:
            log.warning("the orchestrator refuses to take this peer back: %s", again.detail)
        else:
            self._take(again)

    async def leave(self) -> None:
        """Say goodbye, once; an orchestrator that is away will notice by itself."""
        request = pb.LeaveRequest(run=self.run, name=self._member.name, address=self._member.address, round=self.round)
        try:
            await self._stub.Leave(request, timeout=2.0)
        except aio.AioRpcError:
            log.info("the orchestrator is away; left without a word")

    async def close(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        await self._channel.close(None)
