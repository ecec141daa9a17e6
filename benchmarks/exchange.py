"""Delivery of a package between two processes, beside a bare grpc.aio call that carries as many bytes.

Ours streams chunks with an envelope, puts them together within limits, judges the header and files the message; the
bare call is one unary message of bytes. Both go from one process to another over loopback, one call at a time, and
take turns within one run. Memory is the receiver's and the sender's growth (peak resident) while one message travels.
"""

import asyncio
import os
import secrets
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MIB = 2**20
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def terms_for(numbers: int) -> Any:
    from spark_node.config import PackageSettings
    from spark_node.model import ParameterLayout
    from spark_node.package.format import Terms

    layout = ParameterLayout(("w",), ((numbers,),))
    settings = PackageSettings(level=0, max_message_bytes=2**30, max_decoded_bytes=2**30)
    return Terms("benchmark", layout, layout, 10, settings)


def transport_for(peer: str, numbers: int, addresses: dict[str, str], security: Any = None) -> Any:
    """A peer's transport for weights of so many numbers, without encryption unless told."""
    from spark_node.config import NetworkSettings, SecuritySettings, TopologySettings
    from spark_node.membership import Roster
    from spark_node.package.peer import PeerCodec
    from spark_node.security.tls import Plaintext
    from spark_node.transport.grpc import GrpcTransport
    from spark_node.transport.traffic import Traffic

    roster = Roster(0, TopologySettings("ring", 2, False))
    roster.add(1, 1, addresses)
    codec = PeerCodec(terms_for(numbers), peer, 0)

    async def compute(work: Any, *arguments: Any, heavy: bool = False) -> Any:
        return await asyncio.to_thread(work, *arguments)

    limits = SecuritySettings(tls="off", pending_bytes=2**30)
    return GrpcTransport(peer, codec, roster, NetworkSettings(), Traffic(), compute, security or Plaintext(), limits)


async def receiver(numbers: int, ready: int) -> None:
    """The other process: our service behind a peer's options, and a bare one behind gRPC's own."""
    import grpc
    from grpc import aio

    from spark_node.config import NetworkSettings, SecuritySettings
    from spark_node.launch.service import Progress, Service
    from spark_node.memory import memory_of
    from spark_node.security.tls import Plaintext
    from spark_node.transport.connections import server_options
    from spark_node.transport.traffic import Traffic

    addresses = {"a": "127.0.0.1:1", "b": "127.0.0.1:1", "c": "127.0.0.1:1"}
    service = Service(Progress("b", models=1, reports=1), MIB, Plaintext(), Traffic())
    service.transport = transport = transport_for("b", numbers, addresses)
    await transport.enter(1)

    async def bare(data: bytes, _: Any) -> bytes:
        return b"ok"

    async def forget(_: bytes, __: Any) -> bytes:
        transport.mailbox._messages.clear()
        return b"ok"

    async def memory(_: bytes, __: Any) -> bytes:
        peak = next(
            line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
        )
        now = memory_of().get("resident_bytes", 0)
        Path("/proc/self/clear_refs").write_text("5")
        return f"{int(peak) * 1024} {now}".encode()

    calls = {"Bare": bare, "Forget": forget, "Memory": memory}
    handlers = {name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()}
    settings = transport.codec.terms.settings
    ours = aio.server(options=server_options(settings, NetworkSettings(), SecuritySettings(tls="off")))
    ours.add_generic_rpc_handlers((service.handler(),))
    plain = aio.server(options=UNLIMITED)
    plain.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", handlers),))
    ports = [str(server.add_insecure_port("127.0.0.1:0")) for server in (ours, plain)]
    await ours.start()
    await plain.start()
    os.write(ready, " ".join(ports).encode())
    os.close(ready)
    await ours.wait_for_termination()


async def sender(port: int, plain_port: int, numbers: int, calls: int) -> dict[str, Any]:
    """Time both ways in turns."""
    import numpy as np
    import torch
    from grpc import aio

    from spark_node.learning.messages import Weights

    addresses = {"a": "127.0.0.1:1", "b": f"127.0.0.1:{port}", "c": "127.0.0.1:1"}
    transport = transport_for("a", numbers, addresses)
    await transport.enter(1)
    message = Weights(torch.from_numpy(np.random.default_rng(0).standard_normal(numbers, np.float32)))
    pieces = transport.codec.encode(message, 1, "b")
    size = sum(map(len, pieces))
    payload = secrets.token_bytes(size)
    async with aio.insecure_channel(f"127.0.0.1:{plain_port}", options=UNLIMITED) as channel:
        call = {name: channel.unary_unary(f"/bench.Bare/{name}") for name in ("Bare", "Forget", "Memory")}
        ours, bare = [], []
        await call["Memory"](b"")
        before = (await call["Memory"](b"")).split()
        for i in range(calls + 2):
            start = time.perf_counter()
            receipt = await transport._attempt("b", "weights", 1, message, pieces)
            ours.append(time.perf_counter() - start)
            assert receipt.reason == 0, receipt
            if i == 0:
                after = (await call["Memory"](b"")).split()
            await call["Forget"](b"")
            start = time.perf_counter()
            await call["Bare"](payload)
            bare.append(time.perf_counter() - start)
    await transport.close()
    mine, plain = statistics.median(ours[2:]), statistics.median(bare[2:])
    return {
        "MiB": size / MIB,
        "calls": calls,
        "ours_ms": 1e3 * mine,
        "bare_ms": 1e3 * plain,
        "ours_MiB/s": size / MIB / mine,
        "bare_MiB/s": size / MIB / plain,
        "share_%": 100 * plain / mine,
        "receiver_MiB": (int(after[0]) - int(before[1])) / MIB,
    }


def measure(size: int, calls: int) -> dict[str, Any]:
    """A fresh pair of processes; the receiver is forked before this one starts gRPC, in a child of its own."""
    numbers = (size - 300) // 4
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            asyncio.run(receiver(numbers, writing))
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        port, plain_port = map(int, pipe.read().split())
    try:
        return asyncio.run(sender(port, plain_port, numbers, calls))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def isolated(size: int, calls: int) -> dict[str, Any]:
    """Each size in a process of its own: gRPC must not run where we fork."""
    import json

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writing, json.dumps(measure(size, calls)).encode())
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not found:
        raise RuntimeError(f"the measurement of {size} bytes failed")
    row: dict[str, Any] = json.loads(found)
    return row


def main() -> None:
    import torch

    import spark_node.launch.peer  # noqa: F401  everything that the children need, loaded once
    from benchmarks.common import arguments, report
    from spark_node.memory import tune_allocator

    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    tune_allocator()  # as a host does before it forks its peers; the bare calls have the same
    sizes = [(64 * 1024, 400), (MIB, 300), (8 * MIB, 80), (100 * MIB, 6)]
    if options.quick:
        sizes = [(MIB, 10), (8 * MIB, 3)]
    report("exchange", [isolated(size, calls) for size, calls in sizes], options.json)


if __name__ == "__main__":
    main()
