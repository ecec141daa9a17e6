"""A fifth of 30 peers lie: what plain averaging makes of it, and what the robust settings do.

Liars follow the protocol and lie in what they say: weights with the sign turned, random weights, weights ten times too
large, packages with turned labels, all of it. Digits, in memory; accuracy is of the honest peers' mean model after the
last round, as the mean over seeds; a network whose numbers overflow counts as one that guesses. The robust setting is
`robust.weights` as named, with `robust.packages` on.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from spark_node.config import Config, load
from spark_node.learning.algorithm import Algorithm
from spark_node.learning.messages import Message, Package, Weights
from spark_node.observe.records import RoundRecord, RunInfo
from spark_node.seeds import stream

ATTACKS = ("sign flip", "random", "scaled", "labels", "everything")
SETTINGS = ("mean", "median", "trimmed-mean", "clipped")


class Liar:
    """An honest learner whose messages are bent on their way out."""

    def __init__(self, honest: Algorithm, attack: str, seed: int, peer: str) -> None:
        self._honest, self._attack = honest, attack
        self._random = torch.Generator().manual_seed(int(stream(seed, "liar", peer).integers(2**31)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    def outgoing(self, stage: str, k: int, neighbours: Sequence[str]) -> dict[str, Message]:
        said = self._honest.outgoing(stage, k, neighbours)
        return {peer: self._bend(message) for peer, message in said.items()}

    def _bend(self, message: Message) -> Message:
        if isinstance(message, Package):
            return self._bend_package(message)
        if message.request or self._attack == "labels":
            return message  # who asks for packages at false weights only hurts himself
        return self._bend_weights(message)

    def _bend_weights(self, message: Weights) -> Weights:
        w = message.w
        if self._attack == "random":
            return replace(message, w=w.std() * torch.randn(w.shape, generator=self._random))
        return replace(message, w=10 * w if self._attack == "scaled" else -w)

    def _bend_package(self, package: Package) -> Package:
        if self._attack not in ("labels", "everything"):
            return package
        classes = package.jacobian.logits.shape[1]
        return replace(package, labels=classes - 1 - package.labels)


class Silent:
    def started(self, info: RunInfo) -> None: ...
    def progress(self, round: int, done: int, total: int) -> None: ...
    def round_done(self, record: RoundRecord) -> None: ...


def accuracy_of(config: Config, attack: str | None, liars: int) -> float:
    """Of the honest peers' mean model."""
    from spark_node.cli.run import deal
    from spark_node.launch.memory import MemoryRun
    from spark_node.observe.accuracy import accuracy, mean_weights

    dataset, dealt = deal(config)
    run = MemoryRun(config, dataset, dealt)
    chosen = set(stream(config.run.seed, "liars").choice(config.run.nodes, liars, replace=False).tolist())
    honest, diverged = [], False
    for i, node in enumerate(run.nodes):
        if attack is not None and i in chosen:
            node.algorithm = Liar(node.algorithm, attack, config.run.seed, node.peer)
        elif i not in chosen:
            honest.append(node)
    try:
        run.run(Silent())
    except* ArithmeticError:
        diverged = True
    if diverged:
        return 1 / dataset.classes
    models: Mapping[str, Any] = {node.peer: node.algorithm.weights for node in honest}
    return accuracy(run.module, mean_weights(list(models.values())), run.test_x, run.test_y)


def main() -> None:
    from benchmarks.common import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--dataset", default="digits", help="any that spark-dfl data list shows (default: digits)")
    parser.add_argument("--partition", default="dirichlet:1.0", help="default: dirichlet:1.0")
    options = parser.parse_args()
    nodes, rounds, seeds = (10, 3, 1) if options.quick else (30, 15, 2)
    base = {
        "run.nodes": nodes,
        "run.rounds": rounds,
        "run.transport": "memory",
        "run.clients_every": 1000,
        "data.dataset": options.dataset,
        "data.partition": options.partition,
        "data.samples_per_node": 40,
        "model.hidden": [32],
        "topology.degree": 8 if not options.quick else 5,
        "distillation.enabled": False,
    }
    liars = nodes // 5
    rows = []
    for setting in SETTINGS if not options.quick else ("mean", "median"):
        row: dict[str, Any] = {"weights": setting, "packages": "checked" if setting != "mean" else "all used"}
        for attack in (None, *ATTACKS) if not options.quick else (None, "scaled"):
            found = []
            for seed in range(seeds):
                robust = {"robust.weights": setting, "robust.packages": setting != "mean"}
                flags = {**base, **robust, "run.seed": seed}
                found.append(100 * accuracy_of(load(flags=flags, environment={}), attack, liars))
            row[attack or "nobody lies"] = statistics.mean(found)
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    report("byzantine", rows, options.json)


if __name__ == "__main__":
    main()
