"""Cells as processes: what is finished stays, what is not is run, failures and Ctrl-C leave a usable folder."""

import io
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from spark_node.compare import resources
from spark_node.compare.progress import LiveView, PlainView, Silent
from spark_node.compare.runner import Outcome, Runner, Running
from spark_node.compare.study import Cell, Study, ad_hoc, algorithm_axis
from spark_node.errors import UserError
from tests.unit.fabricated import write_run

STAND_IN = (sys.executable, "-m", "tests.unit.quick_cell")
ROOT = Path(__file__).resolve().parents[2]


def study(seeds: Sequence[int] = (0, 1), **base: object) -> Study:
    settings = {"run.rounds": 3, "run.nodes": 4, "topology.degree": 2, "run.target_accuracy": 0.8}
    settings |= {key.replace("__", "."): value for key, value in base.items()}
    return ad_hoc([algorithm_axis(["spark", "ntk-dfl"])], seeds, base=settings)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of what was started."""
    log = tmp_path / "started.jsonl"
    log.touch()
    monkeypatch.setenv("STAND_IN_LOG", str(log))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("STAND_IN", raising=False)
    return log


def names(log: Path) -> list[str]:
    return sorted(json.loads(line)["out"] for line in log.read_text().splitlines())


def run(folder: Path, cells: Sequence[Cell], jobs: int = 2, **options: object) -> tuple[list[Outcome], bool]:
    return Runner(folder, cells, jobs, command=STAND_IN, **options).run(Silent())  # type: ignore[arg-type]


def test_every_cell_is_run_once_and_not_again(tmp_path: Path, started: Path) -> None:
    cells = study().cells()
    outcomes, interrupted = run(tmp_path / "out", cells)
    assert not interrupted
    assert [outcome.state for outcome in outcomes] == ["done"] * 4
    assert [outcome.cell for outcome in outcomes] == cells
    assert names(started) == sorted(cell.name for cell in cells)
    written = {cell.name: (tmp_path / "out" / "cells" / cell.name / "summary.json").stat() for cell in cells}
    again, _ = run(tmp_path / "out", cells)
    assert [outcome.state for outcome in again] == ["done"] * 4
    assert len(names(started)) == 4, "nothing was started"
    for cell in cells:
        now = (tmp_path / "out" / "cells" / cell.name / "summary.json").stat()
        assert (now.st_ino, now.st_mtime_ns) == (written[cell.name].st_ino, written[cell.name].st_mtime_ns)


def test_side_by_side_every_run_gets_its_share_of_the_cores(
    tmp_path: Path, started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "cores", lambda: 4)
    run(tmp_path / "out", study(seeds=(0,)).cells(), jobs=2)
    assert {json.loads(line)["workers"] for line in started.read_text().splitlines()} == {2}


def test_an_interrupted_or_failed_cell_is_moved_aside_and_run_again(tmp_path: Path, started: Path) -> None:
    first, second, third, fourth = cells = study().cells()
    place = tmp_path / "out" / "cells"
    write_run(place / first.name, first.config, accuracies=(0.5,), status="interrupted")
    write_run(place / second.name, second.config, accuracies=(0.5,), status="failed")
    (place / third.name).mkdir()
    (place / third.name / "rounds.jsonl").write_text("half a li")
    write_run(place / fourth.name, fourth.config)
    outcomes, _ = run(tmp_path / "out", cells)
    assert [outcome.state for outcome in outcomes] == ["done"] * 4
    assert names(started) == sorted(cell.name for cell in (first, second, third))
    aside = tmp_path / "out" / "aside"
    assert sorted(path.name for path in aside.iterdir()) == sorted(f"{c.name}-1" for c in (first, second, third))


def test_a_changed_study_runs_what_has_changed(tmp_path: Path, started: Path) -> None:
    run(tmp_path / "out", study().cells())
    started.write_text("")
    changed = study(momentum__mu=0.8).cells()
    outcomes, _ = run(tmp_path / "out", changed)
    assert names(started) == sorted(cell.name for cell in changed)
    assert all(outcome.run and outcome.run.config.momentum.mu == 0.8 for outcome in outcomes)
    started.write_text("")
    run(tmp_path / "out", study(seeds=(0, 1, 2), momentum__mu=0.8).cells())
    assert names(started) == ["ntk-dfl_seed2", "spark_seed2"], "one more seed is one more run a point"


def test_finished_runs_of_other_comparisons_are_taken_over(tmp_path: Path, started: Path) -> None:
    run(tmp_path / "all" / "one", study().cells())
    started.write_text("")
    outcomes, _ = run(tmp_path / "all" / "two", study().cells(), reuse=[tmp_path / "all"])
    assert names(started) == []
    assert all(outcome.run and outcome.run.path.parent == tmp_path / "all" / "two" / "cells" for outcome in outcomes)


def test_a_failed_cell_is_told_with_its_reason_and_the_others_go_on(
    tmp_path: Path, started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "fail:1")
    outcomes, interrupted = run(tmp_path / "out", study().cells())
    assert not interrupted
    assert [outcome.state for outcome in outcomes] == ["done", "failed", "done", "failed"]
    assert outcomes[1].reason == "the run failed: out of luck; see error.log (exit code 1)"
    monkeypatch.delenv("STAND_IN")
    started.write_text("")
    outcomes, _ = run(tmp_path / "out", study().cells())
    assert [outcome.state for outcome in outcomes] == ["done"] * 4
    assert len(names(started)) == 2


class StopsAtTheFirstRound(Silent):
    """Presses Ctrl-C as soon as a running cell has finished a round."""

    def running(self, cells: Sequence[Running]) -> None:
        if any(now.round and now.accuracy == 0.42 for now in cells):
            raise KeyboardInterrupt


def test_an_interrupted_comparison_stops_its_processes_and_goes_on_later(
    tmp_path: Path, started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = study().cells()
    monkeypatch.setenv("STAND_IN", "hang:1")
    runner = Runner(tmp_path / "out", cells, 1, command=STAND_IN)
    outcomes, interrupted = runner.run(StopsAtTheFirstRound())
    assert interrupted
    assert [outcome.state for outcome in outcomes] == ["done", "not run", "not run", "not run"]
    for line in started.read_text().splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(json.loads(line)["pid"], 0)
    left = json.loads((tmp_path / "out" / "cells" / cells[1].name / "summary.json").read_text())
    assert left["status"] == "interrupted", "the run was given the time to write what it had"
    monkeypatch.delenv("STAND_IN")
    started.write_text("")
    outcomes, interrupted = run(tmp_path / "out", cells)
    assert not interrupted
    assert [outcome.state for outcome in outcomes] == ["done"] * 4
    assert cells[0].name not in names(started)


def test_one_comparison_a_folder(tmp_path: Path, started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "hang:0")
    holding = threading.Event()

    class Holds(Silent):
        def running(self, cells: Sequence[Running]) -> None:
            holding.set()
            time.sleep(0.5)
            raise KeyboardInterrupt

    first = Runner(tmp_path / "out", study(seeds=(0,)).cells(), 1, command=STAND_IN)
    thread = threading.Thread(target=first.run, args=(Holds(),))
    thread.start()
    try:
        assert holding.wait(30)
        with pytest.raises(UserError, match="another comparison is writing there"):
            run(tmp_path / "out", study(seeds=(0,)).cells())
    finally:
        thread.join(60)


def test_plain_lines_tell_what_is_done_and_what_is_left() -> None:
    now, text = [0.0], io.StringIO()
    view = PlainView("A study", text, clock=lambda: now[0])
    cells = study().cells()
    view.began(cells[1:], cells[:1], 2)
    now[0] = 40.0
    view.running([Running(cells[1], 1, 0.5, 40.0), Running(cells[2], 0, None, 40.0)])
    view.ended(Outcome(cells[1], "failed", reason="no luck"), 40.0)
    lines = text.getvalue().splitlines()
    assert lines[0] == "A study: 4 runs, 1 finished before, 2 at a time"
    assert lines[1].startswith("under way: SPARK, seed 1: round 1/3, 50.00%; NTK-DFL, seed 0: starting, 40 s; about ")
    assert lines[2].startswith("[2/4] SPARK, seed 1: failed: no luck; about 1:20 left")


def test_the_live_view_shows_what_is_done_and_what_is_under_way() -> None:
    now, text = [0.0], io.StringIO()
    console = Console(file=text, force_terminal=True, width=100, color_system=None)
    view = LiveView("A study", console, clock=lambda: now[0])
    cells = study().cells()
    view.began(cells, [], 2)
    console.print(view.render())
    now[0] = 10.0
    view.ended(Outcome(cells[0], "failed", reason="no luck"), 10.0)
    view.running([Running(cells[1], 2, 0.61, 10.0)])
    console.print(view.render())
    shown = text.getvalue()
    assert "0/4  0:00" in shown
    assert "1/4  0:10" in shown
    assert "left" in shown
    assert "failed: no luck" in shown
    assert "round 2/3, 61.00%" in shown


def test_as_many_runs_at_once_as_cores_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "cores", lambda: 8)
    cells = study(seeds=range(10)).cells()
    one = resources.estimated_memory(cells[0].config)
    assert resources.default_jobs(cells, free=100 * one) == 8
    assert resources.default_jobs(cells, free=4 * one) == 3
    assert resources.default_jobs(cells, free=one // 2) == 1
    assert resources.default_jobs(cells[:2], free=100 * one) == 2
    flat = study(package__projection="flat", package__sketch_size=10_000, run__nodes=12).cells()
    assert resources.estimated_memory(flat[0].config) > 2 * 10**9
