"""What the observer is told: plain records, no tensors, and the seam to whoever watches a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

from spark_node.privacy import Guarantee


@dataclass(frozen=True)
class RunInfo:
    """Known before the first round."""

    parameters: int
    peers: int
    samples_per_peer: tuple[int, ...]
    test_samples: int
    privacy: Guarantee | None = None
    """What holds for one sample, whoever watches; None: nothing is promised."""


@dataclass(frozen=True)
class RoundRecord:
    """One finished round of the whole network. Accuracies are fractions, bytes whole numbers, times seconds."""

    round: int
    aggregated_accuracy: float
    client_accuracy: tuple[float, ...]
    """Accuracy of each peer's own model, in the order of the peers; empty where it was not evaluated in this round."""
    bytes_sent: dict[str, int]
    """Over all peers, by kind: weights, package, control."""
    seconds: dict[str, float]
    """Wall time of the round, its training and its evaluation; and time spent per stage, summed over peers."""
    neighbours_expected: int
    neighbours_used: int
    loss: float | None = None
    """Mean over peers of the loss that chose t*, or of the training loss. None, as any below: not of this algorithm."""
    t_star_mean: float | None = None
    eta: float | None = None
    """Learning rate of the round."""
    alpha: float | None = None
    tau: float | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the peers' processes hold, where they are processes: pss_per_peer_mean, pss_total, ..."""

    @property
    def client_accuracy_mean(self) -> float | None:
        return sum(self.client_accuracy) / len(self.client_accuracy) if self.client_accuracy else None


class Told(TypedDict):
    """The fields of a record that the peers' algorithms tell."""

    loss: float | None
    t_star_mean: float | None
    eta: float | None
    alpha: float | None
    tau: float | None


def from_facts(facts: Sequence[Mapping[str, float]]) -> Told:
    """Means over the peers, and what is the same for all of them; None where nobody told it."""

    def known(name: str) -> list[float]:
        return [f[name] for f in facts if name in f]

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    def first(values: list[float]) -> float | None:
        return values[0] if values else None

    return Told(
        loss=mean(known("loss")),
        t_star_mean=mean(known("t_star")),
        eta=first(known("eta")),
        alpha=first(known("alpha")),
        tau=first(known("tau")),
    )


class Watcher(Protocol):
    """Whoever watches a run. Called from the thread that drives the run, in order."""

    def started(self, info: RunInfo) -> None:
        """Once, before the first round."""

    def progress(self, round: int, done: int, total: int) -> None:
        """While a round goes on: `done` of `total` peers have finished it."""

    def round_done(self, record: RoundRecord) -> None:
        """After each round."""
