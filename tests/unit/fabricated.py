"""Runs that never happened, for tests of what is shown and written."""

import dataclasses
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spark_node.config import Config
from spark_node.observe.history import Run
from spark_node.observe.records import RoundRecord, RunInfo
from spark_node.observe.run_folder import RunFolder

PEERS = 4
INFO = RunInfo(parameters=7510, peers=PEERS, samples_per_peer=(70, 70, 71, 69), test_samples=359)
LABEL_COUNTS = [[10, 20, 40], [70, 0, 0], [1, 35, 35], [23, 23, 23]]


def settings(**changes: Any) -> Config:
    given = {
        "run__nodes": PEERS,
        "run__rounds": 5,
        "run__target_accuracy": 0.8,
        "topology__degree": 2,
        **changes,
    }
    return Config().replace(**given)


def record(round: int, accuracy: float, **changes: Any) -> RoundRecord:
    facts: dict[str, Any] = {
        "round": round,
        "aggregated_accuracy": accuracy,
        "client_accuracy": tuple(accuracy - 0.1 + 0.02 * peer for peer in range(PEERS)),
        "bytes_sent": {"weights": 1000, "package": 2000, "control": 30},
        "seconds": {"round": 2.0, "training": 1.5, "evaluation": 0.5, "jacobian": 1.0, "evolution": 3.0},
        "neighbours_expected": 8,
        "neighbours_used": 7,
        "loss": 1.0 / round,
        "t_star_mean": 400.0,
        "eta": 0.01,
        "alpha": 1.0,
        "tau": 1.0,
    }
    return RoundRecord(**{**facts, **changes})


def records(rounds: int = 5, seed: int = 0, **changes: Any) -> Iterator[RoundRecord]:
    """An accuracy that rises from 0.4 towards 0.9."""
    dice = random.Random(seed)
    for r in range(1, rounds + 1):
        yield record(r, 0.9 - 0.5 * math.exp(-0.6 * r) + dice.gauss(0, 0.002), **changes)


def bare_records(rounds: int = 5, clients_every: int = 2) -> Iterator[RoundRecord]:
    """Of an algorithm that tells nothing of itself, with clients evaluated in some rounds only."""
    untold: dict[str, Any] = dict.fromkeys(("loss", "t_star_mean", "eta", "alpha", "tau"))
    for finished in records(rounds, **untold):
        known = finished.round % clients_every == 0 or finished.round == rounds
        yield finished if known else dataclasses.replace(finished, client_accuracy=())


def write_run(
    path: Path,
    config: Config | None = None,
    accuracies: tuple[float, ...] | None = None,
    status: str = "complete",
    told: Iterable[RoundRecord] | None = None,
) -> Run:
    """A run folder as the real writer writes it, without a report; of the records told, or of accuracies."""
    folder = RunFolder(
        path,
        config or settings(),
        command="spark-dfl run --preset demo",
        label_counts=LABEL_COUNTS,
        clock=iter(range(0, 1000, 10)).__next__,
    )
    folder.started(INFO)
    rounds = records() if accuracies is None else (record(r, a) for r, a in enumerate(accuracies, start=1))
    for finished in rounds if told is None else told:
        folder.round_done(finished)
    return folder.finish(status)
