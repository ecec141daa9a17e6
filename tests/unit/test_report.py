"""Plots and reports of finished runs."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from spark_node import topology
from spark_node.cli.main import main
from spark_node.observe import plots, report
from spark_node.observe.history import Run
from spark_node.observe.run_folder import load_run
from tests.unit.fabricated import bare_records, settings, write_run

ALL = ["accuracy", "accuracy_vs_bytes", "client_distribution", "partition", "stage_seconds", "topology"]
VOID = {"meta", "img", "br", "link", "use", "path", "rect", "circle", "line"}


class Outline(HTMLParser):
    """Tags, links and text of a page; fails where tags do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with its report, as `spark-dfl run` leaves it."""
    path = tmp_path_factory.mktemp("runs") / "one"
    run = write_run(path, settings(momentum__mu=0.8))
    report.write_report(run)
    return run


def without_plots(runs: list[Run]) -> str:
    return (
        report.run_page(runs[0], {})
        if len(runs) == 1
        else report.comparison_page(list(zip(report.names(runs), runs, strict=True)), {})
    )


def test_every_plot_is_written_as_png_and_svg(reported: Run) -> None:
    folder = reported.path / "plots"
    assert sorted(p.stem for p in folder.glob("*.png")) == ALL
    assert sorted(p.stem for p in folder.glob("*.svg")) == ALL
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in folder.glob("*.png"))


def test_the_report_needs_nothing_from_outside(reported: Run) -> None:
    page = (reported.path / "report.html").read_text()
    outline = Outline(page)
    assert "script" not in outline.tags
    assert outline.tags.count("svg") == 6
    assert all(link.startswith(("#", "data:")) for link in outline.links)
    assert re.findall(r"url\((?!#)", page) == []
    assert "@import" not in page


def test_inlined_plots_share_no_identifier_and_follow_the_theme(reported: Run) -> None:
    page = (reported.path / "report.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "prefers-color-scheme: dark" in page
    assert "var(--ink)" in page
    figures = page[page.index('<div class="plots">') :]
    assert plots.INK not in figures
    assert all(link[1:] in ids for link in Outline(page).links if link.startswith("#"))


def test_the_report_gives_the_answer_first(reported: Run) -> None:
    text = Outline((reported.path / "report.html").read_text()).text
    assert "80% reached after 3 rounds and 9.09 kB sent" in text
    order = [text.index(part, 500) for part in ("rounds to 80%", "Rounds", "Settings that differ", "Repeat it")]
    assert order == sorted(order)


def test_the_report_lists_the_settings_that_differ_from_the_defaults_and_no_others(reported: Run) -> None:
    page = (reported.path / "report.html").read_text()
    table = page[page.index("Settings that differ") : page.index("Repeat it")]
    assert "momentum.mu" in table
    assert "learning.eta" not in table


def test_the_report_says_how_to_repeat_the_run(reported: Run) -> None:
    page = (reported.path / "report.html").read_text()
    assert "<pre>spark-dfl run --preset demo</pre>" in page
    assert f"<pre>spark-dfl run --config {reported.path}/config.toml</pre>" in page


def test_nothing_of_a_run_becomes_markup(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"&"
    run = write_run(tmp_path / "<b>&run", settings(data__partition=f"file:{evil}", data__folder=evil))
    summary = json.loads((run.path / "summary.json").read_text())
    summary["environment"] = {evil: evil, "command": evil}
    summary["memory"] = {evil: evil}
    summary["bytes_counted"] = summary["status"] = evil
    (run.path / "summary.json").write_text(json.dumps(summary))
    rows = [json.loads(line) for line in (run.path / "rounds.jsonl").read_text().splitlines()]
    for row in rows:
        row["seconds"][evil] = 1.0
        row["bytes_sent"][evil] = 1
    (run.path / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = load_run(run.path)
    other = write_run(tmp_path / "other")
    for page in (report.report_of([read]), without_plots([read, other])):
        outline = Outline(page)
        assert "script" not in outline.tags
        assert "<b>&run" not in page
        assert "alert('x')" in outline.text


@pytest.mark.parametrize(
    "accuracies",
    [(), (0.5,), (math.nan, 0.4), tuple(0.5 + 0.001 * r for r in range(100))],
    ids=["no round", "one round", "not a number", "many rounds"],
)
def test_every_run_can_be_drawn(tmp_path: Path, accuracies: tuple[float, ...]) -> None:
    run = write_run(tmp_path, accuracies=accuracies, status="interrupted")
    found = plots.figures([("run", run)])
    assert ("accuracy" in found) == bool(accuracies)
    Outline(report.report_of([run]))


def test_the_report_of_a_run_shows_only_what_it_has(tmp_path: Path, reported: Run) -> None:
    run = write_run(tmp_path, settings(run__algorithm="dfedavg"), told=bare_records())
    text = Outline(report.write_report(run).read_text()).text
    assert text.startswith("DFedAvg on digits")
    assert "t* Sent" in Outline((reported.path / "report.html").read_text()).text
    assert "t*" not in text
    drawn = plots.accuracy([("run", run)]).axes[0]
    lines = {str(line.get_label()): list(line.get_xdata()) for line in drawn.lines}
    assert lines["aggregated model"] == [1, 2, 3, 4, 5]
    assert lines["clients, mean"] == [2, 4, 5]


def test_a_run_whose_clients_were_never_evaluated_can_be_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path, status="interrupted", told=list(bare_records())[:1])
    report.write_report(run)
    assert not (tmp_path / "plots" / "client_distribution.svg").exists()


def test_a_distribution_of_equal_accuracies_can_be_drawn() -> None:
    for accuracies in ({"a": [0.5, 0.5]}, {"a": [0.5], "b": [0.5, 0.5]}, {"a": [math.nan], "b": [0.3]}):
        plots.svg("clients", plots.client_distribution(accuracies))


def test_the_graph_of_the_report_is_the_one_that_the_peers_derive(tmp_path: Path) -> None:
    for peers, degree in ((2, 1), (20, 4), (300, 5)):
        config = settings(run__nodes=peers, topology__degree=degree)
        run = write_run(tmp_path / str(peers), config)
        drawn = plots.topology(run).axes[0]
        made = topology.graph("regular", range(peers), degree, config.run.seed, run.rounds[-1].round)
        assert len(drawn.collections[0].get_segments()) == len(made.edges)
        plots.svg("topology", plots.topology(run))


def test_a_partition_of_any_shape_can_be_drawn() -> None:
    for peers, labels in ((1, 1), (3, 10), (300, 62)):
        plots.svg("partition", plots.partition(np.ones((peers, labels), dtype=int)))


def test_the_same_run_gives_the_same_svg(reported: Run) -> None:
    first, second = (plots.svg("accuracy", plots.accuracy([("run", reported)])) for _ in range(2))
    assert first == second


def test_runs_are_named_by_what_sets_them_apart(tmp_path: Path) -> None:
    def named(*changes: dict[str, object]) -> list[str]:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        return report.names([write_run(root / f"run{i}", settings(**change)) for i, change in enumerate(changes)])

    assert named({}, {"run__algorithm": "ntk-dfl", "run__seed": 3}) == ["SPARK", "NTK-DFL"]
    assert named({}, {"momentum__kind": "off"}) == ["momentum nesterov", "momentum off"]
    assert named({"run__workers": 1}, {"run__workers": 2}) == ["run0", "run1"]


def test_a_comparison_says_who_is_first_and_who_sends_least(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", accuracies=(0.5, 0.9)),
        write_run(tmp_path / "b", settings(run__algorithm="ntk-dfl"), accuracies=(0.5, 0.6, 0.85)),
    ]
    named = list(zip(report.names(runs), runs, strict=True))
    assert report.comparison_headline(named) == "SPARK reaches 80% first: 2 rounds and 6.06 kB"
    text = Outline(without_plots(runs)).text
    assert "run.algorithm spark ntk-dfl" in text
    never = [("x", write_run(tmp_path / "c", accuracies=(0.5, 0.7)))]
    assert report.comparison_headline(never) == "No run reaches 80%; x comes closest with 70.00%"


def test_a_comparison_warns_of_runs_that_are_hard_to_compare(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", settings(data__partition="iid")),
        write_run(tmp_path / "b", settings(data__partition="dirichlet:0.1"), status="interrupted"),
    ]
    assert report.cautions(runs) == [
        "The runs have different partitions: iid, dirichlet:0.1.",
        "Not complete: b.",
    ]


def test_the_command_rebuilds_the_report_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one")
    assert main(["report", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/one/report.html\n"
    assert (tmp_path / "one" / "report.html").is_file()
    assert (tmp_path / "one" / "plots" / "accuracy.png").is_file()


def test_the_command_compares_several_runs_and_leaves_their_folders_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, algorithm in (("a", "spark"), ("b", "ntk-dfl")):
        write_run(tmp_path / name, settings(run__algorithm=algorithm))
    before = sorted(p.name for p in (tmp_path / "a").iterdir())
    out, pictures = tmp_path / "new" / "page.html", tmp_path / "pictures"
    given = [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out), "--plots", str(pictures), "--json"]
    assert main(["report", *given]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["report"] == str(out)
    assert [run["name"] for run in result["runs"]] == ["SPARK", "NTK-DFL"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == before
    assert Outline(out.read_text()).tags.count("svg") == 4
    assert (pictures / "accuracy.svg").is_file()


def test_the_command_refuses_what_is_no_run_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a")
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "a"), str(tmp_path), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("spark-dfl: error: ")
    assert error.count("\n") == 1
    assert not out.exists()
    assert main(["report", str(tmp_path / "a"), "--out", str(tmp_path)]) == 2
