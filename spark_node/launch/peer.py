"""One peer's process: its service, its place in the run, its rounds."""

import asyncio
import hashlib
import json
import logging
import signal
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import grpc
import torch
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from torch import Tensor, nn

from spark_node.config import Config
from spark_node.errors import ConfigError
from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.launch.slots import Slots
from spark_node.learning.algorithms import make_algorithm, make_terms
from spark_node.learning.messages import Weights
from spark_node.memory import give_back, memory_of
from spark_node.metrics import PeerMetrics, serve
from spark_node.model import ParameterLayout
from spark_node.node import Node, RoundResult, Timings
from spark_node.observe.accuracy import accuracy
from spark_node.package.chunks import split
from spark_node.package.format import Terms
from spark_node.package.peer import PeerCodec
from spark_node.package.writer import encode
from spark_node.rendezvous import Rendezvous
from spark_node.security.identity import Role
from spark_node.security.tls import NotAllowed, Security, security_of
from spark_node.transport.grpc import REASON_BY_NAME, GrpcTransport, Traffic, server_options

log = logging.getLogger(__name__)

SENDERS, OBSERVERS = (Role.PEER,), (Role.OBSERVER,)
"""Whose certificates may deliver messages, and whose may follow a peer and fetch its models."""


@dataclass(frozen=True)
class PeerJob:
    """What a peer starts with."""

    name: str
    config: Config
    module: nn.Module
    inputs: Tensor
    labels: Tensor
    classes: int
    port: int = 0
    test: tuple[Tensor, Tensor] | None = None
    """Test samples, where the peer has any."""
    linger: float | None = None
    """Seconds to go on answering after the last round; None: until SIGTERM."""


def signature(config: Config, module: nn.Module) -> str:
    """Of the model and of every setting that all peers of a run must share."""
    shared = {name: asdict(getattr(config, name)) for name in ("model", "learning", "momentum", "distillation")}
    wire = asdict(config.package)
    for local in ("level", "chunk_bytes", "max_message_bytes", "max_decoded_bytes", "factor_cache_bytes", "in_memory"):
        del wire[local]
    said = {**shared, "package": wire, "algorithm": config.run.algorithm, "rounds": config.run.rounds}
    text = ParameterLayout.of(module).signature + json.dumps(said, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Progress:
    """What observers may ask a peer: its state, its finished rounds, its models of the last few."""

    def __init__(self, name: str, history: int) -> None:
        self.name, self.state, self.round = name, "joining", 0
        self.reports: list[pb.RoundReport] = []
        self._models: OrderedDict[int, Tensor] = OrderedDict()
        self._history = history
        self._changed = asyncio.Condition()
        self.control: Callable[[], int] = lambda: 0

    async def set(self, state: str, k: int | None = None) -> None:
        async with self._changed:
            self.state, self.round = state, self.round if k is None else k
            self._changed.notify_all()

    async def finished(self, report: "pb.RoundReport", w: Tensor) -> None:
        async with self._changed:
            self.reports.append(report)
            self._models[report.round] = w
            while len(self._models) > self._history:
                self._models.popitem(last=False)
            self._changed.notify_all()

    def model(self, k: int) -> Tensor | None:
        return self._models.get(k)

    async def follow(self, after: int) -> AsyncIterator["pb.Progress"]:
        """Everything after a round, and then each change as it happens."""
        said: tuple[str, int, int] | None = None
        memory: dict[str, int] = {}

        def now() -> tuple[str, int, int]:
            return self.state, self.round, len(self.reports)

        while True:
            async with self._changed:
                while said == now():
                    await self._changed.wait()
                said = now()
                fresh = [report for report in self.reports if report.round > after]
            after = max([after, *(report.round for report in fresh)])
            if fresh:  # the kernel walks all pages to answer, so it is not asked at every change
                memory = await asyncio.to_thread(memory_of)
            yield pb.Progress(
                name=self.name,
                state=said[0],
                round=said[1],
                rounds=fresh,
                control_bytes=self.control(),
                **memory,
            )


class Service:
    """The gRPC face of a peer. Deliveries come as bytes (transport/frames.py), everything else as messages."""

    def __init__(self, progress: Progress, chunk_bytes: int, security: Security, traffic: Traffic) -> None:
        self._progress, self._chunk_bytes = progress, chunk_bytes
        self._security, self._traffic = security, traffic
        self.transport: GrpcTransport | None = None
        self.terms: Terms | None = None

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server is given."""
        receipt, progress = pb.Receipt.SerializeToString, pb.Progress.SerializeToString
        return grpc.method_handlers_generic_handler(
            pb.DESCRIPTOR.services_by_name["Peer"].full_name,
            {
                "Deliver": grpc.stream_unary_rpc_method_handler(self.Deliver, response_serializer=receipt),
                "DeliverWhole": grpc.unary_unary_rpc_method_handler(self.DeliverWhole, response_serializer=receipt),
                "Model": grpc.unary_stream_rpc_method_handler(
                    self.Model, pb.ModelRequest.FromString, pb.ModelReply.SerializeToString
                ),
                "Follow": grpc.unary_stream_rpc_method_handler(self.Follow, pb.FollowRequest.FromString, progress),
            },
        )

    async def Deliver(self, request_iterator: AsyncIterator[bytes], context: Any) -> "pb.Receipt":
        try:
            caller = self._security.caller(context, SENDERS)
        except NotAllowed as error:
            self._traffic.refused[error.reason] += 1
            if self.transport is not None and error.over is not None:
                await self.transport.dismiss(error.over)
            return pb.Receipt(reason=REASON_BY_NAME[error.reason], detail=error.detail)
        if self.transport is None:
            return pb.Receipt(reason=pb.REASON_EARLY, detail="this peer has not joined yet")
        if caller is None:
            return await self.transport.receive(request_iterator, None, context.peer())
        self.transport.welcome(caller)
        return await self.transport.receive(request_iterator, caller.name, context.peer())

    async def DeliverWhole(self, request: bytes, context: Any) -> "pb.Receipt":
        async def alone() -> AsyncIterator[bytes]:
            yield request

        return await self.Deliver(alone(), context)

    async def _admit(self, context: Any, roles: Collection[Role]) -> None:
        """End the call unless the caller has one of these roles."""
        try:
            self._security.caller(context, roles)
        except NotAllowed as error:
            self._traffic.refused[error.reason] += 1
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, error.detail)

    async def Model(self, request: "pb.ModelRequest", context: Any) -> AsyncIterator["pb.ModelReply"]:
        await self._admit(context, OBSERVERS)
        w = self._progress.model(request.round)
        if w is None or self.terms is None or request.run != self.terms.run:
            yield pb.ModelReply(found=False)
            return
        exact = replace(self.terms, settings=replace(self.terms.settings, weights="lossless"))
        coded = await asyncio.to_thread(encode, Weights(w), exact, k=request.round, sender=self._progress.name)
        for chunk in split(coded.wire(), self._chunk_bytes):
            yield pb.ModelReply(found=True, chunk=chunk)

    async def Follow(self, request: "pb.FollowRequest", context: Any) -> AsyncIterator["pb.Progress"]:
        await self._admit(context, OBSERVERS)
        async for progress in self._progress.follow(request.after_round):
            yield progress


class PeerProcess:
    """Everything between the fork and the exit of one peer."""

    def __init__(self, job: PeerJob, slots: Slots | None) -> None:
        self._job, self._slots = job, slots
        self._config, self._network = job.config, job.config.network
        self._traffic, self._timings = Traffic(), Timings()
        self._security = security_of(job.config.security, Role.PEER, job.name)
        self._metrics = PeerMetrics(job.name, self._traffic, self._security)
        self._progress = Progress(job.name, self._network.model_history)
        self._service = Service(self._progress, job.config.package.chunk_bytes, self._security, self._traffic)
        self._heavy, self._light = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._reported: dict[str, Counter[Any]] = {}
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve, join, train, linger, leave. SIGTERM ends any of it cleanly."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        server, port = await self._serve()
        work = loop.create_task(self._work(port))
        stop = loop.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.wait({work, stop})  # whose failure is told above; the server is stopped all the same
            await server.stop(0.2)
            for pool in (self._heavy, self._light):
                pool.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> tuple[aio.Server, int]:
        server = aio.server(options=server_options(self._config.package, self._network, self._config.security))
        server.add_generic_rpc_handlers((self._service.handler(),))
        checks = health.aio.HealthServicer()
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        names = (pb.DESCRIPTOR.services_by_name["Peer"].full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        target = f"{self._network.host}:{self._job.port}"
        try:
            port = self._security.listen(server, target)
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(f"network.port = {self._job.port}: {target} is in use or not here; choose another, or 0")
        await server.start()
        return server, port

    async def _work(self, port: int) -> None:
        job, config = self._job, self._config
        metrics_address, metrics_server = "", None
        if self._network.metrics:
            metrics_server, _ = serve(self._metrics, self._network.host)
            metrics_address = f"{self._network.host}:{metrics_server.server_port}"
        line = Rendezvous(
            self._network.orchestrator,
            job.name,
            f"{self._network.host}:{port}",
            metrics_address,
            signature(config, job.module),
            self._security,
        )
        self._progress.control = lambda: line.control_bytes
        try:
            roster = await line.join(max(self._network.start_timeout, 10.0))
            self._metrics.of_run(line.run)
            layout = ParameterLayout.of(job.module)
            terms = make_terms(config, line.run, layout, job.classes)
            codec = PeerCodec(terms, job.name, config.run.seed, config.run.device)
            transport = GrpcTransport(
                job.name, codec, roster, self._network, self._traffic, self._compute, self._security, config.security
            )
            transport.on_newer_members = line.hurry
            self._metrics.cut_off = lambda: transport.guard.cut_off(transport.mailbox.round)
            self._service.terms, self._service.transport = terms, transport
            algorithm = make_algorithm(config, job.name, job.module, job.inputs, job.labels, self._timings)
            transport.stages = algorithm.stages
            node = Node(job.name, algorithm, roster, transport, self._compute, self._timings, classes=job.classes)
            line.round = lambda: self._progress.round
            keep = asyncio.create_task(line.keep())
            try:
                await self._progress.set("waiting")
                late = line.started.is_set()
                await line.started.wait()
                first = max(1, roster.newest_from_round) if late else 1
                log.info("takes part from round %d on, with %d members", first, len(roster.members(first)))
                await self._rounds(node, transport, line, first)
                await self._linger()
                await line.leave()
            finally:
                keep.cancel()
                await transport.close()
        finally:
            await line.close()
            if metrics_server is not None:
                metrics_server.shutdown()

    async def _rounds(self, node: Node, transport: GrpcTransport, line: Rendezvous, first: int) -> None:
        for k in range(first, self._config.run.rounds + 1):
            await self._progress.set("training", k)
            await line.entering(k)
            await transport.enter(k)
            start = time.perf_counter()
            result = await node.round(k)
            seconds = time.perf_counter() - start
            transport.deadlines.round_took(seconds)
            w = node.algorithm.weights
            await self._measure(w)
            self._metrics.finished(k, result.expected, result.used, seconds, result.seconds)
            self._metrics.facts = result.facts
            await self._progress.finished(self._report(k, result, seconds), w)
            log.info(
                "round %d: %d of %d neighbours, loss %.4f, %.2f s",
                k, result.used, result.expected, result.facts.get("loss", float("nan")), seconds,
            )  # fmt: skip
        await self._progress.set("finished")

    async def _measure(self, w: Tensor) -> None:
        """The peer's own accuracy, where it has test samples."""
        if self._job.test is not None:
            x, y = self._job.test
            self._metrics.accuracy = await self._compute(accuracy, self._job.module, w, x, y, heavy=True)

    def _report(self, k: int, result: RoundResult, seconds: float) -> "pb.RoundReport":
        sent, raw, messages = (self._since(n) for n in ("sent", "raw", "messages"))
        edges = [
            pb.EdgeBytes(peer=peer, kind=kind, sent=count, raw=raw[peer, kind], messages=messages[peer, kind])
            for (peer, kind), count in sorted(sent.items())
        ]
        return pb.RoundReport(
            round=k,
            expected=result.expected,
            used=result.used,
            seconds=seconds,
            stage_seconds=result.seconds,
            facts=result.facts,
            bytes=edges,
            refused=self._since("refused"),
            finished=time.time(),
        )

    def _since(self, name: str) -> Counter[Any]:
        """What a counter gained since the last round."""
        now = Counter(getattr(self._traffic, name))
        before, self._reported[name] = self._reported.get(name, Counter()), now
        return now - before

    async def _linger(self) -> None:
        """Observers, and neighbours that are a little behind, still ask."""
        if self._job.linger is None:
            await self._stop.wait()
        else:
            await asyncio.sleep(self._job.linger)

    async def _compute(self, work: Callable[..., Any], *arguments: Any, heavy: bool = False) -> Any:
        loop = asyncio.get_running_loop()
        if heavy:
            return await loop.run_in_executor(self._heavy, self._in_turn, work, arguments)
        return await loop.run_in_executor(self._light, work, *arguments)

    def _in_turn(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if self._slots is None:
            return work(*arguments)
        with self._slots.one():
            try:
                return work(*arguments)
            finally:
                give_back()


def run_peer(job: PeerJob, slots: Slots | None) -> None:
    """Blocks until the peer is done or was told to stop."""
    torch.set_num_threads(1)
    asyncio.run(_run(job, slots))


async def _run(job: PeerJob, slots: Slots | None) -> None:
    await PeerProcess(job, slots).run()
