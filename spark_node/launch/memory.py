"""A whole network in one process: every peer a Node, messages handed over in memory, a few worker threads."""

import asyncio
import copy
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spark_node import model
from spark_node.checkpoint import Checkpoint, Owner, Store, join_states, part_of
from spark_node.config import Config
from spark_node.data.datasets import Dataset
from spark_node.data.partitions import Partition
from spark_node.launch.samples import PeerSamples, peer_samples
from spark_node.learning.algorithm import Learner
from spark_node.learning.algorithms import make_algorithm, make_terms, signature
from spark_node.membership import Membership, peer_names
from spark_node.node import Node, RoundResult, Timings
from spark_node.observe.accuracy import accuracy, mean_weights
from spark_node.observe.records import RoundRecord, RunInfo, Watcher, from_facts
from spark_node.observe.run_folder import CHECKPOINTS
from spark_node.package.peer import PeerCodec
from spark_node.privacy import guarantee
from spark_node.transport.memory import MemoryNetwork

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """What the peers of this process have to tell of a round."""

    results: list[RoundResult]
    aggregated: float
    clients: list[float]
    sent: dict[str, int]


class MemoryRun:
    """The network and its observer. `nodes` stays readable after the run: tests and notebooks look inside.

    `own`: which of the run's peers are here, all of them unless a run is spread over several processes.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        partition: Partition,
        checkpoints: Path | None = None,
        run_id: str = "memory",
        *,
        module: nn.Module | None = None,
        learner: Learner = make_algorithm,
        own: range | None = None,
        network: MemoryNetwork | None = None,
    ) -> None:
        """`module`: a model with its initial weights; `learner`: who makes the algorithms."""
        self.config, self._learner = config, learner
        device = torch.device(config.run.device)
        if module is None:
            module = model.build(config.model, dataset.shape, dataset.classes, config.run.seed)
        self.module = module.to(device)
        self.network = network or MemoryNetwork()
        self.test_x = dataset.standardise(dataset.test.pixels).to(device)
        self.test_y = torch.from_numpy(dataset.test.labels).to(device)
        self.samples = tuple(len(indices) for indices in partition.indices)
        self.privacy = guarantee(config.privacy, partition.indices, dataset.classes)
        self._terms = make_terms(config, "memory", model.ParameterLayout.of(self.module), dataset.classes)
        names = peer_names(config.run.nodes)
        self.membership = Membership(names, config.run.seed, config.topology)
        self._workers = config.run.workers or os.cpu_count() or 1
        self.nodes: list[Node] = []
        self._samples: list[PeerSamples] = []
        self._stores: dict[str, Store] = {}
        here = [(names[i], partition.indices[i]) for i in (range(len(names)) if own is None else own)]
        if checkpoints is not None and config.checkpoint.enabled:
            owners = [Owner(run_id, name, signature(config, self.module)) for name, _ in here]
            self._stores = {o.peer: Store(checkpoints / o.peer, o, config.checkpoint.keep) for o in owners}
        for name, indices in here:
            kept = checkpoints / name if self._stores and checkpoints is not None else None
            self._samples.append(peer_samples(config, name, dataset, indices, kept))
            samples = self._samples[-1]
            self.nodes.append(self._node(name, samples.inputs, samples.labels, dataset.classes))

    def _node(self, name: str, x: Tensor, y: Tensor, classes: int) -> Node:
        timings = Timings()
        algorithm = self._learner(self.config, name, copy.deepcopy(self.module), x, y, timings)
        encoded = self.config.package.encoded_in_memory
        codec = PeerCodec(self._terms, name, self.config.run.seed, x.device) if encoded else None
        transport = self.network.transport(name, codec, self._compute)
        return Node(name, algorithm, self.membership, transport, self._compute, timings, classes=classes)

    async def _compute(self, work: Callable[..., Any], *arguments: Any, heavy: bool = False) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def resume(self, recorded: int) -> int:
        """Take up the newest state that every peer has and that the records reach up to; the round it is of, or 0."""
        k = max((k for k in self._held() if k <= recorded), default=0)
        self._take_up(k)
        return k

    def _held(self) -> set[int]:
        """Rounds of which every peer here has a checkpoint."""
        held = [set(store.rounds) for store in self._stores.values()]
        return set.intersection(*held) if held else set()

    def _take_up(self, k: int) -> None:
        for node in self.nodes:
            if node.peer not in self._stores:
                continue
            self._stores[node.peer].forget_after(k)
            checkpoint = self._stores[node.peer].load(k)
            if checkpoint is not None:
                node.algorithm.restore(part_of(checkpoint.state, "algorithm"))
                if node.peer in self.network.codecs:
                    self.network.codecs[node.peer].restore(part_of(checkpoint.state, "codec"))

    def _save(self, k: int) -> None:
        """Every peer's checkpoint; a disk that is full costs them, not the training."""
        settings = self.config.checkpoint
        if k % settings.every and k < self.config.run.rounds:
            return
        for node in self.nodes:
            codec = self.network.codecs.get(node.peer)
            state = join_states(algorithm=node.algorithm.state(), codec=codec.state() if codec else {})
            try:
                if node.peer in self._stores:
                    self._stores[node.peer].save(Checkpoint(k, state))
            except OSError as error:
                log.error("round %d: no checkpoint of %s (%s)", k, node.peer, error)

    def run(self, watcher: Watcher, first: int = 1) -> None:
        """All rounds. One torch thread a worker: many peers at once beat many threads a peer."""
        parameters = model.flatten(self.module).numel()
        info = RunInfo(parameters, self.config.run.nodes, self.samples, len(self.test_y), self.privacy)
        watcher.started(info)
        for samples in self._samples:
            samples.keep()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(self._workers, initializer=torch.set_num_threads, initargs=(1,)) as self._pool:
                asyncio.run(self._drive(watcher, first))
        finally:
            torch.set_num_threads(threads)

    async def _drive(self, watcher: Watcher, first: int) -> None:
        await self._rounds(watcher, first)

    async def _rounds(self, watcher: Watcher, first: int) -> None:
        for k in range(first, self.config.run.rounds + 1):
            start, before = time.perf_counter(), dict(self.network.bytes_sent)
            results = await self._round(k, watcher)
            trained = time.perf_counter()
            await self._compute(self._save, k)
            aggregated, clients = await self._evaluate(k, self.config.run.evaluates_clients(k))
            sent = {kind: count - before[kind] for kind, count in self.network.bytes_sent.items()}
            finished = Finished(results, aggregated, clients, sent)
            if not await self._conclude(k, finished, watcher, start, trained):
                return

    async def _conclude(self, k: int, finished: Finished, watcher: Watcher, start: float, trained: float) -> bool:
        """Tell of a round; whether another one is wanted."""
        watcher.round_done(_record(k, finished, start, trained))
        return not self.config.run.ends_with(finished.aggregated)

    async def _round(self, k: int, watcher: Watcher) -> list[RoundResult]:
        self._done = 0

        async def one(node: Node) -> RoundResult:
            result = await node.round(k)
            self._progress(k, watcher)
            return result

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(node)) for node in self.nodes]
        return [task.result() for task in tasks]

    def _progress(self, k: int, watcher: Watcher) -> None:
        """One more peer has finished the round."""
        self._done += 1
        watcher.progress(k, self._done, self.config.run.nodes)

    async def _evaluate(self, k: int, with_clients: bool) -> tuple[float, list[float]]:
        """Accuracy of the mean model and, where asked for, of every peer's own, on the whole test set."""
        models = [node.algorithm.weights for node in self.nodes]
        aggregated, *clients = await asyncio.gather(
            self._aggregated(k, models), *(self._compute(self._score, w) for w in models if with_clients)
        )
        return aggregated, clients

    async def _aggregated(self, k: int, models: Sequence[Tensor]) -> float:
        score: float = await self._compute(self._score, mean_weights(models))
        return score

    def _score(self, w: Tensor) -> float:
        return accuracy(self.module, w, self.test_x, self.test_y)


def run_in_memory(
    config: Config,
    dataset: Dataset,
    partition: Partition,
    watcher: Watcher,
    folder: Path | None = None,
    run_id: str = "memory",
    recorded: int | None = None,
) -> None:
    """Train a whole network in this process and tell the watcher about it; `recorded`: go on with such a run."""
    run = MemoryRun(config, dataset, partition, folder / CHECKPOINTS if folder is not None else None, run_id)
    run.run(watcher, first=1 + run.resume(recorded or 0))


def _record(k: int, finished: Finished, start: float, trained: float) -> RoundRecord:
    stages: dict[str, float] = defaultdict(float)
    results = finished.results
    for result in results:
        for stage, seconds in result.seconds.items():
            stages[stage] += seconds
    now = time.perf_counter()
    return RoundRecord(
        round=k,
        aggregated_accuracy=finished.aggregated,
        client_accuracy=tuple(finished.clients),
        bytes_sent=finished.sent,
        seconds={"round": now - start, "training": trained - start, "evaluation": now - trained, **stages},
        neighbours_expected=sum(result.expected for result in results),
        neighbours_used=sum(result.used for result in results),
        **from_facts([result.facts for result in results]),
    )
