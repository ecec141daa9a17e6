"""A neighbour that takes a message but does not read it: its sender waits, and holds the message once."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
import torch
from grpc import aio

from spark_node.config import NetworkSettings, SecuritySettings, TopologySettings, load
from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.learning.algorithms import make_terms
from spark_node.learning.messages import Weights
from spark_node.membership import Roster
from spark_node.memory import held
from spark_node.model import ParameterLayout
from spark_node.package.peer import PeerCodec
from spark_node.security.tls import Plaintext
from spark_node.transport.connections import options
from spark_node.transport.grpc import GrpcTransport
from spark_node.transport.traffic import Traffic
from tests.network.isolation import isolated

MIB = 2**20
SLOW = ("peer-1", "peer-2", "peer-3")


async def serve(ready: int) -> None:
    """A service that says that it is there, reads the first chunk of what is delivered, and no other."""

    async def deliver(chunks: AsyncIterator[bytes], context: Any) -> bytes:
        await anext(chunks)
        await asyncio.sleep(3600)
        raise AssertionError

    async def standing(request: bytes, context: Any) -> bytes:
        return pb.Receipt(round=1).SerializeToString()

    handlers = {
        "Deliver": grpc.stream_unary_rpc_method_handler(deliver),
        "Standing": grpc.unary_unary_rpc_method_handler(standing),
    }
    settings = load(environment={})
    server = aio.server(options=options(settings.package, settings.network))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("spark.v1.Peer", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    os.write(ready, str(port).encode())
    os.close(ready)
    await server.wait_for_termination()


async def send_to_all(port: int) -> tuple[Traffic, int, int]:
    """What was counted, the bytes of the message, and the memory that it took while all neighbours were waited for."""
    module = torch.nn.Linear(2048, 4096)
    codec = PeerCodec(make_terms(load(environment={}), "monday", ParameterLayout.of(module), 2), "peer-0", 0)
    roster = Roster(0, TopologySettings("regular", 3, True))
    roster.add(1, 1, {"peer-0": "127.0.0.1:1"} | dict.fromkeys(SLOW, f"127.0.0.1:{port}"))
    traffic, network = Traffic(), NetworkSettings(deadline_floor=2.0, deadline_ceiling=5.0)

    async def compute(work: Any, *arguments: Any, heavy: bool = False) -> Any:
        return await asyncio.to_thread(work, *arguments)

    transport = GrpcTransport("peer-0", codec, roster, network, traffic, compute, Plaintext(), SecuritySettings())
    await transport.enter(1)
    message = Weights(torch.randn(2048 * 4096 + 4096))
    before = held()["malloc_bytes"]
    sending = [asyncio.create_task(transport.send(peer, "weights", 1, message)) for peer in SLOW]
    while codec.ready(message, 1) is None:
        await asyncio.sleep(0.05)
    encoded = sum(map(len, codec.ready(message, 1) or ()))
    await asyncio.sleep(2.0)
    assert not any(task.done() for task in sending)
    taken = held()["malloc_bytes"] - before
    await asyncio.gather(*sending)
    await transport.close()
    return traffic, encoded, taken


@isolated
def test_neighbours_that_do_not_read_cost_their_sender_the_message_once_and_one_deadline() -> None:
    reading, writing = os.pipe()
    if os.fork() == 0:
        asyncio.run(serve(writing))
    os.close(writing)
    traffic, encoded, taken = asyncio.run(asyncio.wait_for(send_to_all(int(os.read(reading, 8))), 120))
    assert encoded > 24 * MIB
    assert taken < encoded + len(SLOW) * 4 * MIB, f"{taken / MIB:.1f} MiB for {encoded / MIB:.1f}"
    assert traffic.rejected == {"late": 3}
    assert set(traffic.sent) == {(peer, "weights") for peer in SLOW}
