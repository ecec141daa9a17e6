"""The run folder: written while a run goes on, read back for reports.

config.toml, partition.json and rounds.jsonl grow with the run; summary.json is written last, in one step.
"""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from spark_node import config as configuration
from spark_node.config import Config
from spark_node.errors import UserError
from spark_node.observe.environment import environment, load_average, peak_rss, torch_threads
from spark_node.observe.history import Round, Run, summarise
from spark_node.observe.records import RoundRecord, RunInfo

CONFIG, PARTITION, ROUNDS, SUMMARY = "config.toml", "partition.json", "rounds.jsonl", "summary.json"
REPORT, PLOTS = "report.html", "plots"
CHECKPOINTS, RUN_ID, RESUMES = "checkpoints", "run-id", "resumes.jsonl"

_SUMMARY_TYPES: dict[str, type | tuple[type, ...]] = {
    "status": str,
    "final": dict,
    "bytes_sent": dict,
    "seconds": dict,
    "memory": dict,
    "per_peer": dict,
    "environment": dict,
    "peers": int,
    "parameters": (int, type(None)),
}


class RunFolder:
    """A watcher that writes what it sees. Nothing is on disk before `started`: a bad start leaves nothing."""

    def __init__(
        self,
        path: Path,
        config: Config,
        *,
        command: str = "",
        label_counts: Sequence[Sequence[int]] = (),
        clock: Callable[[], float] = time.monotonic,
        resumed: Run | None = None,
        observed: str = "",
    ) -> None:
        """`resumed`: the run so far, to go on with. `observed`: the run's identity, where others run it."""
        self.path = path
        self._resumed, self._observed = resumed, bool(observed)
        self._resumes: list[dict[str, int]] = []
        self.run_id = observed or (new_run_id() if resumed is None else read_run_id(path))
        self._config = config
        self._command = command
        self._label_counts = label_counts
        self._clock = clock
        self._info: RunInfo | None = None
        self._began = self._before = 0.0
        self._environment: dict[str, Any] = {}
        self._rounds: list[Round] = []
        self._client_accuracy: tuple[float, ...] = ()
        self._memory: dict[str, int] = {}
        self._log: TextIO | None = None

    @property
    def has_started(self) -> bool:
        return self._info is not None

    @property
    def recorded(self) -> int | None:
        """Rounds that a run which is resumed has records of, without a gap; None for a new one."""
        return None if self._resumed is None else len(self._resumed.rounds)

    def started(self, info: RunInfo) -> None:
        try:
            if self._resumed is None:
                self._begin()
            else:
                self._resumes = _read_resumes(self.path / RESUMES)
                (self.path / SUMMARY).unlink(missing_ok=True)
            self._log = (self.path / ROUNDS).open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out {self.path}: cannot be written ({error.strerror}); give another folder") from None
        self._environment = environment(self._config.run, self._command)
        self._info = info
        self._began = self._clock()

    def _begin(self) -> None:
        """The files of a new run."""
        check_is_free(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / CONFIG).write_text(configuration.to_toml(self._config), encoding="utf-8")
        write_atomically(self.path / RUN_ID, f"{self.run_id}\n")
        if self._label_counts:
            counts = [[int(count) for count in row] for row in self._label_counts]
            write_atomically(self.path / PARTITION, json.dumps({"label_counts": counts}) + "\n")

    def progress(self, round: int, done: int, total: int) -> None:
        """Only finished rounds are written."""

    def round_done(self, record: RoundRecord) -> None:
        assert self._log is not None, "round_done before started"
        finished = Round.of(record)
        if self._resumed is not None and not self._rounds:
            self._go_back(self._resumed.rounds, record.round)
        self._log.write(json.dumps(finished.to_row()) + "\n")
        self._log.flush()
        if not self._rounds:
            self._environment["threads"] = torch_threads()
        self._rounds.append(finished)
        self._client_accuracy = record.client_accuracy
        for name, count in record.memory.items():
            self._memory[name] = max(count, self._memory.get(name, 0))

    def _go_back(self, recorded: Sequence[Round], first: int) -> None:
        """The first round after a resumption: rows from there on are of a past that is computed anew."""
        assert self._log is not None
        self._log.close()
        again = [r for r in recorded if r.round >= first]
        self._rounds = [r for r in recorded if r.round < first]
        if not self._observed:
            note = {"round": first, "repeated_rounds": len(again), "repeated_bytes": sum(r.bytes_total for r in again)}
            self._resumes.append(note)
            write_atomically(self.path / RESUMES, "".join(json.dumps(said) + "\n" for said in self._resumes))
        write_atomically(self.path / ROUNDS, "".join(json.dumps(r.to_row()) + "\n" for r in self._rounds))
        self._log = (self.path / ROUNDS).open("a", encoding="utf-8")
        self._resumed = None
        self._before = sum(r.wall for r in self._rounds)

    def finish(self, status: str) -> Run:
        """Write summary.json (status: complete, interrupted or failed) and hand back the run."""
        assert self._log is not None, "finish before started"
        assert self._info is not None
        if self._resumed is not None:  # it ended before its first new round
            self._rounds = list(self._resumed.rounds)
            self._before = sum(r.wall for r in self._rounds)
        seconds = self._before + self._clock() - self._began
        with contextlib.suppress(OSError):
            self._log.close()
        peak = peak_rss()
        summary = summarise(
            self._config,
            self._rounds,
            status=status,
            seconds_total=seconds,
            client_accuracy=self._client_accuracy,
            peers=self._info.peers,
            parameters=self._info.parameters,
            test_samples=self._info.test_samples,
            memory={**self._memory, **({} if peak is None else {"peak_rss": peak})},
            environment={**self._environment, "load_average_at_end": load_average()},
            resumes=self._resumes,
            privacy=None if self._info.privacy is None else self._info.privacy.to_dict(),
        )
        write_atomically(self.path / SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")
        counts = tuple(tuple(int(count) for count in row) for row in self._label_counts)
        return Run(self.path, self._config, tuple(self._rounds), summary, counts)


def new_run_id() -> str:
    """The identity of a run: what its checkpoints and messages are marked with."""
    return secrets.token_hex(8)


def read_run_id(path: Path) -> str:
    """The identity of a run that is to be resumed."""
    try:
        return (path / RUN_ID).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        raise UserError(f"{path}: cannot be resumed: it has no {RUN_ID}") from None


def load_resumable(path: Path) -> Run:
    """A run that can go on; UserError where it is finished or kept no checkpoints."""
    run = load_run(path)
    read_run_id(path)
    if run.status == "complete":
        raise UserError(f"--resume {path}: the run is complete; start a new one with --config {path / CONFIG}")
    if not run.config.checkpoint.enabled:
        raise UserError(f"--resume {path}: the run kept no checkpoints (checkpoint.enabled = false)")
    if [r.round for r in run.rounds] != list(range(1, len(run.rounds) + 1)):
        whole = next(i for i, r in enumerate(run.rounds) if r.round != i + 1)
        run = replace(run, rounds=run.rounds[:whole])
    return run


def load_observed(path: Path, run_id: str) -> Run | None:
    """What an observer has written of this run before; None for a new folder. UserError where it is of another run."""
    if not path.is_dir() or not any(path.iterdir()):
        check_is_free(path)
        return None
    run = load_run(path)
    if read_run_id(path) != run_id:
        raise UserError(f"--out {path}: holds run {read_run_id(path)}, not {run_id}; give a new folder")
    return run


def check_is_free(path: Path) -> None:
    """Refuse a folder that a run could not be written to, before anything is computed."""
    if path.exists() and not path.is_dir():
        raise UserError(f"--out {path}: is a file; give a new folder")
    parent = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"--out {path}: {parent} cannot be written to; give another folder")
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"--out {path}: the folder is not empty; give a new one, or remove it first")


def load_run(path: Path) -> Run:
    """Read a run folder back; UserError where it is none. Without summary.json the run is unfinished."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give the folder that `spark-dfl run` wrote")
    missing = [name for name in (CONFIG, ROUNDS) if not (path / name).is_file()]
    if missing:
        raise UserError(
            f"{path}: not a run folder (no {' and no '.join(missing)}); give one that `spark-dfl run` wrote"
        )
    try:
        config = configuration.load(file=path / CONFIG, environment={})
        rounds = _read_rounds(path / ROUNDS)
        summary = _read_summary(path / SUMMARY)
        counts = _read_label_counts(path / PARTITION)
    except (OSError, UserError) as error:
        raise UserError(f"{path}: not a readable run folder: {error}") from None
    if summary is None:
        summary = summarise(config, rounds, status="unfinished", seconds_total=sum(r.wall for r in rounds))
    return Run(path, config, rounds, summary, counts)


def _read_rounds(file: Path) -> tuple[Round, ...]:
    rounds = []
    text = file.read_text(encoding="utf-8", errors="replace")
    complete, _, _half_written = text.rpartition("\n")
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            rounds.append(Round.from_row(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file.name}, line {number}: not a round ({type(error).__name__}: {error})") from None
    return tuple(rounds)


def _read_resumes(file: Path) -> list[dict[str, int]]:
    """How often the run was resumed, and what was computed again."""
    try:
        return [{str(k): int(v) for k, v in json.loads(line).items()} for line in file.read_text().splitlines()]
    except FileNotFoundError:
        return []
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{file}: not readable ({error}); remove it to resume without its counts") from None


def _read_summary(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    summary = _read_json(file)
    for key, kind in _SUMMARY_TYPES.items():
        if not isinstance(summary.get(key, ...), kind):
            raise UserError(f"{file.name}: {key} is missing or of another type")
    if not isinstance(summary["seconds"].get("total"), int | float):
        raise UserError(f"{file.name}: seconds.total is missing or no number")
    accuracies = summary["per_peer"].get("accuracy")
    if not isinstance(accuracies, list) or not all(isinstance(a, int | float | None) for a in accuracies):
        raise UserError(f"{file.name}: per_peer.accuracy is missing or no list of numbers")
    return summary


def _read_label_counts(file: Path) -> tuple[tuple[int, ...], ...]:
    if not file.exists():
        return ()
    counts = _read_json(file).get("label_counts")
    if not isinstance(counts, list) or not all(isinstance(row, list) for row in counts):
        raise UserError(f"{file.name}: label_counts is missing or no table")
    flat = [count for row in counts for count in row]
    if len({len(row) for row in counts}) > 1 or not all(type(count) is int and count >= 0 for count in flat):
        raise UserError(f"{file.name}: label_counts is no table of whole numbers")
    return tuple(tuple(row) for row in counts)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file.name}: not JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise UserError(f"{file.name}: not a JSON object")
    return dict(value)


def write_atomically(file: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of it."""
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
