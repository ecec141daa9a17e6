"""What the cells of a grid gave, arranged as rows, columns and seeds. Figures only, no words."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spark_node.compare.runner import Outcome
from spark_node.compare.statistics import Mean, PairedTest, paired_test
from spark_node.compare.study import Study
from spark_node.observe.history import Round, Run

Column = tuple[str, ...]
Figure = Callable[[Run], float | None]


@dataclass(frozen=True)
class Reached:
    """What the seeds of a point needed to reach the target: rounds, or bytes."""

    known: tuple[float, ...]
    seeds: int
    within: int
    """Rounds that every seed had."""

    @property
    def mean(self) -> Mean | None:
        """Over the seeds that reached it; only where all did is it a fair figure."""
        return Mean.of(self.known)

    @property
    def all_did(self) -> bool:
        return self.seeds > 0 and len(self.known) == self.seeds


@dataclass(frozen=True)
class Curve:
    """A mean over seeds, point by point, with its deviation."""

    x: "np.ndarray[tuple[int], np.dtype[np.float64]]"
    mean: "np.ndarray[tuple[int], np.dtype[np.float64]]"
    deviation: "np.ndarray[tuple[int], np.dtype[np.float64]]"


class Results:
    """The outcomes of a study."""

    def __init__(self, study: Study, outcomes: Sequence[Outcome], jobs: int = 1) -> None:
        self.study = study
        self.outcomes = tuple(outcomes)
        self.jobs = jobs
        self._runs: dict[tuple[str, ...], list[tuple[int, Run]]] = {}
        for outcome in outcomes:
            if outcome.run is not None and outcome.run.rounds:
                self._runs.setdefault(outcome.cell.group, []).append((outcome.cell.seed, outcome.run))

    @property
    def rows(self) -> tuple[str, ...]:
        return self.study.rows.labels

    @property
    def columns(self) -> list[Column]:
        return self.study.columns

    @cached_property
    def all_runs(self) -> list[Run]:
        return [run for runs in self._runs.values() for _, run in runs]

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.state == "failed"]

    @property
    def missing(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.state == "not run"]

    def runs(self, row: str, column: Column) -> list[Run]:
        """The runs of one point of the grid, one a seed."""
        return [run for _, run in self._runs.get((row, *column), [])]

    @cached_property
    def targets(self) -> list[float]:
        return sorted({run.target for run in self.all_runs})

    @cached_property
    def at_round(self) -> int:
        """The round whose accuracies are compared: the study's, or the last that all runs have."""
        common = min((len(run.rounds) for run in self.all_runs), default=0)
        return self.study.at_round or common

    def accuracy(self, run: Run) -> float:
        """Aggregated accuracy at the compared round, or at the last one of a run that is shorter."""
        return _at(run, self.at_round).aggregated_accuracy

    def client_accuracy(self, run: Run) -> float:
        """Mean accuracy of the clients there, or in the latest round before in which they were measured."""
        measured = [r for r in run.rounds if r.round <= self.at_round and not math.isnan(r.client_accuracy_mean)]
        return measured[-1].client_accuracy_mean if measured else math.nan

    def mean(self, row: str, column: Column, figure: Callable[[Run], float]) -> Mean | None:
        return Mean.of([figure(run) for run in self.runs(row, column)])

    def rounds_to_target(self, row: str, column: Column) -> Reached:
        return self._reached(row, column, lambda run: run.reached.round if run.reached else None)

    def bytes_to_target(self, row: str, column: Column) -> Reached:
        return self._reached(row, column, lambda run: run.bytes_to_target)

    def paired(self, row: str, other: str, column: Column) -> PairedTest | None:
        """`row` against `other` by accuracy at the compared round, over the seeds that both have."""
        one, two = (dict(self._runs.get((name, *column), [])) for name in (row, other))
        shared = [seed for seed in one if seed in two]
        return paired_test([self.accuracy(one[s]) for s in shared], [self.accuracy(two[s]) for s in shared])

    def curve(self, row: str, column: Column, by_bytes: bool = False, clients: bool = False) -> Curve | None:
        """Accuracy over rounds or bytes, mean over seeds, as far as all seeds went."""
        runs = self.runs(row, column)
        length = min((len(run.rounds) for run in runs), default=0)
        if not length:
            return None
        values = np.array([[_accuracy(r, clients) for r in run.rounds[:length]] for run in runs])
        along = [run.bytes_after if by_bytes else [r.round for r in run.rounds] for run in runs]
        x = np.array([list(points)[:length] for points in along], dtype=float).mean(axis=0)
        known = ~np.isnan(values).any(axis=0)
        if not known.any():
            return None
        deviation = values.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(length)
        return Curve(x[known], values.mean(axis=0)[known], deviation[known])

    def _reached(self, row: str, column: Column, figure: Figure) -> Reached:
        runs = self.runs(row, column)
        known = tuple(float(value) for run in runs if (value := figure(run)) is not None)
        return Reached(known, len(runs), min((len(run.rounds) for run in runs), default=0))


def package_bytes(run: Run) -> float:
    """Bytes of packages that one peer sends in a round."""
    return run.bytes_by_kind["package"] / len(run.rounds) / int(run.summary["peers"])


def total_bytes(run: Run) -> float:
    """All bytes that one peer sends in a round."""
    return run.bytes_after[-1] / len(run.rounds) / int(run.summary["peers"])


def seconds_a_round(run: Run) -> float:
    """Wall time of a round without the observer's evaluation, where a run tells them apart."""
    return run.wall.get("training", sum(r.wall for r in run.rounds)) / len(run.rounds)


def memory(run: Run) -> float:
    """Most bytes that the run held at once; not a number where unknown."""
    held = run.summary["memory"].get("pss_total", run.summary["memory"].get("peak_rss"))
    return math.nan if held is None else float(held)


def _at(run: Run, number: int) -> Round:
    return next((r for r in reversed(run.rounds) if r.round <= number), run.rounds[-1])


def _accuracy(r: Round, clients: bool) -> float:
    return r.client_accuracy_mean if clients else r.aggregated_accuracy
