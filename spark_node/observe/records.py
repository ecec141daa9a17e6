"""What the observer is told: plain records, no tensors, and the seam to whoever watches a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class RunInfo:
    """Known before the first round."""

    parameters: int
    peers: int
    samples_per_peer: tuple[int, ...]
    test_samples: int


@dataclass(frozen=True)
class RoundRecord:
    """One finished round of the whole network. Accuracies are fractions, bytes whole numbers, times seconds."""

    round: int
    aggregated_accuracy: float
    client_accuracy: tuple[float, ...]
    """Accuracy of each peer's own model, in the order of the peers."""
    bytes_sent: dict[str, int]
    """Over all peers, by kind: weights, package, control."""
    seconds: dict[str, float]
    """Wall time of the round, its training and its evaluation; and time spent per stage, summed over peers."""
    neighbours_expected: int
    neighbours_used: int
    loss: float
    """Mean over peers of the loss that chose t*."""
    t_star_mean: float
    eta: float
    alpha: float
    tau: float
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the peers' processes hold, where they are processes: pss_per_peer_mean, pss_total, ..."""

    @property
    def client_accuracy_mean(self) -> float:
        return sum(self.client_accuracy) / len(self.client_accuracy)


class Watcher(Protocol):
    """Whoever watches a run. Called from the thread that drives the run, in order."""

    def started(self, info: RunInfo) -> None:
        """Once, before the first round."""

    def progress(self, round: int, done: int, total: int) -> None:
        """While a round goes on: `done` of `total` peers have finished it."""

    def round_done(self, record: RoundRecord) -> None:
        """After each round."""
