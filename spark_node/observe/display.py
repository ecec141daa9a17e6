"""What a person sees of a run: a live view on a terminal, a line a round in a log, one line with --quiet.

All of it goes to stderr; stdout belongs to --json.
"""

import math
import shlex
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from spark_node.config import Config
from spark_node.observe import wording
from spark_node.observe.curve import Curve
from spark_node.observe.history import Round, Run
from spark_node.observe.records import RoundRecord, RunInfo, Watcher
from spark_node.observe.run_folder import CHECKPOINTS

_COLUMNS = ["Round", "Aggregated", "Change", "Clients", "Loss", "Sent", "Time"]
_MANY_ROWS = 10
_LINE_WIDTH = 79
_SIDE_BY_SIDE = 112
"""Columns from which the curve stands beside the table instead of below it."""


class Display(Watcher, Protocol):
    """A watcher that a person reads. Used as a context: leaving it restores the terminal."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def note(self, text: str) -> None:
        """What is being done besides rounds."""

    def finished(self, run: Run, report: Path | None) -> None:
        """Once, at the end: the answer, and where the run folder and its report are."""


def choose(config: Config, *, quiet: bool = False, silent: bool = False, stream: TextIO | None = None) -> Display:
    """The display that fits where stderr leads."""
    stream = sys.stderr if stream is None else stream
    if silent or quiet:
        return QuietDisplay(None if silent else stream)
    console = live_console(stream)
    return PlainDisplay(config, stream) if console is None else LiveDisplay(config, console)


def live_console(stream: TextIO) -> Console | None:
    """A console for a live view; None where the stream leads to a file, a pipe or a terminal that knows no more."""
    console = Console(file=stream)
    able = stream.isatty() and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")
    return console if able else None


class QuietDisplay:
    """Nothing but the answer, on one line; without a stream not even that."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to restore."""

    def started(self, info: RunInfo) -> None:
        """Quiet."""

    def progress(self, round: int, done: int, total: int) -> None:
        """Quiet."""

    def round_done(self, record: RoundRecord) -> None:
        """Quiet."""

    def note(self, text: str) -> None:
        """Quiet."""

    def finished(self, run: Run, report: Path | None) -> None:
        if self._stream is not None:
            print(f"spark-dfl: {wording.one_line(run)}; {run.path}", file=self._stream, flush=True)


class PlainDisplay(QuietDisplay):
    """A line a round, plain ASCII, for logs and terminals that know no more."""

    def __init__(self, config: Config, stream: TextIO) -> None:
        super().__init__(stream)
        self._out = stream
        self._config = config
        self._reached = False

    def started(self, info: RunInfo) -> None:
        config = self._config
        self._wrapped(
            f"{wording.task(config)}: {wording.network(config, info.peers)}; "
            f"{wording.model(config, info.parameters)}; {samples(info)}; seed {config.run.seed}"
        )
        if info.privacy is not None:
            self._wrapped(f"privacy: {info.privacy.in_words()}")

    def round_done(self, record: RoundRecord) -> None:
        planned = self._config.run.rounds
        counter = f"{record.round:>{len(str(planned))}}/{planned}"
        finished = Round.of(record)
        self._wrapped(
            f"round {counter}  accuracy {wording.percent(finished.aggregated_accuracy):>6}"
            f"  clients {wording.percent(finished.client_accuracy_mean):>6}  loss {wording.decimal(finished.loss)}"
            f"  {wording.size(finished.bytes_total):>7}  {wording.duration(finished.wall)}"
        )
        if not self._reached and finished.aggregated_accuracy >= self._config.run.target_accuracy:
            self._reached = True
            self._line(f"target {wording.target(self._config.run.target_accuracy)} reached in round {record.round}")

    def note(self, text: str) -> None:
        if text:
            self._wrapped(text)

    def finished(self, run: Run, report: Path | None) -> None:
        if run.status != "complete":
            self._wrapped(f"{wording.state(run)}.")
        self._wrapped(f"{wording.headline(run)}.")
        if run.rounds:
            self._wrapped(f"{wording.outcome(run).capitalize()}. {wording.cost(run)}.")
        self._line(f"run folder: {run.path}")
        if report is not None:
            self._line(f"report:     {report}")

    def _wrapped(self, text: str) -> None:
        for line in textwrap.wrap(text, _LINE_WIDTH, subsequent_indent="  "):
            self._line(line)

    def _line(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class LiveDisplay:
    """The run as it goes on: what is run, the latest rounds, the curve, and how long it will take."""

    def __init__(self, config: Config, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._console = console
        self._clock = clock
        self._info: RunInfo | None = None
        self._rounds: list[Round] = []
        self._reached: Round | None = None
        self._note = ""
        self._now = (1, 0, config.run.nodes)
        self._began = self._round_began = clock()
        self._live = Live(
            get_renderable=self.render,
            console=console,
            refresh_per_second=5,
            transient=True,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def started(self, info: RunInfo) -> None:
        self._info = info
        self._now = (1, 0, info.peers)
        self._began = self._round_began = self._clock()

    def progress(self, round: int, done: int, total: int) -> None:
        self._now = (round, done, total)

    def round_done(self, record: RoundRecord) -> None:
        finished = Round.of(record)
        self._rounds.append(finished)
        if self._reached is None and finished.aggregated_accuracy >= self._config.run.target_accuracy:
            self._reached = finished
        self._now = (record.round + 1, 0, self._now[2])
        self._round_began = self._clock()

    def note(self, text: str) -> None:
        self._note = text
        self._live.refresh()

    def finished(self, run: Run, report: Path | None) -> None:
        self._live.stop()
        if self._info is not None:
            self._console.print(self._header(self._info))
        if self._rounds:
            self._console.print(self._body(full=True))
        self._console.print(final_panel(run, report))

    def render(self) -> RenderableType:
        """The whole view, as it is now."""
        if self._info is None:
            return Spinner("dots", Text(self._note or f"Preparing {wording.task(self._config)}", style="dim"))
        # The last line is empty: a terminal that echoes ^C there does not shift the view.
        return Group(self._header(self._info), self._body(), Text(""), Padding(self._bars(), (0, 1)), Text(""))

    def _header(self, info: RunInfo) -> RenderableType:
        config = self._config
        lines = Text(overflow="ellipsis", no_wrap=True)
        lines.append(f"{wording.network(config, info.peers)}\n")
        lines.append(
            f"{wording.model(config, info.parameters)} · {samples(info)} · seed {config.run.seed}",
            style="dim",
        )
        if info.privacy is not None:
            lines.append(f"\nprivacy: {info.privacy.in_words()}", style="dim")
        title = f"[bold cyan]{wording.algorithm(config)}[/] on [bold]{escape(config.data.title)}[/]"
        title += Text(f" ({config.data.partition})").markup
        return Panel(lines, title=title, title_align="left", border_style="cyan", padding=(0, 1))

    def _body(self, full: bool = False) -> RenderableType:
        """The table and the curve, as large as the terminal allows; in full where it may scroll."""
        if not self._rounds:
            return Text("  The first round is under way.", style="dim")
        width, height = self._console.size
        height = 1000 if full else height
        values = [r.aggregated_accuracy for r in self._rounds]
        planned, target = self._config.run.rounds, self._config.run.target_accuracy
        if width >= _SIDE_BY_SIDE:
            rows = min(max(height - 10, 3), _MANY_ROWS)
            grid = Table.grid(padding=(0, 2), expand=True)
            grid.add_column()
            grid.add_column(ratio=1)
            grid.add_row(self._table(rows), Curve(values, planned, target, height=max(min(rows, len(values)), 6)))
            return grid
        rows = min(max(height - 18, 3), _MANY_ROWS)
        if height < 21:
            return self._table(min(max(height - 10, 3), _MANY_ROWS))
        return Group(self._table(rows), Text(""), Curve(values, planned, target, height=5))

    def _table(self, rows: int) -> Table:
        narrow = self._console.width < 68
        names = ["Round", "Accuracy", "Sent", "Time"] if narrow else _COLUMNS
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", border_style="dim", padding=(0, 1))
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, min_width=1 if narrow else len("★ target"))
        best = max(
            self._rounds,
            key=lambda r: -math.inf if math.isnan(r.aggregated_accuracy) else r.aggregated_accuracy,
        )
        latest = range(max(len(self._rounds) - rows, 0), len(self._rounds))
        for index in latest:
            now, before = self._rounds[index], self._rounds[index - 1] if index else None
            accuracy = Text(wording.percent(now.aggregated_accuracy), style="bold green" if now is best else "bold")
            cells: dict[str, RenderableType] = {
                "Round": str(now.round),
                "Aggregated": accuracy,
                "Accuracy": accuracy,
                "Change": _change(now, before),
                "Clients": wording.percent(now.client_accuracy_mean),
                "Loss": wording.decimal(now.loss),
                "Sent": wording.size(now.bytes_total),
                "Time": wording.duration(now.wall),
            }
            mark = Text("★" if narrow else "★ target", style="yellow") if now is self._reached else Text("")
            table.add_row(*(cells[name] for name in names), mark)
        return table

    def _bars(self) -> RenderableType:
        done, planned = self._rounds[-1].round if self._rounds else 0, self._config.run.rounds
        round_now, peers_done, peers = self._now
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        timing = Text(f"{clock_time(self._clock() - self._began)}  {self._remaining()}", style="dim")
        grid.add_row(
            Text("Rounds", style="bold"),
            _bar(planned, done + (peers_done / peers if peers and done < planned else 0)),
            f"{done}/{planned}",
            timing,
        )
        if self._note:
            grid.add_row(Text(self._note, style="dim"))
        elif done < planned:
            name = Text(f"Round {round_now}")
            grid.add_row(name, _bar(peers, peers_done), f"{peers_done}/{peers}", Text("peers"))
        return grid

    def _remaining(self) -> str:
        """The time left, from the latest rounds, or from the peers of the first one."""
        done, planned = self._rounds[-1].round if self._rounds else 0, self._config.run.rounds
        spent = self._clock() - self._round_began
        if self._rounds:
            recent = self._rounds[-5:]
            one = sum(r.wall for r in recent) / len(recent)
        else:
            _, peers_done, peers = self._now
            if not peers_done:
                return ""
            one = spent * peers / peers_done
        left = max((planned - done) * one - min(spent, one), 0.0)
        return f"{clock_time(left)} left"


def final_panel(run: Run, report: Path | None) -> Panel:
    """The answer first, then what it cost and where it lies."""
    reached = run.reached is not None
    colour = "green" if reached else "yellow"
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(overflow="fold")
    answer = Text(f"{'★' if reached else '·'} {wording.headline(run)}", style=f"bold {colour}")
    if run.final is not None:
        final = wording.percent(run.final.aggregated_accuracy)
        clients = f"clients {wording.percent(run.final.client_accuracy_mean)}"
        lines.add_row("final accuracy", Text.assemble((final, "bold"), f"  ({clients})"))
    if run.best is not None and run.best is not run.final:
        lines.add_row("best accuracy", f"{wording.percent(run.best.aggregated_accuracy)}  (round {run.best.round})")
    kinds = ", ".join(f"{kind} {wording.size(count)}" for kind, count in run.bytes_by_kind.items() if count)
    sent = wording.size(run.bytes_after[-1] if run.rounds else 0)
    lines.add_row("sent", f"{sent}  ({kinds})" if kinds else sent)
    lines.add_row("time", f"{wording.duration(run.seconds)}  ({wording.plural(len(run.rounds), 'round')})")
    lines.add_row("run folder", str(run.path))
    if run.status != "complete" and (run.path / CHECKPOINTS).is_dir():
        lines.add_row("go on with", f"spark-dfl run --resume {shlex.quote(str(run.path))}")
    if report is not None:
        lines.add_row("report", Text(open_command(report), style=f"link {report.resolve().as_uri()}"))
    title = None if run.status == "complete" else Text(wording.state(run), style="bold red")
    return Panel(
        Group(answer, Text(""), lines),
        title=title,
        title_align="left",
        border_style=colour,
        padding=(1, 2),
        expand=False,
    )


def open_command(report: Path) -> str:
    """What to type to see a report."""
    opener = {"darwin": "open", "win32": "start"}.get(sys.platform, "xdg-open")
    return f"{opener} {report}"


def samples(info: RunInfo) -> str:
    """How much data the peers hold, in a phrase."""
    low, high = min(info.samples_per_peer, default=0), max(info.samples_per_peer, default=0)
    held = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{held} samples a peer, {info.test_samples:,} test samples"


def clock_time(seconds: float) -> str:
    """0:07, 12:30, 1:02:03."""
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _bar(total: float, completed: float) -> ProgressBar:
    return ProgressBar(total=total, completed=completed, complete_style="cyan", finished_style="green")


def _change(now: Round, before: Round | None) -> Text:
    if before is None or math.isnan(now.aggregated_accuracy - before.aggregated_accuracy):
        return Text("")
    points = round(100 * (now.aggregated_accuracy - before.aggregated_accuracy), 2)
    if points == 0:
        return Text("=", style="dim")
    return Text(f"{points:+.2f}".replace("-", "−"), style="green" if points > 0 else "red")
