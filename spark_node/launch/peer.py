"""One peer's process: its service, its place in the run, its rounds."""

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from torch import Tensor, nn

from spark_node.chaos.transport import ChaoticTransport
from spark_node.checkpoint import Owner, Store
from spark_node.config import Config
from spark_node.errors import ConfigError, OutOfMemory
from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.launch.recovery import Recovery, remember_port, remembered_port
from spark_node.launch.samples import Room
from spark_node.launch.scheduling import in_the_background
from spark_node.launch.service import Progress, Service
from spark_node.launch.turns import Turns
from spark_node.learning.algorithm import Learner
from spark_node.learning.algorithms import make_algorithm, make_terms, signature
from spark_node.learning.solver import HERE
from spark_node.membership import Roster
from spark_node.memory import give_back, ran_out, tidy
from spark_node.metrics import PeerMetrics, port_of, serve
from spark_node.model import ParameterLayout
from spark_node.node import Node, RoundResult, Timings
from spark_node.observe.accuracy import accuracy
from spark_node.package.peer import PeerCodec
from spark_node.rendezvous import Rendezvous
from spark_node.security.identity import Role
from spark_node.security.tls import security_of
from spark_node.transport.connections import server_options
from spark_node.transport.grpc import GrpcTransport
from spark_node.transport.traffic import Traffic

if TYPE_CHECKING:
    from spark_node.distributed.sharded import Lead

log = logging.getLogger(__name__)


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
    checkpoints: Path | None = None
    """The folder of this peer's checkpoints; None: it keeps none."""
    learner: Learner | None = None
    """Who makes its algorithm; None: run.algorithm says."""
    metrics_port: int = 0
    room: Room | None = None
    """Where its inputs lie, if they lie where a host can keep them from its other peers."""


class PeerProcess:
    """Everything between the start and the end of one peer."""

    def __init__(
        self,
        job: PeerJob,
        turns: Turns | None = None,
        order: Path | None = None,
        lead: "Lead | None" = None,
        crowd: int = 1,
    ) -> None:
        self._job, self._turns, self._order, self._lead, self._crowd = job, turns, order, lead, crowd
        self._config, self._network = job.config, job.config.network
        self._traffic, self._timings = Traffic(), Timings()
        self._security = security_of(job.config.security, Role.PEER, job.name)
        codec = job.config.package.codec
        self._metrics = PeerMetrics(job.name, self._traffic, self._security, codec, job.config)
        self._progress = Progress(job.name, self._network.model_history, self._network.report_history)
        self._metrics.memory = self._progress.memory
        self._service = Service(self._progress, job.config.package.chunk_bytes, self._security, self._traffic)
        self._heavy, self._light = _one_thread(), _one_thread()
        self._reported: dict[str, Counter[Any]] = {}
        self._stop = asyncio.Event()
        self._leaves = False

    @property
    def progress(self) -> Progress:
        """Where the peer stands, for whoever has it in this process."""
        return self._progress

    def leave(self) -> None:
        """End what is going on, and say goodbye to the orchestrator; called in the peer's event loop."""
        self._leaves = True
        self._stop.set()

    async def run(self) -> None:
        """Serve, join, train, linger, leave. SIGTERM ends any of it cleanly, where the process is the peer's own."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        with in_the_background(self._crowd):
            server, port = await self._serve()
        work = loop.create_task(self._work(port))
        stop = loop.create_task(self._stop.wait())
        if self._lead is not None:
            self._lead.on_lost = lambda error: loop.call_soon_threadsafe(self._stop.set)  # told by whoever has the lead
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except Exception as error:
            if ran_out(error):
                raise OutOfMemory(self._without_memory(error)) from error
            raise
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.wait({work, stop})  # whose failure is told above; the server is stopped all the same
            await self._progress.close()
            await server.stop(0.2)
            for pool in (self._heavy, self._light):
                pool.shutdown(wait=False, cancel_futures=True)

    def _without_memory(self, error: Exception) -> str:
        saved, _ = self._metrics.checkpoints()
        kept = f"the checkpoint of round {saved} is kept" if saved else "there is no checkpoint yet"
        said = " ".join(str(error).split()) or type(error).__name__
        less = "let fewer peers compute at once (run.workers), put fewer on this machine, or give it more memory"
        return f"out of memory in round {self._progress.round} ({said}); {kept}; {less}"

    async def _serve(self) -> tuple[aio.Server, int]:
        server = aio.server(options=server_options(self._config.package, self._network, self._config.security))
        server.add_generic_rpc_handlers((self._service.handler(),))
        checks = health.aio.HealthServicer()
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        names = (pb.DESCRIPTOR.services_by_name["Peer"].full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        port = self._listen(server)
        remember_port(self._job.checkpoints, port)
        await server.start()
        return server, port

    def _listen(self, server: aio.Server) -> int:
        """The port that was asked for; else that of the peer's last life, if it is to be had; else a free one."""
        wanted = self._job.port
        for port in (wanted,) if wanted else (remembered_port(self._job.checkpoints), 0):
            with contextlib.suppress(RuntimeError):
                return self._security.listen(server, f"{self._network.host}:{port}")
        target = f"{self._network.host}:{wanted}"
        raise ConfigError(f"network.port = {wanted}: {target} is in use or not here; choose another, or 0")

    async def _serve_metrics(self) -> asyncio.Server:
        host, port = self._network.host, self._job.metrics_port
        try:
            return await serve(self._metrics, host, port)
        except OSError as error:
            wrong = f"network.metrics_port = {port}: {host}:{port} cannot be had ({error.strerror})"
            raise ConfigError(f"{wrong}; choose another, or 0") from None

    async def _work(self, port: int) -> None:
        job, config = self._job, self._config
        metrics_address, metrics_server = "", None
        if self._network.metrics:
            metrics_server = await self._serve_metrics()
            metrics_address = f"{self._network.host}:{port_of(metrics_server)}"
        line = Rendezvous(
            self._network.orchestrator,
            job.name,
            f"{self._network.host}:{port}",
            metrics_address,
            signature(config, job.module),
            self._security,
        )
        self._progress.control = lambda: line.control_bytes
        self._metrics.control = lambda: (line.bytes_sent, line.bytes_received)
        patience = max(self._network.start_timeout, self._network.lease + 10.0)
        try:
            store = await self._open_store(line, patience)
            roster = await line.join(patience, store.rounds if store is not None else ())
            self._metrics.of_run(line.run)
            transport, node, recovery = self._prepare(line, roster, store)
            keep = asyncio.create_task(line.keep())
            try:
                await self._progress.set("waiting")
                await line.started.wait()
                first, w = await recovery.begin()
                if first > 1:
                    self._progress.keep_model(first - 1, w)
                log.info("takes part from round %d on, with %d members", first, len(roster.members(first)))
                await self._rounds(node, transport, line, recovery, first)
                await self._linger()
                await line.leave()
            finally:
                keep.cancel()
                if self._leaves:
                    await line.leave()
                await transport.close()
        finally:
            await line.close()
            if metrics_server is not None:
                metrics_server.close()

    async def _open_store(self, line: Rendezvous, patience: float) -> Store | None:
        """The peer's checkpoints of the run that the orchestrator has."""
        job = self._job
        if job.checkpoints is None or not self._config.checkpoint.enabled:
            return None
        owner = Owner(await line.ask_run(patience), job.name, signature(self._config, job.module))
        store: Store = await self._compute(Store, job.checkpoints, owner, self._config.checkpoint.keep)
        return store

    def _prepare(self, line: Rendezvous, roster: Roster, store: Store | None) -> tuple[GrpcTransport, Node, Recovery]:
        """The peer's parts, once it knows the run."""
        job, config = self._job, self._config
        terms = make_terms(config, line.run, ParameterLayout.of(job.module), job.classes)
        codec = PeerCodec(terms, job.name, config.run.seed, config.run.device)
        transport = self._transport(codec, roster)
        transport.reception.on_newer_members = line.hurry
        self._metrics.cut_off = lambda: transport.reception.guard.cut_off(transport.mailbox.round)
        self._service.terms, self._service.transport = terms, transport
        parts = config, job.name, job.module, job.inputs, job.labels, self._timings
        algorithm = make_algorithm(*parts, self._lead or HERE) if job.learner is None else job.learner(*parts)
        transport.reception.stages = algorithm.stages
        node = Node(job.name, algorithm, roster, transport, self._compute, self._timings, classes=job.classes)
        rest = line, store, config.checkpoint, self._compute
        recovery = Recovery(node, codec, transport, *rest, classes=job.classes, rounds=config.run.rounds)
        self._metrics.checkpoints = lambda: (recovery.saved, recovery.failures)
        return transport, node, recovery

    def _transport(self, codec: PeerCodec, roster: Roster) -> GrpcTransport:
        network, security = self._network, self._config.security
        parts = self._job.name, codec, roster, network, self._traffic, self._compute, self._security, security
        if self._network.chaos and self._order is not None:
            return ChaoticTransport(*parts, order=self._order)
        return GrpcTransport(*parts)

    async def _rounds(
        self, node: Node, transport: GrpcTransport, line: Rendezvous, recovery: Recovery, first: int
    ) -> None:
        k, last = first, self._config.run.rounds
        while k <= last:
            await self._progress.set("training", k)
            ahead = k == first and recovery.returned
            if not ahead:
                await line.entering(k)
            await transport.enter(k)
            start = time.perf_counter()
            result = await node.round(k)
            if ahead:  # said earlier, it would send the next one that comes back a round further still
                await line.entering(k)
            seconds = time.perf_counter() - start
            transport.round_took(seconds)
            w = node.algorithm.weights
            await recovery.save(k, last=k == last)
            await self._compute(tidy)
            await self._measure(w)
            self._metrics.finished(k, result.expected, result.used, seconds, result.seconds)
            self._metrics.facts = result.facts
            await self._progress.finished(self._report(k, result, seconds), w)
            said = f", loss {result.facts['loss']:.4f}" if "loss" in result.facts else ""
            log.info("round %d: %d of %d neighbours%s, %.2f s", k, result.used, result.expected, said, seconds)
            following = await recovery.go_on(k + 1) if k < last else k + 1
            if k + 1 == following <= last:  # who has fallen behind does not rest
                await asyncio.sleep(start + self._config.run.pace - time.perf_counter())
            k = following
        await self._progress.set("finished")

    async def _measure(self, w: Tensor) -> None:
        """The peer's own accuracy, where it has test samples."""
        if self._job.test is not None:
            x, y = self._job.test
            self._metrics.accuracy = await self._compute(accuracy, self._job.module, w, x, y, heavy=True)

    def _report(self, k: int, result: RoundResult, seconds: float) -> "pb.RoundReport":
        sent, raw, messages = (self._since(n) for n in ("sent", "raw", "messages"))
        self._metrics.sent_in_round(sent)
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
            facts=result.facts | ({} if self._metrics.accuracy is None else {"accuracy": self._metrics.accuracy}),
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
        if self._turns is None:
            return work(*arguments)
        with self._turns.one():
            try:
                return work(*arguments)
            finally:
                give_back()


def _one_thread() -> ThreadPoolExecutor:
    """Torch's number of threads is each thread's own: until told, a matrix product in a new one takes every core."""
    return ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))


def run_peer(
    job: PeerJob, turns: Turns | None, order: Path | None = None, lead: "Lead | None" = None, crowd: int = 1
) -> None:
    """Blocks until the peer is done or was told to stop. `order`: where network.chaos looks for its faults.

    `lead`: of the ranks that hold this peer's kernels, where there are several; it ends the peer if one is lost.
    `crowd`: how many peers this host has.
    """
    torch.set_num_threads(1)
    try:
        asyncio.run(_run(job, turns, order, lead, crowd))
    except RuntimeError as error:
        # The event loop starts a thread to end with, and without memory that fails too: the first failure is the one.
        if isinstance(error.__context__, OutOfMemory):
            raise error.__context__ from None
        raise


async def _run(job: PeerJob, turns: Turns | None, order: Path | None, lead: "Lead | None", crowd: int = 1) -> None:
    # What is done aside (a model for the observer, a look at memory) has one thread: asyncio's own pool grows to six in
    # the course of hours, and each thread keeps compressors of its own.
    asyncio.get_running_loop().set_default_executor(_one_thread())
    await PeerProcess(job, turns, order, lead, crowd).run()
