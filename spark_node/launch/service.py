"""What a peer answers: neighbours that deliver, members that come late, observers."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from typing import Any

import grpc
from torch import Tensor

from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.learning.messages import Weights
from spark_node.memory import MemoryMeter
from spark_node.package.chunks import split
from spark_node.package.format import Terms
from spark_node.package.writer import encode
from spark_node.security.identity import Identity, Role
from spark_node.security.tls import NotAllowed, Security
from spark_node.transport.grpc import GrpcTransport
from spark_node.transport.reception import HELD_SECONDS, Arriving
from spark_node.transport.traffic import REASON_BY_NAME, Traffic

MOST_HELD = 64
"""Messages that wait for this peer to join."""
SENDERS, OBSERVERS = (Role.PEER,), (Role.OBSERVER,)
"""Whose certificates may deliver messages, and whose may follow a peer and fetch its models."""


class Progress:
    """What observers may ask a peer: its state, its finished rounds, its models of the last few."""

    def __init__(self, name: str, models: int, reports: int) -> None:
        """`models`, `reports`: how many finished rounds' are kept."""
        self.name, self.state, self.round = name, "joining", 0
        self._reports: deque[tuple[int, bytes]] = deque(maxlen=reports)
        """Rounds, and what is said of them: as bytes they take a tenth of what they take as objects."""
        self._models: OrderedDict[int, Tensor] = OrderedDict()
        self._most_models = models
        self._changed, self._closed = asyncio.Condition(), False
        self.control: Callable[[], int] = lambda: 0
        self.memory = MemoryMeter()

    async def set(self, state: str, k: int | None = None) -> None:
        async with self._changed:
            self.state, self.round = state, self.round if k is None else k
            self._changed.notify_all()

    async def finished(self, report: "pb.RoundReport", w: Tensor) -> None:
        async with self._changed:
            self._reports.append((report.round, pb.Progress(rounds=[report]).SerializeToString()))
            self.keep_model(report.round, w)
            self._changed.notify_all()

    async def close(self) -> None:
        """Nothing more will happen: whoever follows is told the rest, and then that this is the end."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def keep_model(self, k: int, w: Tensor) -> None:
        """For whoever asks; the oldest go."""
        self._models[k] = w
        while len(self._models) > self._most_models:
            self._models.popitem(last=False)

    def model(self, k: int) -> tuple[int, Tensor] | None:
        """The model of a round, or with k = 0 the newest, and its round."""
        k = k or max(self._models, default=0)
        return (k, self._models[k]) if k in self._models else None

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Everything after a round, and then each change as it happens, until the peer ends.

        Each is a pb.Progress as it goes over the wire, where messages that follow each other are one: reports are
        serialised once, when they are made.
        """
        said: tuple[str, int, int] | None = None
        memory: dict[str, int] = {}

        def now() -> tuple[str, int, int]:
            return self.state, self.round, self._reports[-1][0] if self._reports else 0

        while True:
            async with self._changed:
                while said == now():
                    if self._closed:
                        return
                    await self._changed.wait()
                said = now()
                fresh = [(k, report) for k, report in self._reports if k > after]
            after = max([after, *(k for k, _ in fresh)])
            if any(k > 1 for k, _ in fresh):  # in the first round not everything is there yet
                memory = await asyncio.to_thread(self.memory.now)
            state, k, _ = said
            here = pb.Progress(name=self.name, state=state, round=k, rounds=(), control_bytes=self.control(), **memory)
            yield b"".join([here.SerializeToString(), *(report for _, report in fresh)])


class Service:
    """The gRPC face of a peer. Deliveries come as bytes (transport/frames.py), and progress goes as bytes."""

    def __init__(self, progress: Progress, chunk_bytes: int, security: Security, traffic: Traffic) -> None:
        self._progress, self._chunk_bytes = progress, chunk_bytes
        self._security, self._traffic = security, traffic
        self._held = 0
        self.transport: GrpcTransport | None = None
        self.terms: Terms | None = None

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server is given."""
        receipt = pb.Receipt.SerializeToString
        return grpc.method_handlers_generic_handler(
            pb.DESCRIPTOR.services_by_name["Peer"].full_name,
            {
                "Deliver": grpc.stream_unary_rpc_method_handler(self.Deliver, response_serializer=receipt),
                "DeliverWhole": grpc.unary_unary_rpc_method_handler(self.DeliverWhole, response_serializer=receipt),
                "Standing": grpc.unary_unary_rpc_method_handler(self.Standing, pb.StandingRequest.FromString, receipt),
                "Model": grpc.unary_stream_rpc_method_handler(
                    self.Model, pb.ModelRequest.FromString, pb.ModelReply.SerializeToString
                ),
                "Follow": grpc.unary_stream_rpc_method_handler(self.Follow, pb.FollowRequest.FromString),
            },
        )

    async def Deliver(self, request_iterator: AsyncIterator[bytes], context: Any) -> "pb.Receipt":
        return await self._take(request_iterator, context)

    async def DeliverWhole(self, request: bytes, context: Any) -> "pb.Receipt":
        return await self._take(request, context)

    async def _take(self, arriving: Arriving, context: Any) -> "pb.Receipt":
        try:
            caller = self._security.caller(context, SENDERS)
        except NotAllowed as error:
            self._traffic.refused[error.reason] += 1
            if self.transport is not None and error.over is not None:
                await self.transport.reception.dismiss(error.over)
            return pb.Receipt(reason=REASON_BY_NAME[error.reason], detail=error.detail)
        if self.transport is None and not await self._joined():
            return pb.Receipt(reason=pb.REASON_EARLY, detail="this peer has not joined yet")
        assert self.transport is not None
        if caller is None:
            return await self.transport.reception.receive(arriving, None, context.peer())
        self.transport.reception.welcome(caller)
        return await self.transport.reception.receive(arriving, caller.name, context.peer())

    async def _joined(self) -> bool:
        """Whether this peer knows its run: a neighbour that heard of the start first is made to wait a little."""
        end = time.monotonic() + HELD_SECONDS
        while self.transport is None and self._held < MOST_HELD and time.monotonic() < end:
            self._held += 1
            try:
                await asyncio.sleep(0.1)
            finally:
                self._held -= 1
        return self.transport is not None

    async def Standing(self, request: "pb.StandingRequest", context: Any) -> "pb.Receipt":
        await self._admit(context, SENDERS)
        if self.transport is None:
            return pb.Receipt(reason=pb.REASON_EARLY)
        if request.run != self.transport.codec.terms.run:
            return self.transport.reception.refuse(pb.REASON_WRONG_RUN, "another run")
        return self.transport.reception.standing()

    async def _admit(self, context: Any, roles: Collection[Role]) -> Identity | None:
        """Who calls, where that is known; the call ends here unless it is one of these roles."""
        try:
            return self._security.caller(context, roles)
        except NotAllowed as error:
            self._traffic.refused[error.reason] += 1
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, error.detail)
            raise

    async def Model(self, request: "pb.ModelRequest", context: Any) -> AsyncIterator["pb.ModelReply"]:
        caller = await self._admit(context, (*OBSERVERS, *SENDERS))
        found = self._progress.model(request.round)
        if found is None or self.terms is None or self.transport is None or request.run != self.terms.run:
            yield pb.ModelReply(found=False)
            return
        k, w = found
        member = request.member if caller is None else caller.name if caller.role is Role.PEER else ""
        exact = replace(self.terms, settings=replace(self.terms.settings, weights="lossless"))
        coded = await asyncio.to_thread(encode, Weights(w), exact, k=k, sender=self._progress.name)
        for chunk in split(coded.wire(), self._chunk_bytes):
            reply = pb.ModelReply(found=True, chunk=chunk)
            if member in self.transport.roster.members(k):  # observers' models are not traffic of the run
                self._traffic.sent[(member, "weights")] += reply.ByteSize()
            else:
                self._traffic.observed["model"] += reply.ByteSize()
            yield reply

    async def Follow(self, request: "pb.FollowRequest", context: Any) -> AsyncIterator[bytes]:
        await self._admit(context, OBSERVERS)
        async for progress in self._progress.follow(request.after_round):
            self._traffic.observed["progress"] += len(progress)
            yield progress
