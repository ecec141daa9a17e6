"""The command line: what it accepts, what it refuses, and what it leaves behind."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spark_node
from spark_node import config as configuration
from spark_node.cli import run as run_command
from spark_node.cli.main import main, parser
from spark_node.config import Config
from spark_node.errors import ConfigError
from spark_node.observe.records import RunInfo, Watcher
from tests.unit.fabricated import INFO, record, records

SMALL = ["--nodes", "4", "--rounds", "5", "--degree", "2", "--set", "run.target_accuracy=0.8"]
Runner = Callable[[Config, Any, Any, Watcher], None]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_node.observe.plots.figures", lambda runs: {})


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, no_plots: None) -> Callable[[Runner], None]:
    """Put a fake in the place of the engine."""

    def put(fake: Runner) -> None:
        def run(config: Config, dataset: Any, partition: Any, watcher: Watcher, *_: object) -> None:
            fake(config, dataset, partition, watcher)

        monkeypatch.setattr("spark_node.launch.memory.run_in_memory", run)

    return put


def goes_well(config: Config, dataset: Any, partition: Any, watcher: Watcher) -> None:
    watcher.started(INFO)
    for finished in records(config.run.rounds):
        watcher.progress(finished.round, 4, 4)
        watcher.round_done(finished)


def breaks_after_two_rounds(error: BaseException) -> Runner:
    def run(config: Config, dataset: Any, partition: Any, watcher: Watcher) -> None:
        watcher.started(INFO)
        watcher.round_done(record(1, 0.5))
        watcher.round_done(record(2, 0.6))
        raise error

    return run


def arguments(*given: str) -> argparse.Namespace:
    return parser().parse_args(["run", *given])


def one_line_error(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("spark-dfl: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from spark_node.cli.main import parser; parser().format_help();"
        "print(*{'torch', 'matplotlib', 'sklearn', 'networkx'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"\n"


def test_the_module_is_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "spark_node", "--version"], check=True, capture_output=True, text=True
    )
    assert shown.stdout == f"spark-dfl {spark_node.__version__}\n"


def test_help_teaches_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(flag in text for flag in run_command.FLAGS)
    assert "number of peers (allowed: a whole number from 1 to 100000; default: 20)" in text
    assert "spark-dfl run --preset demo" in text


def test_without_a_command_help_is_shown_and_the_exit_code_is_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "raw", "value"),
    [
        ("--nodes", "30", 30),
        ("--rounds", "7", 7),
        ("--degree", "3", 3),
        ("--dataset", "mnist", "mnist"),
        ("--data-dir", "2024", "2024"),
        ("--partition", "dirichlet:0.1", "dirichlet:0.1"),
        ("--algorithm", "ntk-dfl", "ntk-dfl"),
        ("--topology", "ring", "ring"),
        ("--transport", "memory", "memory"),
        ("--seed", "42", 42),
        ("--device", "cuda:1", "cuda:1"),
        ("--kernel", "full", "full"),
        ("--workers", "2", 2),
    ],
)
def test_each_flag_sets_its_setting(flag: str, raw: str, value: object) -> None:
    section, _, name = run_command.FLAGS[flag].partition(".")
    config = run_command.load_config(arguments(flag, raw))
    assert configuration.to_dict(config)[section][name] == value


def test_flags_win_over_file_and_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[run]\nrounds = 8\nseed = 9\n")
    config = run_command.load_config(arguments("--preset", "demo", "--config", "mine.toml", "--seed", "10"))
    assert (config.run.nodes, config.run.rounds, config.run.seed) == (20, 8, 10)


def test_any_setting_can_be_set() -> None:
    config = run_command.load_config(arguments("--set", "model.hidden=[7, 9]", "--set", "momentum.kind=off"))
    assert config.model.hidden == (7, 9)
    assert config.momentum.kind == "off"


def test_a_setting_given_by_flag_and_by_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"given twice, by --nodes and by --set run\.nodes=5"):
        run_command.load_config(arguments("--nodes", "4", "--set", "run.nodes=5"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--nodes", "many"], "run.nodes = 'many'"),
        (["--nodes", "0"], "run.nodes = 0"),
        (["--seed", "-1"], "run.seed = -1"),
        (["--rounds", "1.5"], "run.rounds = 1.5"),
        (["--algorithm", "magic"], "allowed: spark, ntk-dfl"),
        (["--topology", "torus"], "topology.kind = 'torus'"),
        (["--dataset", "imagenet"], "data.dataset = 'imagenet'"),
        (["--transport", "pigeon"], "run.transport = 'pigeon'"),
        (["--preset", "none"], "preset = 'none'"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--set", "learning.eta"], "expected section.key=value"),
        (["--set", "learning.nonsense=1"], "learning.nonsense"),
        (["--degree", "20", "--nodes", "10"], "topology.degree = 20"),
        (["--partition", "dirichlet:zero"], "zero"),
        (["--partition", "by-colour"], "by-colour"),
        (["--partition", "file:missing.json"], "missing.json"),
        (["--nodes", "50000", "--topology", "ring"], "50000 peers"),
        (["--device", "toaster"], "run.device = 'toaster'"),
        (["--device", "cuda:99"], "run.device = 'cuda:99'"),
        (["--device", "meta"], "run.device = 'meta'"),
        (["--set", "model.kind=no.such.module:model"], "no.such.module"),
        (["--dataset", "mnist", "--data-dir", "nowhere"], "nowhere"),
        (["--out", "full"], "--out full: the folder is not empty"),
        (["--out", "full/file"], "--out full/file: is a file"),
        (["--bogus"], "--bogus"),
        (["--node", "3"], "--node"),
        (["extra"], "extra"),
        (["--nodes"], "--nodes"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(
    given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert main(["run", *given]) == 2
    assert said in one_line_error(capsys)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["full", "full/file"]


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 2
    assert "fly" in one_line_error(capsys)


def test_a_run_that_goes_well_leaves_a_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], runner: Callable[[Runner], None]
) -> None:
    runner(goes_well)
    assert main(["run", *SMALL, "--out", "mine"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "80% reached after 3 rounds" in captured.err
    names = {p.name for p in (tmp_path / "mine").iterdir()}
    assert names == {"config.toml", "partition.json", "plots", "report.html", "rounds.jsonl", "run-id", "summary.json"}
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert summary["environment"]["command"] == f"spark-dfl run {' '.join(SMALL)} --out mine"
    counts = json.loads((tmp_path / "mine" / "partition.json").read_text())["label_counts"]
    assert [len(row) for row in counts] == [10] * 4


def test_without_out_the_folder_is_named_after_data_algorithm_and_time(
    tmp_path: Path, runner: Callable[[Runner], None]
) -> None:
    runner(goes_well)
    assert main(["run", *SMALL, "--quiet"]) == 0
    assert main(["run", *SMALL, "--quiet"]) == 0
    first, second = sorted((tmp_path / "runs").iterdir())
    assert re.fullmatch(r"digits-spark-\d{8}-\d{6}", first.name)
    assert second.name.startswith("digits-spark-")


def test_json_on_stdout_is_the_summary_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], runner: Callable[[Runner], None]
) -> None:
    runner(goes_well)
    assert main(["run", *SMALL, "--out", "mine", "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert captured.err == ""


def test_quiet_says_the_answer_on_one_line(
    capsys: pytest.CaptureFixture[str], runner: Callable[[Runner], None]
) -> None:
    runner(goes_well)
    assert main(["run", *SMALL, "--out", "mine", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("spark-dfl: 80% reached after 3 rounds")


def test_an_interrupted_run_keeps_its_finished_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], runner: Callable[[Runner], None]
) -> None:
    runner(breaks_after_two_rounds(KeyboardInterrupt()))
    assert main(["run", *SMALL, "--out", "mine"]) == 130
    assert "Interrupted after 2 of 5 rounds" in capsys.readouterr().err
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("interrupted", 2)
    assert (tmp_path / "mine" / "report.html").is_file()


def test_a_run_interrupted_before_its_start_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], runner: Callable[[Runner], None]
) -> None:
    def never_starts(*_: Any) -> None:
        raise KeyboardInterrupt

    runner(never_starts)
    assert main(["run", *SMALL, "--out", "mine"]) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("out of\nmemory"), ExceptionGroup("peers", [OSError("disk full")])])
def test_a_failed_run_exits_with_one_and_says_why(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str], runner: Callable[[Runner], None]
) -> None:
    runner(breaks_after_two_rounds(error))
    assert main(["run", *SMALL, "--out", "mine"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("spark-dfl: error: the run failed: ")
    assert "out of memory" in last or "disk full" in last
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("failed", 2)
    assert "Traceback" in (tmp_path / "mine" / "error.log").read_text()


def test_a_report_that_cannot_be_drawn_does_not_lose_the_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    runner: Callable[[Runner], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(runs: object) -> None:
        raise RuntimeError("no fonts")

    runner(goes_well)
    monkeypatch.setattr("spark_node.observe.plots.figures", broken)
    assert main(["run", *SMALL, "--out", "mine"]) == 0
    assert "no report: RuntimeError: no fonts; try again with: spark-dfl report mine" in capsys.readouterr().err
    assert json.loads((tmp_path / "mine" / "summary.json").read_text())["status"] == "complete"


def test_settings_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--settings"]) == 0
    text = capsys.readouterr().out
    assert all(setting.key in text for setting in configuration.settings())
    assert "as [section] key = VALUE" in text
    assert "dfedavg: local.epochs = 20, local.batch_size = 25, local.lr = 0.1" in text
    assert "\x1b" not in text
    assert main(["run", "--settings", "--json"]) == 0
    assert [row["key"] for row in json.loads(capsys.readouterr().out)] == [s.key for s in configuration.settings()]


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    shell = f"{sys.executable} -m spark_node run --settings --json | head -n 1"
    shown = subprocess.run(["bash", "-c", shell], check=False, capture_output=True, text=True)
    assert shown.stderr == ""


def test_a_real_run_on_embedded_data_can_be_repeated_from_its_folder(tmp_path: Path, no_plots: None) -> None:
    given = [
        "--nodes",
        "3",
        "--topology",
        "ring",
        "--rounds",
        "2",
        "--set",
        "data.samples_per_node=20",
        "--quiet",
    ]
    assert main(["run", *given, "--out", "first"]) == 0
    assert main(["run", "--config", "first/config.toml", "--quiet", "--out", "second"]) == 0
    first, second = (
        [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    )
    for row in first + second:
        del row["seconds"]
    assert first == second
    assert len(first) == 2


def test_the_information_of_a_run_is_what_the_engine_says(tmp_path: Path, runner: Callable[[Runner], None]) -> None:
    def tells(config: Config, dataset: Any, partition: Any, watcher: Watcher) -> None:
        watcher.started(RunInfo(parameters=99, peers=4, samples_per_peer=(1, 2, 3, 4), test_samples=7))
        watcher.round_done(record(1, 0.5))

    runner(tells)
    assert main(["run", *SMALL, "--out", "mine", "--quiet"]) == 0
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert (summary["parameters"], summary["peers"], summary["test_samples"]) == (99, 4, 7)
