"""Thousands of connections, one after the other: what does each leave behind at either end?

Neighbours change every round, so a peer makes and takes new connections all its life. Two processes with a peer's
transport and service over mutual TLS: connect, watch the connection, ask where the other stands (and once more, but
without waiting for the answer, as when a late neighbour's message comes after all), close. Told as a change for each
connection, in four parts of the time: bytes that the process has from malloc, and blocks that the interpreter has from
its own pools. What fills up once stops; a leak does not.

With glibc's caches of freed blocks, one a thread, and without them, as `spark-dfl` starts its peers.
"""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spark_node.memory import held

PARTS = 4
CALLER, CALLED = "peer-000", "peer-001"


def look() -> tuple[int, int]:
    """Bytes that this process has from malloc, and blocks that the interpreter has given out."""
    gc.collect()
    found = held()
    return found["malloc_bytes"], found["python_blocks"]


def _transport(name: str, certs: Path, port: int) -> tuple[Any, Any]:
    from benchmarks.exchange import transport_for
    from spark_node.security.identity import Role
    from spark_node.security.tls import MutualTls

    security = MutualTls(certs, Role.PEER, name)
    addresses = {CALLER: "127.0.0.1:1", CALLED: f"127.0.0.1:{port}", "peer-002": "127.0.0.1:1"}
    return transport_for(name, 100, addresses, security), security


async def called(certs: Path, ready: int) -> None:
    """The process that is connected to; beside its own service it tells what it holds."""
    import grpc
    from grpc import aio

    from spark_node.config import NetworkSettings, PackageSettings, SecuritySettings
    from spark_node.launch.service import Progress, Service
    from spark_node.transport.connections import server_options
    from spark_node.transport.traffic import Traffic

    transport, security = _transport(CALLED, certs, 1)
    service = Service(Progress(CALLED, models=1, reports=1), 2**20, security, Traffic())
    service.transport = transport
    await transport.enter(1)

    async def tell(_: bytes, __: Any) -> bytes:
        return json.dumps(look()).encode()

    handlers = {"Held": grpc.unary_unary_rpc_method_handler(tell)}
    server = aio.server(options=server_options(PackageSettings(), NetworkSettings(), SecuritySettings()))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Connections", handlers),))
    server.add_generic_rpc_handlers((service.handler(),))
    port = security.listen(server, "127.0.0.1:0")
    await server.start()
    os.write(ready, str(port).encode())
    os.close(ready)
    await server.wait_for_termination()


async def caller(certs: Path, port: int, count: int) -> list[dict[str, float]]:
    """Connect again and again; a row for each part of the time."""
    transport, _ = _transport(CALLER, certs, port)
    await transport.enter(1)
    looks = []
    for i in range(count + 1):
        if i % (count // PARTS) == 0:
            there = await transport.connections.to(CALLED).unary_unary("/bench.Connections/Held")(b"")
            await transport.close()
            await asyncio.sleep(0.2)  # gRPC's threads have finished closing
            looks.append((*look(), *json.loads(there)))
        await _visit(transport)
        await transport.close()
    names = "caller_bytes", "caller_blocks", "called_bytes", "called_blocks"
    per = count // PARTS
    return [
        {"connections": (part + 1) * per}
        | {name: (b - a) / per for name, a, b in zip(names, looks[part], looks[part + 1], strict=True)}
        for part in range(PARTS)
    ]


async def _visit(transport: Any) -> None:
    """What a peer does with a connection. Nothing here may refer to it when it is closed: no round does, either."""
    watching = asyncio.create_task(transport.life.watch(1, CALLED))
    await asyncio.sleep(0)  # it makes the connection, as in a round's first stage
    given_up = asyncio.create_task(transport.connections.standing_of(transport.connections.to(CALLED), 30.0))
    await asyncio.sleep(0.001)
    given_up.cancel()
    receipt = await transport.connections.standing_of(transport.connections.to(CALLED), 30.0)
    assert receipt.round == 1, receipt
    await asyncio.sleep(0.005)  # a round goes on for longer than an answer takes
    watching.cancel()


def both(count: int) -> list[dict[str, float]]:
    """Two processes; the one that is called is forked before this one starts gRPC."""
    import torch

    import spark_node.launch.peer  # noqa: F401  loaded once, as a host does
    from spark_node.memory import tune_allocator
    from spark_node.security.authority import make_run_folder

    torch.set_num_threads(1)
    tune_allocator()
    with tempfile.TemporaryDirectory() as folder:
        certs = Path(folder) / "certs"
        make_run_folder(certs, "run", (CALLER, CALLED), 1.0)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                asyncio.run(called(certs, writing))
            finally:
                os._exit(1)
        os.close(writing)
        try:
            with os.fdopen(reading, "rb") as pipe:
                port = int(pipe.read())
            return asyncio.run(caller(certs, port, count))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def measure(count: int, thread_caches: bool) -> list[dict[str, Any]]:
    """Rows of one pair of processes that are started with or without glibc's caches."""
    tunables = f"glibc.malloc.tcache_count={7 if thread_caches else 0}"
    command = [sys.executable, str(Path(__file__).resolve()), "--pair", str(count)]
    done = subprocess.run(command, env={**os.environ, "GLIBC_TUNABLES": tunables}, stdout=subprocess.PIPE, check=True)
    return [{"thread_caches": "yes" if thread_caches else "no", **row} for row in json.loads(done.stdout)]


def main() -> None:
    from benchmarks.common import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, help="connections (default: 8000; with --quick: 400)")
    parser.add_argument("--pair", type=int, help="one pair of processes as it is, its rows as JSON")
    options = parser.parse_args()
    if options.pair:
        print(json.dumps(both(options.pair)))
        return
    count = options.count or (400 if options.quick else 8000)
    report("connections", [row for caches in (True, False) for row in measure(count, caches)], options.json)


if __name__ == "__main__":
    main()
