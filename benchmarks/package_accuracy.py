"""What a compressed package costs in accuracy: ten rounds in memory, one row a setting.

Every message really becomes bytes and is read again. The same peers, graphs and seed in every row; weights travel
losslessly unless the row says otherwise. Full size: 12 peers of 200 Fashion-MNIST samples (Dirichlet 0.1), degree 3;
quick: 8 peers of 60 digits, three rounds, degree 3, and k = 32.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

FACTORED_SKETCH = {"bits": 6, "projection": "axis", "sketch_size": 250}
STACK = {"encoding": "dense", "projection": "flat", "sketch_size": 10_000, "keep": 0.5, "bits": 6}

ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lossless, factored", {}),
    ("6 bits, factored", {"package.bits": 6}),
    ("6 bits, factored; int8 weights", {"package.bits": 6, "package.weights": "int8"}),
    ("error 5 %, factored", {"package.max_error": 0.05}),
    ("6 bits, axis k = 250", {f"package.{key}": value for key, value in FACTORED_SKETCH.items()}),
    (
        "6 bits, axis k = 250, orthonormal, fresh each round",
        {
            **{f"package.{key}": value for key, value in FACTORED_SKETCH.items()},
            "package.sketch": "orthonormal",
            "package.fresh_sketch": True,
        },
    ),
    ("6 bits, axis k = 100", {**{f"package.{k}": v for k, v in FACTORED_SKETCH.items()}, "package.sketch_size": 100}),
    ("m = 5, lossless, factored", {"learning.subsample": 5}),
    (
        "the paper's full stack, Hadamard",
        {
            **{f"package.{key}": value for key, value in STACK.items()},
            "package.sketch": "hadamard",
            "learning.subsample": 5,
        },
    ),
    (
        "the paper's full stack, Gaussian",
        {**{f"package.{key}": value for key, value in STACK.items()}, "learning.subsample": 5},
    ),
)


class Curve:
    """Keeps the accuracies and bytes of a run."""

    def __init__(self) -> None:
        self.accuracy: list[float] = []
        self.clients = 0.0
        self.bytes: dict[str, int] = {}

    def started(self, info: Any) -> None:
        pass

    def progress(self, k: int, done: int, total: int) -> None:
        pass

    def round_done(self, record: Any) -> None:
        self.accuracy.append(record.aggregated_accuracy)
        self.clients = sum(record.client_accuracy) / len(record.client_accuracy)
        for kind, count in record.bytes_sent.items():
            self.bytes[kind] = self.bytes.get(kind, 0) + count


def run(settings: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """One setting, from the first round to the last."""
    from spark_node.config import load
    from spark_node.data import datasets, partitions
    from spark_node.launch.memory import MemoryRun

    size: dict[str, Any] = {"run.nodes": 12, "run.rounds": 10, "data.dataset": "fashion-mnist", "topology.degree": 3}
    alpha, per_node = "dirichlet:0.1", 200
    if quick:
        size = {"run.nodes": 8, "run.rounds": 3, "data.dataset": "digits", "topology.degree": 3}
        alpha, per_node = "dirichlet:0.5", 60
        if "package.sketch_size" in settings:  # digits have 64 pixels
            settings = {**settings, "package.sketch_size": 32}
    config = load(flags={**size, "package.in_memory": "encode", **settings}, environment={})
    dataset = datasets.load(config.data.dataset)
    dealt = partitions.partition(alpha, dataset, config.run.nodes, samples_per_node=per_node, seed=0)
    curve = Curve()
    start = time.perf_counter()
    MemoryRun(config, dataset, dealt).run(curve)
    messages = config.run.nodes * config.topology.degree * config.run.rounds
    return {
        "accuracy_%": [round(100 * value, 1) for value in curve.accuracy],
        "last_%": 100 * curve.accuracy[-1],
        "clients_%": 100 * curve.clients,
        "kB_package": curve.bytes["package"] / messages / 1e3,
        "kB_weights": curve.bytes["weights"] / messages / 1e3,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    from benchmarks.common import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--without", metavar="TEXT", default="\n", help="no rows whose name holds this text")
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name holds this text")
    options = parser.parse_args()
    chosen = [row for row in ROWS if options.only in row[0] and options.without not in row[0]]
    if options.quick:
        chosen = [row for row in chosen if "full stack" not in row[0]]
    rows = []
    for name, settings in chosen:
        rows.append({"setting": name, **run(settings, quick=options.quick)})
        print(f"{name}: {rows[-1]['last_%']:.2f} % after {rows[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
    report("package_accuracy", rows, options.json)


if __name__ == "__main__":
    main()
