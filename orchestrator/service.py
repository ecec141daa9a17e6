"""The gRPC face of the registry: requests in, replies out, their bytes counted where they are (de)serialised."""

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from orchestrator.discovery import Metrics
from orchestrator.registry import Member, MemberList, Refused, Registry
from spark_node.generated.spark.v1 import orchestrator_pb2 as pb

MAX_REQUEST_BYTES = 64 * 1024
MAX_REPLY_BYTES = 2**25  # as much as peers take: the list of MAX_MEMBERS, at 300 bytes each

_SERVICE = pb.DESCRIPTOR.services_by_name["Orchestrator"]


class OrchestratorService:
    """The four calls of the protocol."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._sent: tuple[MemberList | None, pb.Members | None] = (None, None)

    async def Join(self, request: pb.JoinRequest, context: object) -> pb.JoinReply:
        """Take a peer in, or say why not."""
        asks = request.member
        member = Member(asks.name, asks.address, asks.metrics_address)
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

    async def Renew(self, request: pb.RenewRequest, context: object) -> pb.RenewReply:
        """Keep a peer's place."""
        known, news = self._registry.renew(request.run, request.name, request.address, request.round, request.version)
        return pb.RenewReply(
            known=known,
            started=self._registry.started,
            members=self._members(news),
            before=self._before(news, request.version),
        )

    async def Leave(self, request: pb.LeaveRequest, context: object) -> pb.LeaveReply:
        """Let a peer go."""
        self._registry.leave(request.run, request.name, request.address, request.round)
        return pb.LeaveReply()

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.DescribeReply:
        """Tell an observer."""
        news = self._registry.describe(request.version)
        return pb.DescribeReply(run=self._run(), members=self._members(news))

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


async def make_server(registry: Registry, metrics: Metrics, keepalive: float) -> grpc.aio.Server:
    """A server with the service, its health and its reflection; it still needs a port."""
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # a port in use is an error, not a share of its calls
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ("grpc.max_send_message_length", MAX_REPLY_BYTES),
            ("grpc.server.max_pending_requests", 10_000),  # all peers may come at once
            ("grpc.server.max_pending_requests_hard_limit", 20_000),
            ("grpc.http2.min_ping_interval_without_data_ms", int(keepalive * 500)),  # peers probe every `keepalive`
        ]
    )
    service = OrchestratorService(registry)
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
