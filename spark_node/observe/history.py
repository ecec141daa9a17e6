"""What a run did, as data: its finished rounds, and the figures that sum them up. No files, no clock."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from spark_node.config import Config
from spark_node.observe.records import RoundRecord

Number = TypeVar("Number", int, float)

KINDS = ("weights", "package", "control")
WALL = ("round", "training", "evaluation")
"""The entries of a round's seconds that are wall time; the others are stages, summed over peers."""

BYTES_COUNTED = {
    "memory": "The values of every message before any coding, once per receiver: float32 numbers, a bit per mask "
    "value, a byte per label. Nothing leaves the process, so there is no framing.",
    "memory, encoded": "Every message as the bytes that a peer would hand to gRPC, without envelopes.",
    "grpc": "Every byte that a peer hands to gRPC for a neighbour, envelopes and repeated attempts included, and what "
    "it exchanges with the orchestrator. HTTP/2 and TCP come on top.",
}


@dataclass(frozen=True)
class Spread:
    """How the peers' own accuracies are spread."""

    min: float
    q1: float
    median: float
    q3: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values:
            return cls(*[math.nan] * 5)
        return cls(*(float(v) for v in np.quantile(np.asarray(values, dtype=float), (0, 0.25, 0.5, 0.75, 1))))


@dataclass(frozen=True)
class Round:
    """One finished round: a row of rounds.jsonl. A number that the round does not have is NaN, in the row null."""

    round: int
    aggregated_accuracy: float
    client_accuracy_mean: float
    client_accuracy: Spread
    bytes_sent: Mapping[str, int]
    seconds: Mapping[str, float]
    neighbours_expected: int
    neighbours_used: int
    loss: float
    t_star_mean: float
    eta: float
    alpha: float
    tau: float

    @classmethod
    def of(cls, record: RoundRecord) -> "Round":
        return cls(
            round=record.round,
            aggregated_accuracy=float(record.aggregated_accuracy),
            client_accuracy_mean=_number(record.client_accuracy_mean),
            client_accuracy=Spread.of(record.client_accuracy),
            bytes_sent={kind: int(count) for kind, count in record.bytes_sent.items()},
            seconds={stage: float(seconds) for stage, seconds in record.seconds.items()},
            neighbours_expected=record.neighbours_expected,
            neighbours_used=record.neighbours_used,
            loss=_number(record.loss),
            t_star_mean=_number(record.t_star_mean),
            eta=_number(record.eta),
            alpha=_number(record.alpha),
            tau=_number(record.tau),
        )

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Round":
        """The inverse of `to_row`; KeyError, TypeError or ValueError where the row is not one of ours."""
        spread, neighbours = row["client_accuracy"], row["neighbours"]
        return cls(
            round=int(row["round"]),
            client_accuracy=Spread(*(_number(spread[name]) for name in Spread.__dataclass_fields__)),
            bytes_sent={str(kind): int(count) for kind, count in row["bytes_sent"].items()},
            seconds={str(stage): _number(seconds) for stage, seconds in row["seconds"].items()},
            neighbours_expected=int(neighbours["expected"]),
            neighbours_used=int(neighbours["used"]),
            **{name: _number(row[name]) for name in _NUMBERS},
        )

    def to_row(self) -> dict[str, Any]:
        """The row as JSON data; a number that is not finite is null."""
        return {
            "round": self.round,
            "aggregated_accuracy": finite(self.aggregated_accuracy),
            "client_accuracy_mean": finite(self.client_accuracy_mean),
            "client_accuracy": {name: finite(value) for name, value in vars(self.client_accuracy).items()},
            "bytes_sent": dict(self.bytes_sent),
            "seconds": {stage: finite(seconds) for stage, seconds in self.seconds.items()},
            "neighbours": {"expected": self.neighbours_expected, "used": self.neighbours_used},
            **{name: finite(getattr(self, name)) for name in _NUMBERS[2:]},
        }

    @property
    def bytes_total(self) -> int:
        return sum(self.bytes_sent.values())

    @property
    def wall(self) -> float:
        """Wall time of the round."""
        return self.seconds.get("round", 0.0)

    @property
    def stages(self) -> dict[str, float]:
        return {stage: seconds for stage, seconds in self.seconds.items() if stage not in WALL}


_NUMBERS = ("aggregated_accuracy", "client_accuracy_mean", "loss", "t_star_mean", "eta", "alpha", "tau")


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it, finished or not."""

    path: Path
    config: Config
    rounds: tuple[Round, ...]
    summary: Mapping[str, Any]
    label_counts: tuple[tuple[int, ...], ...] = field(default=())
    """Samples of each label (column) that each peer (row) holds; empty where unknown."""

    @cached_property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def status(self) -> str:
        return str(self.summary["status"])

    @property
    def target(self) -> float:
        return self.config.run.target_accuracy

    @cached_property
    def reached(self) -> Round | None:
        """The first round at or above the target accuracy."""
        return first_at(self.rounds, self.target)

    @cached_property
    def best(self) -> Round | None:
        ranked = [r for r in self.rounds if not math.isnan(r.aggregated_accuracy)]
        return max(ranked, key=lambda r: r.aggregated_accuracy, default=None)

    @property
    def final(self) -> Round | None:
        return self.rounds[-1] if self.rounds else None

    @cached_property
    def bytes_after(self) -> tuple[int, ...]:
        """Bytes that all peers have sent by the end of each round."""
        return tuple(accumulate(r.bytes_total for r in self.rounds))

    @cached_property
    def bytes_to_target(self) -> int | None:
        return None if self.reached is None else self.bytes_after[self.rounds.index(self.reached)]

    @cached_property
    def bytes_by_kind(self) -> dict[str, int]:
        return sum_by_key(KINDS, (r.bytes_sent for r in self.rounds))

    @cached_property
    def stages(self) -> dict[str, float]:
        """Seconds per stage over all peers and rounds, in the order in which the stages appear."""
        return {stage: float(total) for stage, total in sum_by_key((), (r.stages for r in self.rounds)).items()}

    @cached_property
    def wall(self) -> dict[str, float]:
        """Wall seconds of training and of the observer's evaluation, where a round tells them apart."""
        return wall_seconds(self.rounds)

    @property
    def seconds(self) -> float:
        """Wall time from the start of the first round to the end of the run."""
        return float(self.summary["seconds"]["total"])

    @property
    def client_accuracy(self) -> tuple[float, ...]:
        """Each peer's own accuracy in the end; empty where unknown."""
        return tuple(_number(value) for value in self.summary["per_peer"]["accuracy"])


def first_at(rounds: Iterable[Round], target: float) -> Round | None:
    """The first round at or above a target accuracy."""
    return next((r for r in rounds if r.aggregated_accuracy >= target), None)


def summarise(
    config: Config,
    rounds: Sequence[Round],
    *,
    status: str,
    seconds_total: float,
    client_accuracy: Sequence[float] = (),
    peers: int | None = None,
    parameters: int | None = None,
    test_samples: int | None = None,
    memory: Mapping[str, int] | None = None,
    environment: Mapping[str, Any] | None = None,
    resumes: Sequence[Mapping[str, int]] = (),
    privacy: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """summary.json: the final figures of a run, all of them derived from its finished rounds."""
    reached = first_at(rounds, config.run.target_accuracy)
    sent = {kind: int(count) for kind, count in sum_by_key(KINDS, (r.bytes_sent for r in rounds)).items()}
    stages = sum_by_key((), (r.stages for r in rounds))
    last = rounds[-1] if rounds else None
    transport = config.run.transport
    if transport == "memory" and config.package.encoded_in_memory:
        transport = "memory, encoded"
    return {
        "status": status,
        "algorithm": config.run.algorithm,
        "dataset": config.data.dataset,
        "partition": config.data.partition,
        "peers": config.run.nodes if peers is None else peers,
        "parameters": parameters,
        "test_samples": test_samples,
        "rounds": len(rounds),
        "seed": config.run.seed,
        "target_accuracy": config.run.target_accuracy,
        "rounds_to_target": reached.round if reached else None,
        "bytes_to_target": sum(r.bytes_total for r in rounds if r.round <= reached.round) if reached else None,
        "final": {
            "aggregated_accuracy": finite(last.aggregated_accuracy) if last else None,
            "client_accuracy_mean": finite(last.client_accuracy_mean) if last else None,
        },
        "bytes_sent": {**sent, "total": sum(sent.values())},
        "bytes_counted": BYTES_COUNTED.get(transport, f"As the {transport} transport reports them."),
        "seconds": {
            "total": seconds_total,
            "per_round_mean": sum(r.wall for r in rounds) / len(rounds) if rounds else None,
            "wall": wall_seconds(rounds),
            "stages": {stage: float(seconds) for stage, seconds in stages.items()},
        },
        "resumes": [dict(said) for said in resumes],
        "privacy": None if privacy is None else dict(privacy),
        "memory": dict(memory or {}),
        "per_peer": {"accuracy": [finite(float(value)) for value in client_accuracy]},
        "environment": dict(environment or {}),
    }


def wall_seconds(rounds: Iterable[Round]) -> dict[str, float]:
    """Wall time over all rounds by what it was spent on: training, and the observer's evaluation."""
    return sum_by_key((), ({k: s for k, s in r.seconds.items() if k in WALL[1:]} for r in rounds))


def sum_by_key(keys: Iterable[str], parts: Iterable[Mapping[str, Number]]) -> dict[str, Number]:
    """The sum of dictionaries, key by key; `keys` come first and are always there."""
    total: dict[str, Any] = dict.fromkeys(keys, 0)
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0) + value
    return total


def finite(value: float) -> float | None:
    """JSON knows neither NaN nor infinity: they become null."""
    return value if math.isfinite(value) else None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise TypeError(f"{value!r} is not a number")
    return math.nan if value is None else float(value)
