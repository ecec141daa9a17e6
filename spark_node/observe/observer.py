"""The observer: follows every peer of a run, pulls their models, and tells watchers. Training never waits for it."""

import asyncio
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from grpc import aio
from torch import Tensor, nn

from spark_node.config import Config
from spark_node.errors import ConfigError
from spark_node.generated.spark.v1 import orchestrator_pb2, orchestrator_pb2_grpc, peer_pb2, peer_pb2_grpc
from spark_node.learning.messages import Weights
from spark_node.observe.accuracy import accuracy, mean_weights
from spark_node.observe.history import Round
from spark_node.observe.live import Live
from spark_node.observe.records import RoundRecord, Watcher, from_facts
from spark_node.package.chunks import Assembly
from spark_node.package.errors import PackageError
from spark_node.package.format import Terms
from spark_node.package.reader import decode
from spark_node.rendezvous import patiently
from spark_node.security.identity import Role
from spark_node.security.tls import OBSERVER, ORCHESTRATOR, Security, security_of
from spark_node.transport.connections import options

log = logging.getLogger(__name__)

_ASK_SECONDS = 1.0
KINDS = {"weights": "weights", "request": "weights", "package": "package"}


@dataclass
class _Round:
    """What has come of one round, peer by peer."""

    reports: dict[str, peer_pb2.RoundReport] = field(default_factory=dict)
    models: dict[str, Tensor | None] = field(default_factory=dict)


async def ask_run(config: Config, orchestrator: str, patience: float) -> str:
    """Which run an orchestrator has; waits for it up to `patience` seconds, ConfigError after that."""
    async with _line(security_of(config.security, Role.OBSERVER, OBSERVER), orchestrator) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorStub(channel)
        request = orchestrator_pb2.DescribeRequest(version=2**63)
        reply = await patiently(orchestrator, lambda: stub.Describe(request, timeout=10.0), patience)
    return str(reply.run.run)


def _line(security: Security, orchestrator: str) -> aio.Channel:
    limit = [("grpc.max_receive_message_length", 2**25), ("grpc.max_reconnect_backoff_ms", 2000)]
    return security.channel(orchestrator, Role.ORCHESTRATOR, ORCHESTRATOR, limit)


class Observer:
    """Follows the peers that the orchestrator names until all of them have finished."""

    def __init__(
        self,
        config: Config,
        orchestrator: str,
        terms: Callable[[str], Terms],
        module: nn.Module,
        test: tuple[Tensor, Tensor],
        watcher: Watcher,
        *,
        recorded: Sequence[Round] = (),
        live: Live | None = None,
    ) -> None:
        """`recorded`: rounds that an observer before this one has told of; it goes on after them.

        `live` hears of everything as it comes, besides the watcher, who hears of finished rounds.
        """
        self._live = live
        self._config, self._orchestrator, self._make_terms = config, orchestrator, terms
        self._module, self._test, self._watcher = module, test, watcher
        self._security = security_of(config.security, Role.OBSERVER, OBSERVER)
        self._rounds: defaultdict[int, _Round] = defaultdict(_Round)
        self._progress: dict[str, peer_pb2.Progress] = {}
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._members: dict[str, str] = {}
        self._gone: set[str] = set()
        self._control: dict[str, int] = {}
        self._control_before = sum(r.bytes_sent.get("control", 0) for r in recorded)
        self._changed = asyncio.Event()
        workers = config.run.workers or os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        self._run, self._version, self._first = "", 0, 0
        self._recorded = max((r.round for r in recorded), default=0)
        self._shown = (0, 0)
        self._lines: set[str] = set()
        self._spoke: dict[str, float] = {}
        """When each peer whose line is open was last heard."""
        self._heard = time.monotonic()
        self._unreadable: dict[str, str] = {}

    async def follow(self, alive: Callable[[], str | None] | None = None) -> None:
        """Until the last round is recorded; `alive` says why nothing more can come, or None."""
        alive = self.over if alive is None else alive
        finding = asyncio.create_task(self._find_members())
        began: float | None = None
        try:
            await self._wait_for_start(alive)
            for k in range(max(self._first, self._recorded + 1), self._config.run.rounds + 1):
                await self._wait_for(k, alive)
                if self._ended_before(k):
                    log.warning("every peer has finished, and none told of round %d", k)
                    break
                if not self._rounds[k].reports:
                    log.warning("round %d: every peer went past it without taking part; not recorded", k)
                    continue
                began = await self._record(k, began)
        finally:
            for task in (finding, *self._followed.values()):
                task.cancel()
            await asyncio.gather(finding, *self._followed.values(), return_exceptions=True)
            self._pool.shutdown(wait=False)

    async def _wait_for_start(self, alive: Callable[[], str | None]) -> None:
        """Until the peers have begun; a run that is resumed begins with a later round than the first."""
        while self._first == 0:
            over = await self._change(alive)
            if over is not None:
                raise RuntimeError(f"no peer is left to begin: {over}")

    async def _change(self, alive: Callable[[], str | None]) -> str | None:
        """Wait for news of any peer; why none can come, where a while brought none."""
        self._changed.clear()
        try:
            async with asyncio.timeout(1.0):
                await self._changed.wait()
        except TimeoutError:
            return alive()
        return None

    async def _wait_for(self, k: int, alive: Callable[[], str | None]) -> None:
        """Until every member that still lives has finished round k and its model has come."""
        while not self._complete(k):
            self._show(k)
            over = await self._change(alive)
            if over is not None and self._rounds[k].reports:
                return
            if over is not None:
                raise RuntimeError(f"no peer is left to finish round {k}: {over}")
        self._show(k)

    def _complete(self, k: int) -> bool:
        """Whoever is in a later round, or done, without having told of this one took no part in it.

        After a break peers catch up by leaping over rounds, and all of them may leap over the same one.
        """
        beyond = {name for name, seen in self._progress.items() if seen.round > k or seen.state == "finished"}
        waited_for = self._there()
        return bool(waited_for) and waited_for - beyond <= set(self._rounds[k].models)

    def _there(self) -> set[str]:
        """The members. One that the orchestrator does not name (any more) counts for as long as it speaks.

        An orchestrator that was started again hears of them one by one.
        """
        since = time.monotonic() - self._config.network.lease
        return set(self._members) - {name for name in self._gone if self._spoke.get(name, 0.0) < since}

    def _ended_before(self, k: int) -> bool:
        """Whether all are done and neither this round nor a later one has come: they were told to do fewer rounds."""
        waited_for = self._there()
        done = {name for name, seen in self._progress.items() if seen.state == "finished"}
        return waited_for <= done and not any(seen.reports for later, seen in self._rounds.items() if later >= k)

    def over(self) -> str | None:
        """Why nothing more can come of a network that others run, or None."""
        if self._lines:
            self._heard = time.monotonic()
        silent = time.monotonic() - self._heard
        if silent > self._config.network.lease:
            return f"neither the orchestrator at {self._orchestrator} nor any peer has answered for {silent:.0f} s"
        if self._first and not self._lines and not self._there():
            return "every peer has left the run"
        return None

    def _show(self, k: int) -> None:
        now = (k, len(self._rounds[k].models))
        if now != self._shown:
            self._shown = now
            self._watcher.progress(k, now[1], max(len(self._members), now[1], 1))

    async def _find_members(self) -> None:
        """Who takes part, from the orchestrator; while it is away, those that are known."""
        async with _line(self._security, self._orchestrator) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorStub(channel)
            while True:
                try:
                    await self._ask(stub)
                except aio.AioRpcError as error:
                    log.info("the orchestrator is away (%s)", error.code().name)
                    if self._live is not None:
                        self._live.orchestrator_lost()
                await asyncio.sleep(_ASK_SECONDS)

    async def _ask(self, stub: orchestrator_pb2_grpc.OrchestratorStub) -> None:
        request = orchestrator_pb2.DescribeRequest(version=self._version)
        reply = await stub.Describe(request, timeout=10.0)
        self._run, self._heard = reply.run.run, time.monotonic()
        if self._live is not None:
            self._live.described(reply.run, reply.members)
        if not reply.run.started or not reply.members.version:
            return
        self._version = reply.members.version
        self._first = self._first or max(1, reply.run.first_round)
        named = {member.name: member.address for member in reply.members.members}
        if self._live is not None:
            self._live.left(sorted(set(self._members) - set(named) - self._gone))
        self._gone |= set(self._members) - set(named)
        self._gone -= set(named)
        self._members.update(named)
        for name in named:
            if name not in self._followed or self._followed[name].done():
                self._followed[name] = asyncio.create_task(self._follow_peer(name))
        self._changed.set()

    async def _follow_peer(self, name: str) -> None:
        """One peer's progress, for as long as it is a member; a broken line is taken up again."""
        after = 0
        while name not in self._gone:
            address = self._members[name]
            shows = self._security.expected(Role.PEER, name)
            channel_options = options(self._config.package, self._config.network)
            try:
                with suppress(aio.AioRpcError):
                    async with self._security.channel(address, Role.PEER, name, channel_options) as channel:
                        stub = peer_pb2_grpc.PeerStub(channel)
                        request = peer_pb2.FollowRequest(run=self._run, after_round=after)
                        async for progress in stub.Follow(request):
                            self._lines.add(name)
                            self._spoke[name] = time.monotonic()
                            if shows != self._security.expected(Role.PEER, name):
                                break  # revoked meanwhile
                            after = await self._take(stub, name, progress, after)
                if self._live is not None and name in self._lines:
                    self._live.line_lost(name)
            finally:
                self._lines.discard(name)
                self._spoke.pop(name, None)
            await asyncio.sleep(0.3)

    async def _take(self, stub: peer_pb2_grpc.PeerStub, name: str, progress: "peer_pb2.Progress", after: int) -> int:
        newest = max((report.round for report in progress.rounds), default=0)
        for report in progress.rounds:
            after = max(after, report.round)
            if report.round <= self._recorded:
                continue
            held = report.round > newest - self._config.network.model_history
            model = await self._model(stub, name, report.round) if held else None
            self._rounds[report.round].reports[name] = report
            self._rounds[report.round].models[name] = model
        self._progress[name] = progress
        if self._live is not None:
            self._live.heard(progress)
        self._changed.set()
        return after

    async def _model(self, stub: peer_pb2_grpc.PeerStub, name: str, k: int) -> Tensor | None:
        """A peer's model after round k; None where it no longer has it."""
        terms = self._make_terms(self._run)
        whole = Assembly(terms.settings.max_message_bytes)
        async for reply in stub.Model(peer_pb2.ModelRequest(run=self._run, round=k)):
            if not reply.found:
                log.warning("%s no longer has its model of round %d", name, k)
                return None
            whole.add(reply.chunk)
        try:
            found = decode(whole.finish(), terms, k=k, sender=name).message
        except PackageError as error:
            log.warning("%s handed out a model that cannot be read: %s", name, error)
            self._unreadable[name] = str(error)
            return None
        self._unreadable.pop(name, None)
        assert isinstance(found, Weights)
        return found.w

    async def _record(self, k: int, began: float | None) -> float:
        """Evaluate round k, which began when the one before had ended everywhere, and tell the watcher."""
        done = self._rounds.pop(k)
        finished = max(report.finished for report in done.reports.values())
        if began is None:
            began = min(report.finished - report.seconds for report in done.reports.values())
        start = time.perf_counter()
        models = {name: done.models[name] for name in sorted(done.models)}
        held = {name: w for name, w in models.items() if w is not None}
        if not held and self._unreadable:
            why = next(iter(self._unreadable.values()))
            raise ConfigError(f"no model of round {k} can be read ({why}); give the settings with which the peers run")
        aggregated, clients = await self._evaluate(held, self._config.run.evaluates_clients(k))
        if self._live is not None:
            self._live.scored(dict(zip(held, clients, strict=False)))
        evaluation = time.perf_counter() - start
        seconds = {"round": finished - began, "training": finished - began, "evaluation": evaluation}
        self._watcher.round_done(self._summed(k, done.reports, aggregated, clients, seconds))
        return finished

    async def _evaluate(self, models: Mapping[str, Tensor], with_clients: bool) -> tuple[float, list[float]]:
        """The accuracy of the mean model, and those of the peers; after the last round nobody else computes."""
        if not models:  # no peer has kept its model of this round
            return math.nan, []
        run = partial(asyncio.get_running_loop().run_in_executor, self._pool)
        held = list(models.values())
        mean = await run(mean_weights, held)
        aggregated, *clients = await asyncio.gather(
            *(run(self._score, w) for w in (mean, *(held if with_clients else ())))
        )
        return aggregated, clients

    def _score(self, w: Tensor) -> float:
        return accuracy(self._module, w, *self._test)

    def _summed(
        self,
        k: int,
        reports: Mapping[str, "peer_pb2.RoundReport"],
        aggregated: float,
        clients: list[float],
        seconds: dict[str, float],
    ) -> RoundRecord:
        sent = {"weights": 0, "package": 0, "control": self._control_since()}
        stages: defaultdict[str, float] = defaultdict(float)
        for report in reports.values():
            for edge in report.bytes:
                sent[KINDS.get(edge.kind, "control")] += edge.sent
            for stage, value in report.stage_seconds.items():
                stages[stage] += value
        return RoundRecord(
            round=k,
            aggregated_accuracy=aggregated,
            client_accuracy=tuple(clients),
            bytes_sent=sent,
            seconds={**seconds, **stages},
            neighbours_expected=sum(report.expected for report in reports.values()),
            neighbours_used=sum(report.used for report in reports.values()),
            memory=self._memory(),
            **from_facts([report.facts for report in reports.values()]),
        )

    def _control_since(self) -> int:
        now = {name: progress.control_bytes for name, progress in self._progress.items()}
        gained = sum(count - self._control.get(name, 0) for name, count in now.items()) - self._control_before
        self._control, self._control_before = now, 0
        return max(gained, 0)

    def _memory(self) -> dict[str, int]:
        shares = [progress.pss_bytes for progress in self._progress.values() if progress.pss_bytes]
        if not shares:
            return {}
        return {
            "pss_per_peer_mean": sum(shares) // len(shares),
            "pss_per_peer_max": max(shares),
            "pss_total": sum(shares),
        }
