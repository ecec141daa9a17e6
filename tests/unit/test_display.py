"""What a person sees of a run."""

import io
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from spark_node.config import Config
from spark_node.observe import display, wording
from spark_node.observe.curve import Curve
from spark_node.observe.records import RunInfo
from tests.unit.fabricated import INFO, PEERS, bare_records, record, records, settings, write_run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


def live(config: Config, width: int = 120, height: int = 40, clock: object = None) -> display.LiveDisplay:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    return display.LiveDisplay(config, console, clock or (lambda: 0.0))  # type: ignore[arg-type]


def text_of(shown: display.LiveDisplay) -> str:
    console = shown._console
    with console.capture() as captured:
        console.print(shown.render())
    return captured.get()


def plain_log(config: Config, info: RunInfo, path: Path, **changes: Any) -> list[str]:
    stream = io.StringIO()
    with display.choose(config, stream=stream) as shown:
        shown.started(info)
        for finished in records(**changes):
            shown.progress(finished.round, 1, PEERS)
            shown.round_done(finished)
        shown.finished(write_run(path, config), path / "report.html")
    return stream.getvalue().splitlines()


def test_a_log_gets_one_plain_line_a_round(tmp_path: Path) -> None:
    lines = plain_log(settings(), INFO, tmp_path)
    assert [line[:9] for line in lines if line.startswith("round")] == [f"round {r}/5" for r in range(1, 6)]
    assert all(line.isascii() and "\x1b" not in line for line in lines)
    assert "target 80% reached in round 3" in lines


def test_a_log_stays_within_eighty_columns_however_large_the_run(tmp_path: Path) -> None:
    config = settings(run__rounds=1_000_000, data__dataset="mnist-writers", data__partition="writer")
    info = RunInfo(123_456_789, 100_000, (1, 1_000_000), 100_000)
    sent = {"weights": 987_654_321_000_000, "package": 0, "control": 0}
    lines = plain_log(config, info, tmp_path, bytes_sent=sent, seconds={"round": 86_000.0}, loss=12345.678)
    assert max(len(line) for line in lines if not line.startswith(("run folder", "report"))) < 80


def test_the_log_of_a_diverged_run_has_no_surprises(tmp_path: Path) -> None:
    lines = plain_log(settings(), INFO, tmp_path, aggregated_accuracy=math.nan, loss=math.nan)
    assert any("accuracy    n/a" in line for line in lines)


def test_what_a_round_does_not_have_is_shown_as_such(tmp_path: Path) -> None:
    stream, shown = io.StringIO(), live(settings())
    plain = display.PlainDisplay(settings(), stream)
    shown.started(INFO)
    for finished in bare_records():
        shown.progress(finished.round, PEERS, PEERS)
        shown.round_done(finished)
        plain.round_done(finished)
        if finished.round < 5:
            assert f"0/{PEERS}" in text_of(shown)
    assert [line.count("n/a") for line in stream.getvalue().splitlines() if line.startswith("round")] == [2, 1, 2, 1, 1]
    assert text_of(shown).count("n/a") == 7
    assert "nan" not in (stream.getvalue() + text_of(shown)).lower()


def test_a_pipe_a_dumb_terminal_and_a_pipe_with_forced_colour_get_the_plain_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(display.choose(settings(), stream=io.StringIO()), display.PlainDisplay)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(display.choose(settings(), stream=io.StringIO()), display.PlainDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display.choose(settings(), stream=Terminal()), display.PlainDisplay)


def test_a_terminal_gets_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(display.choose(settings(), stream=Terminal()), display.LiveDisplay)


def test_quiet_is_one_line_and_silent_is_none(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for silent, expected in ((False, 1), (True, 0)):
        stream = io.StringIO()
        with display.choose(settings(), quiet=True, silent=silent, stream=stream) as shown:
            shown.started(INFO)
            shown.round_done(record(1, 0.5))
            shown.note("Writing")
            shown.finished(run, None)
        assert stream.getvalue().count("\n") == expected


def test_the_live_view_tells_what_is_run_and_how_it_goes() -> None:
    shown = live(settings())
    assert "Preparing SPARK on digits" in text_of(shown)
    shown.started(INFO)
    assert "The first round is under way" in text_of(shown)
    for finished in records(rounds=3):
        shown.round_done(finished)
    shown.progress(4, 2, PEERS)
    text = text_of(shown)
    assert "SPARK on digits (iid)" in text
    for expected in ("7,510 parameters", "4 peers", "★ target", "3/5", "Round 4", "2/4"):
        assert expected in text


def test_the_time_left_comes_from_the_latest_rounds() -> None:
    now = [0.0]
    shown = live(settings(run__rounds=10), clock=lambda: now[0])
    shown.started(INFO)
    now[0] = 3.0
    shown.progress(1, 1, 4)
    assert "1:57 left" in text_of(shown)
    shown.round_done(record(1, 0.5, seconds={"round": 60.0}))
    assert "9:00 left" in text_of(shown)
    now[0] = 33.0
    assert "8:30 left" in text_of(shown)


@pytest.mark.parametrize(("width", "height"), [(40, 16), (60, 24), (80, 24), (100, 30), (112, 20), (200, 60)])
def test_the_live_view_fits_the_terminal(width: int, height: int) -> None:
    shown = live(settings(run__rounds=200), width, height)
    shown.started(INFO)
    for finished in records(rounds=30):
        shown.round_done(finished)
    shown.progress(31, 1, PEERS)
    lines = text_of(shown).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any("30/200" in line for line in lines)


def test_names_are_shown_as_they_are_and_never_as_markup() -> None:
    shown = live(settings(data__partition="file:[bold]x[/bold]/[/]"))
    shown.started(INFO)
    assert "(file:[bold]x[/bold]/[/])" in text_of(shown)


def test_the_final_panel_answers_first_and_says_where_things_are(tmp_path: Path) -> None:
    run = write_run(tmp_path, accuracies=(0.5, 0.85, 0.82))
    console = Console(file=io.StringIO(), width=200, color_system=None)
    with console.capture() as captured:
        console.print(display.final_panel(run, tmp_path / "report.html"))
    text = captured.get()
    assert text.index("80% reached after 2 rounds and 6.06 kB sent") < text.index("82.00%")
    for expected in ("85.00%  (round 2)", "10 s  (3 rounds)", str(tmp_path), "report.html"):
        assert expected in text


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_the_final_panel_says_when_a_run_is_not_complete(tmp_path: Path, status: str) -> None:
    run = write_run(tmp_path, accuracies=(0.5,), status=status)
    console = Console(file=io.StringIO(), width=100, color_system=None)
    with console.capture() as captured:
        console.print(display.final_panel(run, None))
    assert f"{status.capitalize()} after 1 of 5 rounds" in captured.get()
    assert "80% not reached in 1 round" in captured.get()
    assert "--resume" not in captured.get()  # it keeps no checkpoints
    (run.path / "checkpoints").mkdir()
    with console.capture() as captured:
        console.print(display.final_panel(run, None))
    assert "spark-dfl run --resume" in captured.get()


@given(
    st.lists(st.floats(0, 1) | st.just(math.nan), max_size=60),
    st.integers(1, 60),
    st.floats(0, 1),
    st.integers(1, 12),
    st.integers(1, 90),
)
def test_a_curve_of_anything_keeps_its_size(
    values: list[float], rounds: int, target: float, height: int, width: int
) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(Curve(values, rounds, target, height), no_wrap=True, crop=True)
    lines = captured.get().splitlines()
    assert len(lines) == max(height, 2) + 2
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (999, "999 B"), (999_499, "999 kB"), (999_999, "1.00 MB"), (12_345_678, "12.3 MB")],
)
def test_bytes_are_said_with_three_digits(count: int, said: str) -> None:
    assert wording.size(count) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.5, "0.50 s"), (9.999, "10 s"), (59.6, "1 min 00 s"), (312, "5 min 12 s"), (3_780, "1 h 03 min")],
)
def test_durations_are_said_for_a_reader(seconds: float, said: str) -> None:
    assert wording.duration(seconds) == said
