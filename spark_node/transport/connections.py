"""Connections to this round's neighbours: made when needed, watched once, closed when nobody needs them."""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc import aio

from spark_node.config import NetworkSettings, PackageSettings, SecuritySettings
from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.membership import Roster
from spark_node.security.identity import Role
from spark_node.security.tls import Security

_HANDSHAKE_MS = 20_000
"""The time that a connection has to show a certificate."""
_STANDING = "/spark.v1.Peer/Standing"


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


class Connections:
    """One peer's connections, one a neighbour: by its address, and as whom it must show itself there."""

    def __init__(
        self, roster: Roster, security: Security, package: PackageSettings, network: NetworkSettings, run: str
    ) -> None:
        self._roster, self._security, self._run = roster, security, run
        self._options = options(package, network)
        self._channels: dict[tuple[str, str], aio.Channel] = {}
        self._changes: dict[aio.Channel, tuple[grpc.ChannelConnectivity, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[Any]] = set()
        """What nobody waits for any more, but must not be cancelled (`_let_end`)."""

    def __contains__(self, peer: str) -> bool:
        return self._line(peer) in self._channels

    def to(self, peer: str) -> aio.Channel:
        """The connection to a peer; a new one where there is none."""
        line = self._line(peer)
        if line not in self._channels:
            self._channels[line] = self._security.channel(line[0], Role.PEER, peer, self._options)
        return self._channels[line]

    def _line(self, peer: str) -> tuple[str, str]:
        return self._roster.address(peer), self._security.expected(Role.PEER, peer)

    async def keep(self, peers: Iterable[str]) -> None:
        """Close all others, and those that broke.

        gRPC waits ever longer before it makes a broken one again, and a neighbour that was started again meanwhile
        would seem to be gone still.
        """
        needed = {self._line(peer) for peer in peers}
        for line, channel in list(self._channels.items()):
            if line not in needed or channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await self._close(self._channels.pop(line))

    async def close(self) -> None:
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

    async def changed(self, channel: aio.Channel, state: grpc.ChannelConnectivity) -> None:
        """Until the connection's state is another one.

        One watch a connection, for all stages and rounds: it ends when the state changes, which on a sound connection
        is when it is closed (`_let_end` says why it is not cancelled before).
        """
        seen, change = self._changes.get(channel, (None, None))
        if change is None or change.done() or seen is not state:
            change = asyncio.create_task(channel.wait_for_state_change(state))
            self._changes[channel] = state, change
        await asyncio.shield(change)

    async def standing_of(self, channel: aio.Channel, seconds: float) -> "pb.Receipt":
        """Where a neighbour says that it is."""
        call = channel.unary_unary(
            _STANDING,
            request_serializer=pb.StandingRequest.SerializeToString,
            response_deserializer=pb.Receipt.FromString,
        )

        async def answer() -> "pb.Receipt":
            receipt: pb.Receipt = await call(pb.StandingRequest(run=self._run), timeout=2 * seconds)
            return receipt

        self._let_end(answering := asyncio.create_task(answer()))
        async with asyncio.timeout(seconds):  # gRPC's own end of it may be late (launch/scheduling.py)
            return await asyncio.shield(answering)
