"""Hostile bytes at the open port of a living peer: no crash, no stall, memory flat.

A process serves as a peer does, over mutual TLS. Another throws requests at its port, of kinds in turn:

    bytes        random bytes on a bare connection
    tls          a TLS record or a ClientHello with random contents
    http2        an HTTP/2 preface and random frames, without TLS
    frames       inside TLS with the certificate of a peer: an HTTP/2 preface and random frames
    content      sound calls of a certified peer with hostile content: random, cut, flipped or lying deliveries

An honest neighbour delivers a message every so often all the while and measures how long that takes. The table says how
many requests were made, what became of the content, the honest neighbour's slowest delivery, and the growth of memory.
"""

import asyncio
import os
import random
import signal
import ssl
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as spark-dfl does; it would log every handshake that fails

MIB = 2**20
NUMBERS, ROUND = 1000, 5
VICTIM, HONEST, HOSTILE = "b", "a", "c"
KINDS = ("bytes", "tls", "http2", "frames", "content")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
AT_ONCE = 16
"""Connections that are open at the same time."""


def settings() -> Any:
    """Limits as they are, but for rates: the question is what hostile bytes do, not that they are turned away early."""
    from spark_node.config import SecuritySettings

    return SecuritySettings(messages_per_second=1e9, strikes=1_000_000)


def terms() -> Any:
    from spark_node.config import PackageSettings
    from spark_node.model import ParameterLayout
    from spark_node.package.format import Terms

    layout = ParameterLayout(("w",), ((NUMBERS,),))
    return Terms("fuzz", layout, layout, 10, PackageSettings(max_message_bytes=2**20, max_decoded_bytes=2**22))


def messages() -> list[bytes]:
    """Deliveries of the honest neighbour's kind, which mutations start from."""
    import torch

    from spark_node.generated.spark.v1 import peer_pb2 as pb
    from spark_node.learning.messages import Weights
    from spark_node.package.peer import PeerCodec
    from spark_node.transport.frames import deliveries

    made = []
    for sender in (HONEST, HOSTILE):
        pieces = PeerCodec(terms(), sender, 0).encode(Weights(torch.zeros(NUMBERS)), ROUND, VICTIM)
        envelope = pb.Envelope(run="fuzz", round=ROUND, stage="weights", sender=sender)
        made.append(next(deliveries(envelope, pieces, MIB)))
    return made


async def serve(folder: Path, ready: int) -> None:
    """The victim: a peer's service with all its checks, over TLS."""
    from grpc import aio

    from spark_node.config import NetworkSettings, TopologySettings
    from spark_node.launch.service import Progress, Service
    from spark_node.membership import Roster
    from spark_node.package.peer import PeerCodec
    from spark_node.security.identity import Role
    from spark_node.security.tls import MutualTls
    from spark_node.transport.connections import server_options
    from spark_node.transport.grpc import GrpcTransport
    from spark_node.transport.traffic import Traffic

    security, network, limits, traffic = MutualTls(folder, Role.PEER, VICTIM), NetworkSettings(), settings(), Traffic()
    roster = Roster(0, TopologySettings("ring", 2, False))
    roster.add(1, 1, dict.fromkeys((HONEST, VICTIM, HOSTILE), "127.0.0.1:1"))

    async def compute(work: Any, *arguments: Any, heavy: bool = False) -> Any:
        return await asyncio.to_thread(work, *arguments)

    codec = PeerCodec(terms(), VICTIM, 0)
    transport = GrpcTransport(VICTIM, codec, roster, network, traffic, compute, security, limits)
    transport.reception.stages = ("weights",)
    await transport.enter(ROUND)
    service = Service(Progress(VICTIM, models=1, reports=1), MIB, security, traffic)
    service.transport = transport
    server = aio.server(options=server_options(terms().settings, network, limits))
    server.add_generic_rpc_handlers((service.handler(),))
    port = security.listen(server, "127.0.0.1:0")
    await server.start()
    os.write(ready, str(port).encode())
    os.close(ready)
    while True:  # a message is read as soon as it is there, as in a round; then the stage begins again
        await transport.gather("weights", ROUND, (), 0.05)
        transport.mailbox._closed.clear()
        await asyncio.sleep(0.01)


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Attacker:
    """Throws requests of one kind after the other."""

    def __init__(self, port: int, folder: Path, seed: int) -> None:
        self._port, self._folder, self._random = port, folder, random.Random(seed)
        self._context = ssl.create_default_context(cafile=str(folder / "authority.pem"))
        self._context.load_cert_chain(folder / "peer" / f"{HOSTILE}.pem", folder / "peer" / f"{HOSTILE}.key")
        self._context.set_alpn_protocols(["h2"])
        self._messages = messages()
        self.answers: Counter[str] = Counter()
        self._call: Any = None

    async def open(self) -> None:
        from spark_node.generated.spark.v1 import peer_pb2 as pb
        from spark_node.security.identity import Role
        from spark_node.security.tls import MutualTls

        mine = MutualTls(self._folder, Role.PEER, HOSTILE)
        self._channel = mine.channel(f"127.0.0.1:{self._port}", Role.PEER, VICTIM, [])
        calls = [self._channel.unary_unary, self._channel.stream_unary]
        whole, stream = (
            call(f"/spark.v1.Peer/{name}", response_deserializer=pb.Receipt.FromString)
            for call, name in zip(calls, ("DeliverWhole", "Deliver"), strict=True)
        )
        self._call = whole, stream

    async def close(self) -> None:
        await self._channel.close(None)

    async def request(self, kind: str) -> None:
        if kind == "content":
            await self._content()
        else:
            await self._raw(kind)

    async def _raw(self, kind: str) -> None:
        """Bytes on a connection of their own; whatever the other side does with it is right but to fall over."""
        secure: dict[str, Any] = (
            {"ssl": self._context, "server_hostname": f"{VICTIM}.1.peer.spark"} if kind == "frames" else {}
        )
        try:
            async with asyncio.timeout(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port, **secure)
                try:
                    writer.write(self._bytes(kind))
                    await writer.drain()
                    if writer.can_write_eof():
                        writer.write_eof()  # or the peer would wait for the rest of a record, as it should
                    with_answer = await reader.read(64)
                    self.answers["answered" if with_answer else "closed"] += 1
                finally:
                    writer.transport.abort()
        except (OSError, TimeoutError) as error:
            self.answers[type(error).__name__] += 1

    def _bytes(self, kind: str) -> bytes:
        draw = self._random
        if kind == "bytes":
            return draw.randbytes(draw.randrange(1, 4096))
        if kind == "tls":
            body = draw.randbytes(draw.randrange(1, 512))
            hello = b"\x01" + len(body).to_bytes(3, "big") + body
            record = hello if draw.random() < 0.5 else body
            return bytes([draw.choice([20, 21, 22, 23])]) + b"\x03\x03" + len(record).to_bytes(2, "big") + record
        frames = [self._frame() for _ in range(draw.randrange(1, 8))]
        return PREFACE + b"\0\0\0\x04\0\0\0\0\0" + b"".join(frames)

    def _frame(self) -> bytes:
        """An HTTP/2 frame: any type, any flags, a stream of low number, a body that is mostly as long as it says."""
        draw = self._random
        body = draw.randbytes(draw.choice([0, 4, 5, 8, 17, 200]))
        length = len(body) if draw.random() < 0.9 else draw.randrange(2**24)
        kind, flags, stream = draw.randrange(12), draw.randrange(256), draw.randrange(8)
        return length.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body

    async def _content(self) -> None:
        from grpc import aio

        from spark_node.transport.traffic import reason_name

        pieces = self._hostile()
        try:
            whole, stream = self._call
            call = whole(pieces[0], timeout=20) if len(pieces) == 1 else stream(iter(pieces), timeout=20)
            self.answers[reason_name((await call).reason)] += 1
        except aio.AioRpcError as error:
            self.answers[error.code().name.lower()] += 1

    def _hostile(self) -> list[bytes]:
        draw = self._random
        message = bytearray(draw.choice(self._messages))
        way = draw.randrange(5)
        if way == 0:
            return [draw.randbytes(draw.randrange(0, 2048))]
        if way == 1:
            return [bytes(message[: draw.randrange(len(message))])]
        for _ in range(draw.randrange(1, 20)):
            message[draw.randrange(len(message))] = draw.randrange(256)
        if way == 2:
            for _ in range(8):
                message[draw.randrange(min(120, len(message)))] ^= 1 << draw.randrange(8)
        if way == 3:
            cut = draw.randrange(len(message))
            return [bytes(message[:cut]), bytes(message[cut:]), draw.randbytes(64)]
        return [bytes(message)]


async def deliver_honestly(port: int, folder: Path, waits: list[float], stop: asyncio.Event) -> None:
    """What the honest neighbour notices: seconds for each of its messages, retries included."""
    from spark_node.generated.spark.v1 import peer_pb2 as pb
    from spark_node.security.identity import Role
    from spark_node.security.tls import MutualTls

    mine = MutualTls(folder, Role.PEER, HONEST)
    async with mine.channel(f"127.0.0.1:{port}", Role.PEER, VICTIM, []) as channel:
        call = channel.unary_unary("/spark.v1.Peer/DeliverWhole", response_deserializer=pb.Receipt.FromString)
        raw = messages()[0]
        while not stop.is_set():
            start = time.perf_counter()
            while True:
                receipt = await call(raw, timeout=30)
                if receipt.reason == pb.REASON_NONE:
                    break
                assert receipt.reason in (pb.REASON_DUPLICATE, pb.REASON_STALE), receipt
                await asyncio.sleep(0.01)
            waits.append(time.perf_counter() - start)
            await asyncio.sleep(0.05)


async def attack(port: int, pid: int, folder: Path, requests: int) -> list[dict[str, Any]]:
    """Kind after kind; a row each."""
    attacker = Attacker(port, folder, seed=0)
    await attacker.open()
    waits: list[float] = []
    stop = asyncio.Event()
    honest = asyncio.create_task(deliver_honestly(port, folder, waits, stop))
    rows = []
    try:
        for kind in KINDS:  # once around, so that growth is not that of first use
            await asyncio.gather(*(attacker.request(kind) for _ in range(AT_ONCE)))
        await asyncio.sleep(0.3)
        for kind in KINDS:
            count = requests // len(KINDS)
            attacker.answers.clear()
            waits.clear()
            before, start = resident(pid), time.perf_counter()
            for done in range(0, count, AT_ONCE):
                await asyncio.gather(*(attacker.request(kind) for _ in range(min(AT_ONCE, count - done))))
            seconds = time.perf_counter() - start
            await asyncio.sleep(0.3)
            rows.append(row(kind, count, seconds, attacker.answers, waits, resident(pid) - before))
            print(f"{kind}: {count} in {seconds:.0f} s", file=sys.stderr, flush=True)
            if honest.done():
                honest.result()
    finally:
        stop.set()
        await honest
        await attacker.close()
    return rows


def row(kind: str, count: int, seconds: float, answers: Counter[str], waits: list[float], grown: int) -> dict[str, Any]:
    common = ", ".join(f"{name} {times}" for name, times in answers.most_common(4))
    return {
        "kind": kind,
        "requests": count,
        "per_second": count / seconds,
        "honest_messages": len(waits),
        "honest_median_ms": 1e3 * statistics.median(waits) if waits else None,
        "honest_slowest_ms": 1e3 * max(waits) if waits else None,
        "grown_MiB": grown / MIB,
        "answers": common,
    }


def fuzz(requests: int) -> list[dict[str, Any]]:
    """Two processes: the victim is forked before this one starts gRPC."""
    from spark_node.security.authority import make_run_folder

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "certs"
        make_run_folder(folder, "fuzz", (HONEST, VICTIM, HOSTILE), 1.0)
        reading, writing = os.pipe()
        victim = os.fork()
        if victim == 0:
            os.close(reading)
            try:
                asyncio.run(serve(folder, writing))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(writing)
        try:
            with os.fdopen(reading, "rb") as pipe:
                said = pipe.read()
            if not said:
                raise RuntimeError("the peer could not begin to serve; what it said is above")
            port = int(said)
            found = asyncio.run(attack(port, victim, folder, requests))
            ended, _ = os.waitpid(victim, os.WNOHANG)
            if ended:
                raise RuntimeError("the peer has ended")
            return found
        finally:
            try:
                os.kill(victim, signal.SIGKILL)
                os.waitpid(victim, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def main() -> None:
    import spark_node.launch.peer  # noqa: F401  what the victim needs, loaded once
    from benchmarks.common import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="default: 100,000")
    options = parser.parse_args()
    report("port_fuzz", fuzz(500 if options.quick else options.requests), options.json)


if __name__ == "__main__":
    main()
