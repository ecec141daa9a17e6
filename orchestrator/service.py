"""The gRPC face of the registry: requests in, replies out, their bytes counted where they are (de)serialised."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from orchestrator.discovery import Metrics
from orchestrator.registry import Member, MemberList, Refusal, Refused, Registry
from spark_node.generated.spark.v1 import orchestrator_pb2 as pb
from spark_node.security.identity import Role
from spark_node.security.limits import Rates
from spark_node.security.tls import NotAllowed, Security

MAX_REQUEST_BYTES = 64 * 1024
MAX_REPLY_BYTES = 2**25  # as much as peers take: the list of MAX_MEMBERS, at 300 bytes each

_HELD_SECONDS, _LOOK_SECONDS = 3.0, 0.1
"""How long the renewal of a peer that waits for the start is held, and between two looks whether that has come."""

_SERVICE = pb.DESCRIPTOR.services_by_name["Orchestrator"]


class OrchestratorService:
    """The four calls of the protocol."""

    def __init__(self, registry: Registry, security: Security, calls_per_second: float) -> None:
        self._registry, self._security = registry, security
        self._rates = Rates(calls_per_second)
        self._sent: tuple[MemberList | None, pb.Members | None] = (None, None)
        self._starting: asyncio.Task[None] | None = None

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        """Take a peer in, or say why not."""
        asks = request.member
        member = Member(asks.name, asks.address, asks.metrics_address)
        try:
            await self._identify(asks.name, context)
        except Refused as refused:
            self._registry.turn_away(asks.name, refused)
            return pb.JoinReply(refusal=pb.JoinRefusal.Name(refused.reason), detail=refused.detail)
        try:
            news = self._registry.join(
                request.run, member, request.signature, request.round, request.version, request.held
            )
        except Refused as refused:
            return pb.JoinReply(refusal=pb.JoinRefusal.Name(refused.reason), detail=refused.detail)
        return pb.JoinReply(
            run=self._run(),
            members=self._members(news),
            lease_seconds=self._registry.terms.lease,
            round=self._registry.furthest,
            before=self._before(news, request.version),
        )

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewReply:
        """Keep a peer's place. Before the start the answer waits a little for it: hundreds of peers wait, and ask."""
        await self._only(request.name, context)
        asked = request.run, request.name, request.address, request.round, request.version
        known, news = self._registry.renew(*asked)
        if known and not self._registry.started:
            await self._hold()
            known, news = self._registry.renew(*asked)
        return pb.RenewReply(
            known=known,
            started=self._registry.started,
            members=self._members(news),
            before=self._before(news, request.version),
            round=self._registry.furthest,
        )

    async def _hold(self) -> None:
        """Until the run starts, within bounds; all who wait share one look-out."""
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
        await asyncio.wait({self._starting}, timeout=min(_HELD_SECONDS, self._registry.terms.lease / 4))

    async def _start(self) -> None:
        while not self._registry.started:
            await asyncio.sleep(_LOOK_SECONDS)

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        """Let a peer go."""
        await self._only(request.name, context)
        self._registry.leave(request.run, request.name, request.address, request.round)
        return pb.LeaveReply()

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        """Tell an observer."""
        await self._only(None, context)
        news = self._registry.describe(request.version)
        return pb.DescribeReply(run=self._run(), members=self._members(news))

    async def _identify(self, name: str | None, context: Any) -> None:
        """Refused unless the caller is the peer of that name; without a name, unless it has any part in the run."""
        roles = (Role.PEER,) if name is not None else (Role.PEER, Role.OBSERVER)
        try:
            caller = self._security.joins(context, roles)
        except NotAllowed as error:
            known = error.reason == "wrong_role"
            raise Refused(Refusal.WRONG_IDENTITY if known else Refusal.UNAUTHENTICATED, error.detail) from None
        if not self._rates.allow(caller.uri if caller is not None else context.peer()):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls a second")
        if caller is not None and name not in (None, caller.name):
            detail = f"the certificate is of {caller.name}; join under that name"
            raise Refused(Refusal.WRONG_IDENTITY, detail)

    async def _only(self, name: str | None, context: Any) -> None:
        """End the call of anybody else."""
        try:
            await self._identify(name, context)
        except Refused as refused:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refused.detail)

    def _run(self) -> pb.RunDescription:
        terms = self._registry.terms
        return pb.RunDescription(
            run=terms.run,
            seed=terms.seed,
            topology=terms.topology.kind,
            degree=terms.topology.degree,
            fresh=terms.topology.fresh,
            started=self._registry.started,
            first_round=self._registry.first_round if self._registry.started else 0,
        )

    def _before(self, news: MemberList | None, version: int) -> list[pb.Members]:
        return [_message(found) for found in self._registry.before(news, version)]

    def _members(self, news: MemberList | None) -> pb.Members | None:
        """The list as a message; the last one is kept, since many ask for the same."""
        if news is None:
            return None
        if self._sent[0] is not news:
            self._sent = news, _message(news)
        return self._sent[1]


def _message(found: MemberList) -> pb.Members:
    members = [pb.Member(**vars(member)) for member in found.members]
    return pb.Members(version=found.version, from_round=found.from_round, members=members)


async def make_server(
    registry: Registry, metrics: Metrics, keepalive: float, security: Security, calls_per_second: float
) -> grpc.aio.Server:
    """A server with the service, its health and its reflection; it still needs a port."""
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # a port in use is an error, not a share of its calls
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ("grpc.max_send_message_length", MAX_REPLY_BYTES),
            ("grpc.server.max_pending_requests", 10_000),  # all peers may come at once
            ("grpc.server.max_pending_requests_hard_limit", 20_000),
            ("grpc.http2.min_ping_interval_without_data_ms", int(keepalive * 500)),  # peers probe every `keepalive`
            ("grpc.server_handshake_timeout_ms", 20_000),
            ("grpc.compression_enabled_algorithms_bitset", 1),  # none: what arrives is as large as it looks
        ]
    )
    service = OrchestratorService(registry, security, calls_per_second)
    handlers = {method.name: _handler(service, method, metrics) for method in _SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))
    healthy = health.aio.HealthServicer()
    for name in ("", _SERVICE.full_name):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection((_SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


def _handler(service: OrchestratorService, method: MethodDescriptor, metrics: Metrics) -> Any:
    bytes_in, bytes_out = (metrics.bytes.labels(method.name, direction) for direction in ("in", "out"))
    parse: Callable[[bytes], Any] = message_factory.GetMessageClass(method.input_type).FromString

    def read(raw: bytes) -> Any:
        bytes_in.inc(len(raw))
        return parse(raw)

    def write(reply: Any) -> bytes:
        raw: bytes = reply.SerializeToString()
        bytes_out.inc(len(raw))
        return raw

    return grpc.unary_unary_rpc_method_handler(
        getattr(service, method.name), request_deserializer=read, response_serializer=write
    )
