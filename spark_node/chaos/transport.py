"""The transport of a peer that plays along: what it sends is lost or damaged as the order of the day says."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

from spark_node.chaos.order import StandingOrder
from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.learning.messages import Message
from spark_node.transport.grpc import GrpcTransport


class ChaoticTransport(GrpcTransport):
    """Only sending is touched: a cut works both ways because both sides read the same order."""

    def __init__(self, *arguments: Any, order: Path, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._order, self._random = StandingOrder(order), Random(self.peer)

    async def _attempt(self, peer: str, stage: str, k: int, message: Message, pieces: list[bytes]) -> "pb.Receipt":
        order = self._order.now()
        if order.separates(self.peer, peer):
            self.traffic.rejected["cut off on purpose"] += 1
            await asyncio.Event().wait()  # silence; the sender's own deadline ends it
        if self._random.random() < order.corrupt.get(self.peer, 0.0):
            self.traffic.rejected["damaged on purpose"] += 1
            pieces = [damage(b"".join(pieces), self._random)]
        return await super()._attempt(peer, stage, k, message, pieces)


def damage(data: bytes, random: Random) -> bytes:
    """The same bytes but for one bit."""
    damaged = bytearray(data)
    damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return bytes(damaged)
