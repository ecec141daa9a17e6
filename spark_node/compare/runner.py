"""Runs the cells of a grid, each as a process of its own, several side by side. What is finished is not run again."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Protocol

from spark_node import config as configuration
from spark_node.compare import resources
from spark_node.compare.study import Cell, fingerprint, same_run
from spark_node.errors import UserError
from spark_node.observe.history import Run
from spark_node.observe.run_folder import CONFIG, ROUNDS, SUMMARY, load_run

CELLS, CONFIGS, LOGS, ASIDE, LOCK = "cells", "configs", "logs", "aside", ".lock"
RUN = (sys.executable, "-m", "spark_node", "run")
Announce = Callable[[Sequence[str]], Mapping[str, str]]
_POLL_SECONDS = 0.3
_GRACE_SECONDS = 20.0


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: done, failed, or not run (the comparison was stopped before)."""

    cell: Cell
    state: str
    run: Run | None = None
    reason: str = ""


@dataclass(frozen=True)
class Running:
    """A cell under way, as its folder tells it."""

    cell: Cell
    round: int
    accuracy: float | None
    seconds: float


class Progress(Protocol):
    """Who wants to know how the comparison goes on."""

    def began(self, waiting: Sequence[Cell], done: Sequence[Cell], jobs: int) -> None:
        """Once: the cells that will run, and those that were finished before."""

    def running(self, cells: Sequence[Running]) -> None:
        """A few times a second: the cells under way."""

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """A cell is done or has failed."""


class Runner:
    """The folder of a comparison and its processes."""

    def __init__(
        self,
        folder: Path,
        cells: Sequence[Cell],
        jobs: int | None = None,
        reuse: Sequence[Path] = (),
        command: Sequence[str] = RUN,
        *,
        announce: Announce | None = None,
        ranks: int = 1,
    ) -> None:
        """`announce` is told each command before it starts here, and gives what its environment needs."""
        self._command = command
        self._announce, self._ranks = announce, ranks
        self._folder = folder
        self._cells = cells
        self._jobs = jobs
        self.jobs = jobs or 1
        self._reuse = reuse
        self._started: dict[str, tuple[Cell, subprocess.Popen[bytes], float]] = {}

    def run(self, progress: Progress) -> tuple[list[Outcome], bool]:
        """Run what is missing. The outcome of every cell in order, and whether it was interrupted."""
        with self._alone(), _stop_on_terminate():
            outcomes = {cell.name: done for cell in self._cells if (done := self._finished(cell))}
            waiting = [cell for cell in self._cells if cell.name not in outcomes]
            jobs = self.jobs = self._jobs or resources.default_jobs(
                waiting, [o.run for o in outcomes.values() if o.run]
            )
            progress.began(waiting, [o.cell for o in outcomes.values()], jobs)
            interrupted = False
            try:
                for outcome, seconds in self._run_all(waiting, jobs, progress):
                    outcomes[outcome.cell.name] = outcome
                    progress.ended(outcome, seconds)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                self._stop_all()
        not_run = [Outcome(cell, "not run", reason="stopped before it was finished") for cell in self._cells]
        return [outcomes.get(outcome.cell.name, outcome) for outcome in not_run], interrupted

    def _finished(self, cell: Cell) -> Outcome | None:
        """The finished run of a cell, here or in another comparison; anything else in its place is moved aside."""
        place = self._folder / CELLS / cell.name
        run = _complete(place, cell)
        if run is None and place.exists():
            self._move_aside(place)
        if run is None:
            found = self._elsewhere.get(fingerprint(cell.config))
            if found is None or _complete(found, cell) is None:
                return None
            shutil.copytree(found, place)
            run = _complete(place, cell)
        return Outcome(cell, "done", run)

    @cached_property
    def _elsewhere(self) -> dict[str, Path]:
        """Run folders of other comparisons, by what they ran."""
        found: dict[str, Path] = {}
        for folder in self._reuse:
            for summary in sorted(folder.glob(f"*/{CELLS}/*/{SUMMARY}")):
                if summary.is_relative_to(self._folder):
                    continue
                with suppress(UserError):
                    config = configuration.load(file=summary.with_name(CONFIG), environment={})
                    found.setdefault(fingerprint(config), summary.parent)
        return found

    def _move_aside(self, place: Path) -> None:
        """Keep what an interrupted, failed or differently configured run has left, out of the way."""
        aside = self._folder / ASIDE
        aside.mkdir(parents=True, exist_ok=True)
        count = 1
        while (target := aside / f"{place.name}-{count}").exists():
            count += 1
        place.rename(target)

    def _run_all(self, waiting: Sequence[Cell], jobs: int, progress: Progress) -> Iterator[tuple[Outcome, float]]:
        queue = list(waiting)
        while queue or self._started:
            while queue and len(self._started) < jobs:
                self._start(queue.pop(0), jobs)
            time.sleep(_POLL_SECONDS)
            progress.running([self._look(cell, began) for cell, _, began in self._started.values()])
            for cell, process, began in list(self._started.values()):
                if process.poll() is not None:
                    del self._started[cell.name]
                    yield self._judge(cell, process.returncode), time.monotonic() - began

    def _start(self, cell: Cell, jobs: int) -> None:
        for part in (CELLS, CONFIGS, LOGS):
            (self._folder / part).mkdir(parents=True, exist_ok=True)
        settings = replace(cell.config.run, workers=resources.workers(cell.config, jobs * self._ranks))
        file = self._folder / CONFIGS / f"{cell.name}.toml"
        file.write_text(configuration.to_toml(replace(cell.config, run=settings)), encoding="utf-8")
        out = self._folder / CELLS / cell.name
        command = [*self._command, "--config", str(file), "--out", str(out), "--quiet", "--json", "--no-report"]
        needed = self._announce(command) if self._announce is not None else {}
        with (self._folder / LOGS / f"{cell.name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**_environment(), **needed},
                start_new_session=True,
            )
        self._started[cell.name] = (cell, process, time.monotonic())

    def _look(self, cell: Cell, began: float) -> Running:
        done, accuracy = _latest(self._folder / CELLS / cell.name / ROUNDS)
        return Running(cell, done, accuracy, time.monotonic() - began)

    def _judge(self, cell: Cell, code: int) -> Outcome:
        run = _complete(self._folder / CELLS / cell.name, cell)
        if code == 0 and run is not None:
            return Outcome(cell, "done", run)
        return Outcome(cell, "failed", reason=_last_line(self._folder / LOGS / f"{cell.name}.log", code))

    def _stop_all(self) -> None:
        """Interrupt what still runs, so that it writes what it has; end it where it does not listen."""
        processes = [process for _, process, _ in self._started.values()]
        # A process that a shell started in the background hands on to its children that SIGINT is ignored.
        deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        graces = (0.0, _GRACE_SECONDS) if deaf else (_GRACE_SECONDS, 3.0)
        for number, grace in zip((signal.SIGINT, signal.SIGTERM, signal.SIGKILL), (*graces, 3.0), strict=True):
            left = [process for process in processes if process.poll() is None]
            for process in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
            for process in left:
                with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                    process.wait(grace)
        self._started.clear()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One comparison a folder at a time."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / LOCK).open("w")
        except OSError as error:
            raise UserError(
                f"--out {self._folder}: cannot be written ({error.strerror}); give another folder"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"--out {self._folder}: another comparison is writing there; wait, or give another"
                ) from None
            yield


def _complete(place: Path, cell: Cell) -> Run | None:
    """The run in a folder, if it is complete and of this cell's configuration."""
    try:
        run = load_run(place)
    except UserError:
        return None
    return run if run.status == "complete" and same_run(run.config, cell.config) else None


def _latest(file: Path) -> tuple[int, float | None]:
    """Finished rounds and the latest accuracy."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0].splitlines()
        row = json.loads(lines[-1])
        return len(lines), row["aggregated_accuracy"]
    except (OSError, IndexError, ValueError, KeyError):
        return 0, None


def _last_line(log: Path, code: int) -> str:
    """What a failed process said last, without the prefix that all our messages have."""
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    said = [line.strip() for line in lines if line.strip()]
    errors = [line for line in said if line.startswith("spark-dfl: error: ")] or said[-1:]
    return f"{errors[0].removeprefix('spark-dfl: error: ')} ({ended})" if errors else ended


def _environment() -> dict[str, str]:
    """The environment without settings: a cell's configuration is complete, and nothing may overrule it."""
    return {key: value for key, value in os.environ.items() if not (key.startswith("SPARK_") and "__" in key)}


@contextmanager
def _stop_on_terminate() -> Iterator[None]:
    """SIGTERM ends a comparison as Ctrl-C does: children are stopped and what there is gets written."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
