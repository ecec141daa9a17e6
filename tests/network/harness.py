"""Real networks for tests: processes, gRPC, an orchestrator, and an observer that keeps the models."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spark_node import model
from spark_node.config import Config, load
from spark_node.data import datasets, partitions
from spark_node.launch.memory import MemoryRun
from spark_node.launch.network import LocalNetwork
from spark_node.learning.algorithms import make_terms
from spark_node.model import ParameterLayout
from spark_node.observe.observer import Observer
from spark_node.observe.records import RoundRecord, RunInfo

SMALL = {
    "run.nodes": 6,
    "run.rounds": 3,
    "topology.degree": 3,
    "model.hidden": [16],
    "data.samples_per_node": 40,
    "learning.timesteps": [100, 200],
    "network.metrics": False,
    "network.deadline_floor": 60.0,
}


def small(**changes: Any) -> Config:
    """A network that trains in seconds; changes as section__key=value."""
    return load(flags={**SMALL, **{key.replace("__", ".", 1): value for key, value in changes.items()}}, environment={})


class Log:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []
        self.times: list[float] = []

    def started(self, info: RunInfo) -> None:
        pass

    def progress(self, round: int, done: int, total: int) -> None:
        pass

    def round_done(self, record: RoundRecord) -> None:
        self.records.append(record)
        self.times.append(time.monotonic())


class KeepingObserver(Observer):
    """Keeps the models of every round."""

    models: dict[int, dict[str, Tensor]]

    async def _evaluate(self, models: Mapping[str, Tensor], with_clients: bool) -> tuple[float, list[float]]:
        self.models = {**getattr(self, "models", {}), len(getattr(self, "models", {})) + 1: dict(models)}
        return await super()._evaluate(models, with_clients)


class Network:
    """A LocalNetwork with its observer. Fork first, then gRPC: one per test process at a time, in a fresh child."""

    def __init__(self, config: Config, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.dataset = datasets.load(config.data.dataset)
        self.partition = partitions.partition(
            config.data.partition, self.dataset, config.run.nodes, samples_per_node=config.data.samples_per_node, seed=0
        )
        self.module: nn.Module = model.build(config.model, self.dataset.shape, self.dataset.classes, config.run.seed)
        self.log = Log()
        self.local = LocalNetwork(config, self.dataset, self.partition, self.module, folder)
        self.config = self.local.config

    def observer(self) -> KeepingObserver:
        layout = ParameterLayout.of(self.module)
        test = self.dataset.standardise(self.dataset.test.pixels), torch.from_numpy(self.dataset.test.labels)
        classes = self.dataset.classes
        return KeepingObserver(
            self.config,
            self.local.orchestrator_address,
            lambda run: make_terms(self.config, run, layout, classes),
            self.module,
            test,
            self.log,
        )

    def train(self) -> dict[str, Tensor]:
        """Start everything, follow it to the end, stop everything; the peers' last models."""
        with self.local:
            observer = self.observer()
            asyncio.run(observer.follow(self.local.over))
        return observer.models[max(observer.models)]


def in_memory(config: Config) -> dict[str, Tensor]:
    """The peers' last models of the same run in one process."""
    dataset = datasets.load(config.data.dataset)
    dealt = partitions.partition(
        config.data.partition, dataset, config.run.nodes, samples_per_node=config.data.samples_per_node, seed=0
    )
    run = MemoryRun(config, dataset, dealt)
    run.run(Log())
    return {node.peer: node.algorithm.weights for node in run.nodes}


def logs(folder: Path) -> str:
    """Everything that was logged, for assertions and their messages."""
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(folder.glob("logs/*.log")))
