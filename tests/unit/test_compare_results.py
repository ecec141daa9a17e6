"""Tables, plots and pages from runs that never happened, and one small comparison that did."""

import csv
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_node.cli.main import main
from spark_node.compare import figures, output, page
from spark_node.compare.results import Results
from spark_node.compare.runner import Outcome
from spark_node.compare.study import PLOTS, Cell, Study, ad_hoc, algorithm_axis, setting_axis
from spark_node.compare.tables import Table, tables
from spark_node.observe.history import Run
from spark_node.observe.run_folder import RunFolder
from tests.unit.fabricated import INFO, record, write_run
from tests.unit.test_report import Outline

CURVES = {
    ("SPARK", "IID"): (0.6, 0.75, 0.85, 0.86),
    ("SPARK", "α = 0.1"): (0.5, 0.7, 0.81, 0.82),
    ("NTK-DFL", "IID"): (0.5, 0.6, 0.75, 0.84),
    ("NTK-DFL", "α = 0.1"): (0.4, 0.5, 0.6, 0.65),
}


def study(seeds: tuple[int, ...] = (0, 1, 2)) -> Study:
    base = {"run.rounds": 4, "run.nodes": 4, "topology.degree": 2, "run.target_accuracy": 0.8}
    axes = [algorithm_axis(["spark", "ntk-dfl"]), setting_axis("data.partition", ["iid", "dirichlet:0.1"])]
    return ad_hoc(axes, seeds, base=base)


def results_of(tmp_path: Path, plan: Study, curve: Callable[[Cell], tuple[float, ...] | None]) -> Results:
    outcomes = []
    for cell in plan.cells():
        accuracies = curve(cell)
        if accuracies is None:
            outcomes.append(Outcome(cell, "failed", reason="no luck <b>"))
        else:
            outcomes.append(Outcome(cell, "done", write_run(tmp_path / cell.name, cell.config, accuracies)))
    return Results(plan, outcomes, jobs=2)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return results_of(tmp_path, study(), lambda c: tuple(a + 0.01 * c.seed for a in CURVES[c.group]))


def named(found: list[Table]) -> dict[str, Table]:
    return {table.name: table for table in found}


def test_rounds_and_bytes_to_target(results: Results) -> None:
    found = named(tables(results))
    rounds, sent = found["rounds_to_target"], found["bytes_to_target"]
    assert rounds.header == ("Algorithm", "IID", "α = 0.1")
    assert rounds.rows == (("SPARK", "3", "3"), ("NTK-DFL", "4", "> 4"))
    assert rounds.best == {(0, 1)}, "the only one that got there has beaten nobody"
    assert "Mean over 3 seeds" in rounds.note
    assert sent.rows == (("SPARK", "9.09 kB", "9.09 kB"), ("NTK-DFL", "12.1 kB", "> 4 rounds"))
    assert "once per receiver" in sent.note, "the table says how bytes were counted"


def test_a_target_that_only_some_seeds_reach(tmp_path: Path) -> None:
    def curve(cell: Cell) -> tuple[float, ...]:
        return {0: (0.5, 0.9, 0.9, 0.9), 1: (0.5, 0.6, 0.6, 0.9), 2: (0.5, 0.5, 0.5, 0.5)}[cell.seed]

    found = named(tables(results_of(tmp_path, study(), curve)))["rounds_to_target"]
    assert found.rows[0][1] == "3 ± 1.4 (1 of 3 seeds > 4)"
    assert found.best == frozenset()


def test_accuracies_are_mean_and_deviation_at_the_same_round(results: Results) -> None:
    found = named(tables(results))["accuracy"]
    assert found.title == "Aggregated test accuracy (%) at round 4"
    assert found.rows[0] == ("SPARK", "87.00 ± 1.00", "83.00 ± 1.00")
    assert found.best == {(0, 1), (0, 2)}
    assert named(tables(results))["clients"].rows[1][1] == "78.00 ± 1.00"


def test_runs_of_different_length_are_compared_at_their_last_common_round(tmp_path: Path) -> None:
    long = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    found = results_of(tmp_path, study((0,)), lambda c: long if c.group[0] == "SPARK" else long[:2])
    assert found.at_round == 2
    assert named(tables(found))["accuracy"].rows[0][1] == "20.00"
    assert "One seed" in named(tables(found))["accuracy"].note


def test_the_test_is_paired_by_seed_and_says_where_seeds_are_too_few(tmp_path: Path) -> None:
    noise = {("SPARK", 0): 0.01, ("SPARK", 1): 0.0, ("NTK-DFL", 0): 0.0, ("NTK-DFL", 1): 0.004}

    def curve(cell: Cell) -> tuple[float, ...] | None:
        if cell.group == ("NTK-DFL", "α = 0.1") and cell.seed == 1:
            return None
        return tuple(a + noise[cell.group[0], cell.seed] for a in CURVES[cell.group])

    found = named(tables(results_of(tmp_path, study((0, 1)), curve)))["significance"]
    differences = np.array([0.02 + 0.01, 0.02 - 0.004])
    effect = differences.mean() / differences.std(ddof=1)
    first, second = found.rows
    assert first[:3] == ("IID", "NTK-DFL", f"{100 * differences.mean():+.2f}")
    assert first[5:] == (f"{effect:.2f}", "2")
    assert second[2] == "too few seeds"
    assert "Fewer than 3 seeds: read nothing into it." in found.note


def test_published_figures_stand_beside_ours(tmp_path: Path, results: Results) -> None:
    from dataclasses import replace

    plan = replace(results.study, published={"rounds_to_target": {"SPARK": {"IID": "6"}}}, paper="Table 1")
    found = named(tables(Results(plan, results.outcomes)))["rounds_to_target_published"]
    assert found.rows == (("SPARK", "6", ""),)
    assert "Table 1" in found.title


def test_curves_are_means_over_seeds(results: Results) -> None:
    curve = results.curve("SPARK", ("IID",))
    assert curve is not None
    assert curve.mean == pytest.approx([0.61, 0.76, 0.86, 0.87])
    assert curve.deviation == pytest.approx([0.01] * 4)
    by_bytes = results.curve("SPARK", ("IID",), by_bytes=True)
    assert by_bytes is not None
    assert by_bytes.x.tolist() == [3030, 6060, 9090, 12120]


def test_every_file_is_written_and_the_page_needs_nothing_from_outside(tmp_path: Path, results: Results) -> None:
    out = tmp_path / "out"
    out.mkdir()
    data = output.write_results(results, out, "spark-dfl compare <this>")
    assert sorted(p.stem for p in (out / "plots").glob("*.png")) == sorted(PLOTS)
    assert sorted(p.stem for p in (out / "plots").glob("*.svg")) == sorted(PLOTS)
    text = (out / "compare.html").read_text()
    outline = Outline(text)
    assert "script" not in outline.tags
    assert outline.tags.count("svg") == len(PLOTS)
    assert all(link.startswith(("#", "data:")) for link in outline.links)
    assert re.findall(r"url\((?!#)", text) == []
    assert "prefers-color-scheme: dark" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert "SPARK: ahead in all 2 settings" in outline.text
    rows = list(csv.DictReader(io.StringIO((out / "compare.csv").read_text())))
    assert len(rows) == 12
    assert rows[0]["algorithm"] == "SPARK"
    assert rows[0]["rounds_to_target"] == "3"
    assert rows[-1]["rounds_to_target"] == ""
    assert json.loads((out / "compare.json").read_text()) == json.loads(json.dumps(data))
    assert data["points"][0]["aggregated_accuracy"]["mean"] == pytest.approx(0.87)
    assert data["tests"][0]["test"]["count"] == 3
    assert "| SPARK | **3** | 3 |" in (out / "compare.md").read_text()


def test_failed_runs_are_listed_and_nothing_becomes_markup(tmp_path: Path) -> None:
    found = results_of(tmp_path, study(), lambda c: None if c.group[0] == "NTK-DFL" else CURVES[c.group])
    out = tmp_path / "out"
    out.mkdir()
    output.write_results(found, out, "x")
    text = (out / "compare.html").read_text()
    assert "NTK-DFL, IID, seed 0 failed: no luck &lt;b&gt;" in text
    assert "failed: NTK-DFL, IID, seed 0" in (out / "compare.md").read_text()
    Outline(text)


@pytest.mark.parametrize(("panels", "across"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 3), (7, 3), (8, 3)])
def test_panels_fill_their_rows(panels: int, across: int) -> None:
    figure, axes = figures._panels(panels)
    assert len(axes) == len(figure.axes) == panels
    spec = axes[-1].get_subplotspec()
    assert spec is not None
    assert spec.get_gridspec().ncols == across


@pytest.mark.parametrize("quick", [True, False])
def test_text_and_page_say_that_figures_are_of_the_quick_size(tmp_path: Path, results: Results, quick: bool) -> None:
    """Its title may name a dataset that the quick size does not use."""
    out = tmp_path / "out"
    out.mkdir()
    output.write_results(Results(replace(results.study, is_quick=quick), results.outcomes), out, "x")
    for name in ("compare.md", "compare.html"):
        assert ("Quick size: embedded digits" in (out / name).read_text()) is quick


def test_the_answer_is_about_what_the_study_asks_first(tmp_path: Path, results: Results) -> None:
    from dataclasses import replace

    def said(*names: str) -> list[str]:
        return page.details(Results(replace(results.study, tables=names), results.outcomes))

    assert said("rounds_to_target")[0] == "IID: SPARK: first to reach 80%, in 3 rounds; the next: 4."
    assert said("bytes_to_target")[0] == "IID: SPARK: fewest bytes to 80%, 9.09 kB; the next: 12.1 kB."
    assert said("accuracy")[1] == "α = 0.1: SPARK: most accurate at round 4, 83.00 ± 1.00 %."
    assert said("cost")[0] == "IID: SPARK and NTK-DFL: least sent, 758 B a peer and round."
    never = results_of(tmp_path / "never", study(), lambda c: (0.1, 0.2))
    assert page.answer(never) == "SPARK and NTK-DFL: ahead in all 2 settings"


def test_a_comparison_without_a_finished_run_still_has_a_page(tmp_path: Path) -> None:
    found = results_of(tmp_path, study(), lambda _: None)
    out = tmp_path / "out"
    out.mkdir()
    data = output.write_results(found, out, "x")
    assert data["answer"] == "No run has finished"
    Outline((out / "compare.html").read_text())


def sparse_run(path: Path, cell: Cell) -> Run:
    """A baseline's run: no loss, no t*, and the clients only measured now and then."""
    folder = RunFolder(path, cell.config, clock=iter(range(0, 1000, 10)).__next__)
    folder.started(INFO)
    for r in range(1, 5):
        clients = (0.5, 0.6, 0.7, 0.8) if r % 2 == 0 else (math.nan,) * 4
        folder.round_done(record(r, 0.2 * r, client_accuracy=clients, loss=math.nan, t_star_mean=math.nan))
    return folder.finish("complete")


def test_clients_that_are_measured_seldom_and_rounds_without_a_loss(tmp_path: Path) -> None:
    plan = study((0, 1))
    cells = plan.cells()
    found = Results(plan, [Outcome(cell, "done", sparse_run(tmp_path / cell.name, cell)) for cell in cells])
    assert named(tables(found))["clients"].rows[0][1] == "65.00 ± 0.00"
    curve = found.curve("SPARK", ("IID",), clients=True)
    assert curve is not None
    assert curve.x.tolist() == [2, 4]
    assert set(figures.figures(found)) == set(PLOTS)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_grids_of_any_shape_can_be_drawn(tmp_path: Path, axes: int) -> None:
    from dataclasses import replace

    more = setting_axis("momentum.mu", [0.5, 0.9])
    plan = study((0,))
    plan = replace(plan, axes=(*plan.axes, more)[:axes])
    found = results_of(tmp_path, plan, lambda c: (0.5, 0.6 + 0.01 * len(c.group)))
    assert "convergence" in figures.figures(found)
    assert page.answer(found)


def test_a_method_that_stays_far_behind_is_drawn_too(tmp_path: Path) -> None:
    found = results_of(
        tmp_path, study((0,)), lambda c: (0.1, 0.2, 0.3) if c.group[0] == "NTK-DFL" else (0.1, 0.6, 0.95)
    )
    low, high = figures.figures(found)["convergence"].axes[0].get_ylim()
    assert 0.2 < low < 0.3  # its best is seen; first rounds may fall out
    assert high > 0.95


def test_the_index_leads_to_every_study(tmp_path: Path, results: Results) -> None:
    file = output.write_index(tmp_path, [("one", results), ("two", results)])
    outline = Outline(file.read_text())
    assert [link for link in outline.links if not link.startswith("#")] == ["one/compare.html", "two/compare.html"]
    assert "2 studies" in outline.text


def test_two_algorithms_and_two_seeds_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    given = ["compare", "--algorithms", "spark,ntk-dfl", "--seeds", "0,1", "--nodes", "4", "--rounds", "2"]
    given += ["--degree", "2", "--set", "data.samples_per_node=30", "--out", str(out), "--jobs", "2", "--json"]
    assert main(given) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert [cell["state"] for cell in data["cells"]] == ["done"] * 4
    assert "[4/4]" in captured.err
    for cell in data["cells"]:
        folder = out / "cells" / cell["cell"]
        assert {"config.toml", "rounds.jsonl", "summary.json"} <= {path.name for path in folder.iterdir()}
        assert cell["rounds"] == 2
        assert 0.1 < cell["aggregated_accuracy"] <= 1
    assert data["points"][0]["seeds"] == 2
    before = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/summary.json")}
    assert main([*given, "--quiet"]) == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("cells/*/summary.json")} == before
    assert json.loads(capsys.readouterr().out)["cells"] == data["cells"]
