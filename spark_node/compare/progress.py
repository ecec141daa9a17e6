"""How a comparison is shown while it goes on: a live view, plain lines, or nothing."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spark_node.compare.runner import Outcome, Running
from spark_node.compare.study import Cell
from spark_node.observe import wording
from spark_node.observe.display import clock_time, live_console

_LATEST = 6
_PLAIN_EVERY = 30.0
"""Seconds between two plain lines about cells that are under way."""


def choose(title: str, quiet: bool, stream: TextIO | None = None) -> "Silent":
    """The view that fits where stderr leads."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return Silent()
    console = live_console(stream)
    return PlainView(title, stream) if console is None else LiveView(title, console)


class Silent:
    """Shows nothing, and keeps the books for those that do."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._total = self._before = self._jobs = 0
        self._work = self._work_done = 0.0
        self._ended: list[tuple[Outcome, float]] = []
        self._now: Sequence[Running] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to restore."""

    def began(self, waiting: Sequence[Cell], done: Sequence[Cell], jobs: int) -> None:
        self._began = self._clock()
        self._total, self._before, self._jobs = len(waiting) + len(done), len(done), jobs
        self._work = sum(_work(cell) for cell in waiting)

    def running(self, cells: Sequence[Running]) -> None:
        self._now = cells

    def ended(self, outcome: Outcome, seconds: float) -> None:
        self._now = [now for now in self._now if now.cell is not outcome.cell]
        self._work_done += _work(outcome.cell)
        self._ended.append((outcome, seconds))

    @property
    def finished(self) -> int:
        return self._before + len(self._ended)

    def left(self) -> float | None:
        """Seconds to go, at the pace so far; unknown before the first rounds are done."""
        under_way = sum(_work(now.cell) * now.round / now.cell.config.run.rounds for now in self._now)
        done = self._work_done + under_way
        if done <= 0:
            return None
        return max((self._clock() - self._began) * (self._work - done) / done, 0.0)


class PlainView(Silent):
    """A line whenever a cell ends, and now and then what is under way; plain text for logs and dumb terminals."""

    def __init__(self, title: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._title, self._stream = title, stream
        self._said = clock()

    def began(self, waiting: Sequence[Cell], done: Sequence[Cell], jobs: int) -> None:
        super().began(waiting, done, jobs)
        kept = f", {len(done)} finished before" if done else ""
        pace = f", {jobs} at a time" if waiting else ""
        self._line(f"{self._title}: {wording.plural(self._total, 'run')}{kept}{pace}")

    def running(self, cells: Sequence[Running]) -> None:
        super().running(cells)
        if cells and self._clock() - self._said >= _PLAIN_EVERY:
            self._line("under way: " + "; ".join(f"{now.cell.title}: {_stand(now)}" for now in cells) + self._to_go())

    def ended(self, outcome: Outcome, seconds: float) -> None:
        super().ended(outcome, seconds)
        self._line(f"[{self.finished}/{self._total}] {outcome.cell.title}: {said(outcome, seconds)}{self._to_go()}")

    def _to_go(self) -> str:
        left = self.left()
        return "" if not left else f"; about {clock_time(left)} left"

    def _line(self, text: str) -> None:
        self._said = self._clock()
        print(text, file=self._stream, flush=True)


class LiveView(Silent):
    """The comparison as it goes on: cells done, the running ones' round and accuracy, how long it will take."""

    def __init__(self, title: str, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._title, self._console = title, console
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def ended(self, outcome: Outcome, seconds: float) -> None:
        super().ended(outcome, seconds)
        if outcome.state == "failed":
            self._console.print(Text(f"{outcome.cell.title}: {outcome.reason}", style="red"))

    def render(self) -> RenderableType:
        """The whole view, as it is now."""
        left = self.left()
        timing = clock_time(self._clock() - self._began) + (f"  {clock_time(left)} left" if left else "")
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=max(self._total, 1), completed=self.finished, complete_style="cyan")
        head.add_row(Text("Runs", style="bold"), bar, Text(f"{self.finished}/{self._total}  {timing}"))
        rows = Table.grid(padding=(0, 2), expand=True)
        for width in (None, 1, None):
            rows.add_column(no_wrap=True, ratio=width)
        for outcome, seconds in self._ended[-_LATEST:]:
            failed = outcome.state == "failed"
            mark = Text("✗" if failed else "✓", style="red" if failed else "green")
            rows.add_row(mark, Text(outcome.cell.title, overflow="ellipsis"), Text(said(outcome, seconds), style="dim"))
        for now in self._now:
            rows.add_row(Text("▸", style="cyan"), Text(now.cell.title, overflow="ellipsis"), Text(_stand(now)))
        return Group(Text(self._title, style="bold cyan"), rows, Text(""), head, Text(""))


def said(outcome: Outcome, seconds: float) -> str:
    """How a cell ended, in a phrase."""
    if outcome.run is None or outcome.run.final is None:
        return f"{outcome.state}: {outcome.reason}"
    return f"{wording.percent(outcome.run.final.aggregated_accuracy)} after " + (
        f"{wording.plural(len(outcome.run.rounds), 'round')}, {wording.duration(seconds)}"
    )


def _stand(now: Running) -> str:
    rounds = now.cell.config.run.rounds
    accuracy = "" if now.accuracy is None else f", {wording.percent(now.accuracy)}"
    return f"round {now.round}/{rounds}{accuracy}" if now.round else f"starting, {wording.duration(now.seconds)}"


def _work(cell: Cell) -> float:
    """What a cell costs beside others: its rounds times its peers, and a start."""
    return cell.config.run.rounds * cell.config.run.nodes + 20.0
