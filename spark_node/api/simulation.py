"""A whole network in this process, for a user's own model and data."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from spark_node import topology
from spark_node.api.models import Model, load_config, own_learner, own_module, settings_layer, with_weights
from spark_node.api.samples import Pair, as_dataset, joined, samples_of
from spark_node.config import Config
from spark_node.data.datasets import Dataset, Samples
from spark_node.data.own import count_classes, hold_out
from spark_node.data.partitions import Partition, partition
from spark_node.errors import ConfigError, DataError
from spark_node.launch.devices import check_device
from spark_node.launch.memory import MemoryRun
from spark_node.learning.algorithm import Learner
from spark_node.membership import fitting
from spark_node.observe.accuracy import accuracy, mean_weights
from spark_node.observe.history import Round, Run, summarise
from spark_node.observe.records import RoundRecord, RunInfo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NODES = 10
"""Peers, where the user gives one (x, y) and says nothing else."""


def simulate(
    data: Pair | Sequence[Pair],
    model: Model = None,
    *,
    test: Pair | None = None,
    algorithm: str | Learner | None = None,
    rounds: int | None = None,
    nodes: int | None = None,
    partition: str | None = None,
    degree: int | None = None,
    seed: int | None = None,
    until: float | None = None,
    on_round: Callable[[RoundRecord], object] | None = None,
    preset: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> "SimulationResult":
    """Train a network of peers in this process, and give back what came of it.

    The peers, messages and rounds are those of a real network; only the wire is missing. With the same settings and
    data, a network of processes ends with the same weights, bit for bit.

        result = spark_node.simulate((x, y), model=make_net, nodes=20, partition="dirichlet:0.3", rounds=10)
        print(result)                    # accuracy, bytes, seconds
        predictions = result.model(x)    # the mean of all peers' models, a torch module

    data        a list of (x, y), one a peer; or one (x, y), dealt out to `nodes` peers as `partition` says.
                x: floating-point tensors or arrays [N, ...], already standardised; y: whole numbers [N] from 0 on.
    model       a torch module, whose weights all peers start from; a function that makes one, called under the seed
                and initialised as `model.init` says; "mlp" (the default: 100 hidden units) or "cnn". It gives one logit
                a class and runs in evaluation mode, so dropout and batch statistics are at rest.
    test        (x, y) that no peer trains on; without it a fifth of each class is held out.
    algorithm   "spark" (the default), "ntk-dfl", "dpsgd", "dfedavg", "dfedavgm", "dfedsam", or one of your own: a class
                (spark_node.Gossip, spark_node.Algorithm) or "package.module:factory".
    partition   "iid" (the default), "dirichlet:ALPHA", "file:PATH".
    degree      neighbours a peer; by default the nearest to the settings' that so many peers can have.
    until       end with the round in which the mean model's accuracy on `test` reaches this.
    on_round    called after each round with a RoundRecord; whatever it raises ends the run.
    settings    anything else, {"section.key": value}, as `spark-dfl run --settings` lists it.
    """
    per_peer = not _is_pair(data)
    if per_peer and not len(data):
        raise DataError("data: no peers; give a list of (x, y), or one (x, y)")
    if per_peer and (nodes is not None or partition is not None):
        raise ConfigError("nodes, partition: the list says what each peer has; they are for one (x, y)")
    name, learner = own_learner(algorithm)
    layer = settings_layer(
        settings,
        run__algorithm=name,
        run__rounds=rounds,
        run__nodes=len(data) if per_peer else nodes,
        run__seed=seed,
        run__target_accuracy=until,
        run__until_target=None if until is None else True,
        data__partition=partition,
        model__kind=model if isinstance(model, str) else None,
        topology__degree=degree,
    )
    defaults = {"run.nodes": _NODES, "data.samples_per_node": 0, "run.target_accuracy": 0.0} if preset is None else {}
    config = load_config(preset, None, {**defaults, **layer, "run.transport": "memory"})
    config = _with_degree(config, fixed="topology.degree" in layer)
    check_device(config.run.device)
    train, held = _split(data, per_peer, test)
    known = None if _says_classes(model) else count_classes("data", train.labels, held.labels)
    module, classes = own_module(model, config, train.pixels.shape[1:], known)
    dataset = as_dataset("data", train, held, classes)
    dealt = _by_owner(train, config.run.nodes) if per_peer else _dealt(config, dataset)
    run = MemoryRun(config, dataset, dealt, module=module, learner=learner)
    watcher = _Recorder(on_round)
    start = time.perf_counter()
    _run(run, watcher)
    weights = {node.peer: node.algorithm.weights.detach().cpu().clone() for node in run.nodes}
    return SimulationResult(config, tuple(watcher.records), weights, run.module, time.perf_counter() - start)


@dataclass(frozen=True, repr=False)
class SimulationResult:
    """What a simulated network has learnt, and how it got there."""

    config: Config
    """The whole effective configuration."""
    records: tuple[RoundRecord, ...]
    """What happened in each round: accuracies, bytes, seconds, loss."""
    weights: Mapping[str, Tensor]
    """Each peer's last weights, flat, by its name."""
    module: nn.Module
    seconds: float
    """Wall time of the whole run."""

    @property
    def curve(self) -> list[float]:
        """Accuracy of the mean model on the test set, after each round."""
        return [record.aggregated_accuracy for record in self.records]

    @property
    def accuracy(self) -> float:
        """That of the last round."""
        return self.records[-1].aggregated_accuracy

    @property
    def bytes_sent(self) -> int:
        """What all peers sent to each other; docs/results.md says how it is counted."""
        return sum(sum(record.bytes_sent.values()) for record in self.records)

    @property
    def model(self) -> nn.Module:
        """The mean of all peers' models: a torch module, yours to keep."""
        return with_weights(self.module, mean_weights(list(self.weights.values())))

    @property
    def models(self) -> dict[str, nn.Module]:
        """Each peer's own model, by its name."""
        return {peer: with_weights(self.module, w) for peer, w in self.weights.items()}

    def accuracy_on(self, x: Any, y: Any) -> float:
        """Of the mean model, on other samples."""
        return _accuracy(self.module, mean_weights(list(self.weights.values())), (x, y))

    def plot(self, path: str | Path | None = None, **others: "SimulationResult") -> "Figure":
        """Accuracy over rounds as a matplotlib figure, written to `path` (.png, .svg, .pdf) if given.

        Others are drawn beside it under their names: `spark.plot("curves.png", DFedAvg=other)`.
        """
        from spark_node.observe import plots, wording

        runs = [(wording.algorithm(self.config), self._as_run())]
        figure = plots.accuracy([*runs, *((name, other._as_run()) for name, other in others.items())])
        if path is not None:
            figure.savefig(path, dpi=150, bbox_inches="tight")
        return figure

    def summary(self) -> dict[str, Any]:
        """The figures of `summary.json`."""
        last = self.records[-1]
        return summarise(
            self.config,
            [Round.of(record) for record in self.records],
            status="complete",
            seconds_total=self.seconds,
            client_accuracy=last.client_accuracy,
            peers=len(self.weights),
            parameters=len(next(iter(self.weights.values()))),
        )

    def __repr__(self) -> str:
        from spark_node.observe import wording

        run = self._as_run()
        return (
            f"{wording.algorithm(self.config)}, {len(self.weights)} peers: {wording.outcome(run)}; {wording.cost(run)}"
        )

    def _repr_html_(self) -> str:
        """In a notebook: the curve, and the figures below it."""
        from html import escape

        from spark_node.observe.plots import svg

        return f"{svg('accuracy', self.plot())}<p>{escape(repr(self))}</p>"

    def _as_run(self) -> Run:
        rounds = tuple(Round.of(record) for record in self.records)
        return Run(Path("simulation"), self.config, rounds, self.summary())


class _Recorder:
    """A watcher that remembers, and passes rounds on."""

    def __init__(self, on_round: Callable[[RoundRecord], object] | None) -> None:
        self._on_round = on_round
        self.records: list[RoundRecord] = []
        self.stopped = threading.Event()

    def started(self, info: RunInfo) -> None:
        pass

    def progress(self, round: int, done: int, total: int) -> None:
        if self.stopped.is_set():
            raise KeyboardInterrupt

    def round_done(self, record: RoundRecord) -> None:
        self.records.append(record)
        if self._on_round is not None:
            self._on_round(record)


def _run(run: MemoryRun, watcher: _Recorder) -> None:
    """All rounds, in this thread; in another one where this has an event loop at work, as notebooks have."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        run.run(watcher)
        return
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run.run, watcher)
        try:
            done.result()
        finally:
            watcher.stopped.set()


def _is_pair(data: object) -> bool:
    return isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], tuple | list)


def _says_classes(model: Model) -> bool:
    """Whether the model itself says how many classes there are."""
    return model is not None and not isinstance(model, str)


def _with_degree(config: Config, fixed: bool) -> Config:
    nodes = config.run.nodes
    if nodes > 1 and not fixed:
        config = replace(config, topology=fitting(config.topology, nodes))
    if nodes > 1:
        topology.check(config.topology.kind, nodes, config.topology.degree)
    return config


def _split(data: Any, per_peer: bool, test: Pair | None) -> tuple[Samples, Samples]:
    """What peers train on, and what the mean model is measured on."""
    if per_peer:
        whole = joined([samples_of(pair, f"data[{peer}]") for peer, pair in enumerate(data)])
    else:
        whole = samples_of(data, "data")
    return hold_out(whole) if test is None else (whole, samples_of(test, "test"))


def _by_owner(train: Samples, nodes: int) -> Partition:
    assert train.writers is not None
    shares = tuple(np.flatnonzero(train.writers == peer).astype(np.int64) for peer in range(nodes))
    empty = [peer for peer, share in enumerate(shares) if not len(share)]
    if empty:
        raise DataError(f"data: peer {empty[0]} has no samples left after some were held out; give a test set")
    return Partition("given", shares)


def _dealt(config: Config, dataset: Dataset) -> Partition:
    settings = config.data
    return partition(
        settings.partition,
        dataset,
        config.run.nodes,
        samples_per_node=settings.samples_per_node,
        disjoint=settings.disjoint,
        seed=config.run.seed,
    )


def _accuracy(module: nn.Module, w: Tensor, pair: Pair) -> float:
    import torch

    samples = samples_of(pair, "data")
    x, y = torch.from_numpy(samples.pixels), torch.from_numpy(samples.labels)
    return accuracy(with_weights(module, w), w.cpu(), x, y)
