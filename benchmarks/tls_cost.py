"""What TLS costs a round: the same network with and without it, in turns, as a ratio.

Every pair of runs trains the same peers on the same data over gRPC, one process a peer, once with mutual TLS and once
in plaintext on the loopback; which comes first alternates. A round's time is the mean over all but the first round,
which also opens the first connections and warms caches; the ratio is of the medians over all pairs. Neighbours change
every round, so most connections are made anew: handshakes are part of what is measured. Beside the wall clock stands
the processor time of all processes of a run, a round, start and certificates included: it holds on a busy machine too.
"""

import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class Seconds:
    """A watcher that keeps the time of every round."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.accuracy = 0.0
        self.processor = 0.0
        """Seconds of all processes, a round."""

    def started(self, info: Any) -> None:
        pass

    def progress(self, round: int, done: int, total: int) -> None:
        pass

    def round_done(self, record: Any) -> None:
        self.rounds.append(record.seconds["training"])
        self.accuracy = record.aggregated_accuracy


def train(tls: str, nodes: int, rounds: int, hidden: int, folder: Path) -> Seconds:
    """One run; this process never starts gRPC, so it may fork the next."""
    from spark_node.cli.run import deal
    from spark_node.config import load
    from spark_node.launch.network import run_network

    flags = {
        "run.nodes": nodes, "run.rounds": rounds, "security.tls": tls, "network.metrics": False,
        "model.hidden": [hidden], "data.samples_per_node": 100,
    }  # fmt: skip
    config = load(flags=flags, environment={})
    dataset, partition = deal(config)
    seen, before = Seconds(), _processor()
    run_network(config, dataset, partition, seen, folder)
    seen.processor = (_processor() - before) / rounds
    return seen


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(pairs: int, nodes: int, rounds: int, hidden: int) -> list[dict[str, Any]]:
    """Both ways in turns."""
    means: dict[str, list[float]] = {"on": [], "off": []}
    processor: dict[str, list[float]] = {"on": [], "off": []}
    accuracies: set[float] = set()
    for pair in range(pairs):
        for tls in ("on", "off") if pair % 2 else ("off", "on"):
            with tempfile.TemporaryDirectory() as folder:
                seen = train(tls, nodes, rounds, hidden, Path(folder))
            means[tls].append(statistics.mean(seen.rounds[1:]))
            processor[tls].append(seen.processor)
            accuracies.add(seen.accuracy)
    if len(accuracies) != 1:
        raise RuntimeError(f"the runs differ: {sorted(accuracies)}")
    plain, plain_processor = statistics.median(means["off"]), statistics.median(processor["off"])
    return [
        {
            "connections": name,
            "peers": nodes,
            "rounds": rounds,
            "hidden": hidden,
            "runs": pairs,
            "round_ms": 1e3 * statistics.median(means[tls]),
            "fastest_ms": 1e3 * min(means[tls]),
            "slowest_ms": 1e3 * max(means[tls]),
            "ratio": statistics.median(means[tls]) / plain,
            "processor_ms": 1e3 * statistics.median(processor[tls]),
            "processor_ratio": statistics.median(processor[tls]) / plain_processor,
        }
        for name, tls in (("plaintext", "off"), ("mutual TLS", "on"))
    ]


def main() -> None:
    import torch

    from benchmarks.common import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--peers", type=int, default=12, help="default: 12")
    parser.add_argument("--pairs", type=int, help="pairs of runs (default: 5; 1 with --quick)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs, rounds = (1, 6) if options.quick else (5, 20)
    report("tls_cost", measure(options.pairs or pairs, options.peers, rounds, 100), options.json)


if __name__ == "__main__":
    main()
