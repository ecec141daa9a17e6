"""The run folder: what is written, when, and what is read back."""

import json
import math
import os
import platform
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_node import config as configuration
from spark_node.errors import UserError
from spark_node.observe.history import Round
from spark_node.observe.run_folder import RunFolder, check_is_free, load_resumable, load_run
from tests.unit.fabricated import INFO, LABEL_COUNTS, bare_records, record, settings, write_run

SUMMARY_OF_THE_DESIGN = {
    "algorithm",
    "dataset",
    "partition",
    "peers",
    "rounds",
    "seed",
    "target_accuracy",
    "rounds_to_target",
    "bytes_to_target",
    "final",
    "bytes_sent",
    "seconds",
    "memory",
    "environment",
}


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]


def test_nothing_is_on_disk_before_the_run_has_started(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    folder = RunFolder(path, settings())
    assert not folder.has_started
    assert not path.parent.exists()
    folder.started(INFO)
    assert folder.has_started
    assert sorted(p.name for p in path.iterdir()) == ["config.toml", "rounds.jsonl", "run-id"]


def test_the_configuration_reads_back_to_the_same(tmp_path: Path) -> None:
    config = settings(learning__eta=0.123, model__hidden=(7, 9), data__partition="dirichlet:0.3")
    write_run(tmp_path, config)
    assert configuration.load(file=tmp_path / "config.toml", environment={}) == config


def test_a_row_can_be_read_as_soon_as_its_round_is_done(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", settings())
    folder.started(INFO)
    for round_number in (1, 2, 3):
        folder.round_done(record(round_number, 0.5))
        assert [row["round"] for row in rows_of(tmp_path / "run")] == list(range(1, round_number + 1))


def test_a_row_has_what_the_design_promises(tmp_path: Path) -> None:
    write_run(tmp_path, accuracies=(0.5,))
    (row,) = rows_of(tmp_path)
    assert row["aggregated_accuracy"] == 0.5
    assert row["client_accuracy_mean"] == pytest.approx(0.43)
    spread = {"min": 0.4, "q1": 0.415, "median": 0.43, "q3": 0.445, "max": 0.46}
    assert row["client_accuracy"] == pytest.approx(spread)
    assert row["bytes_sent"] == {"weights": 1000, "package": 2000, "control": 30}
    assert row["neighbours"] == {"expected": 8, "used": 7}
    assert set(row) >= {"seconds", "loss", "t_star_mean", "eta", "alpha", "tau"}


def test_the_summary_has_what_the_design_promises(tmp_path: Path) -> None:
    write_run(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) >= SUMMARY_OF_THE_DESIGN | {"status", "per_peer", "bytes_counted"}
    assert summary["status"] == "complete"
    assert summary["rounds"] == 5
    assert summary["bytes_sent"] == {"weights": 5000, "package": 10000, "control": 150, "total": 15150}
    assert summary["seconds"]["total"] == 10
    assert summary["seconds"]["per_round_mean"] == 2.0
    assert summary["seconds"]["stages"] == {"jacobian": 5.0, "evolution": 15.0}
    assert summary["seconds"]["wall"] == {"training": 7.5, "evaluation": 2.5}
    assert len(summary["per_peer"]["accuracy"]) == 4
    assert summary["memory"]["peak_rss"] > 1_000_000
    assert summary["environment"]["command"] == "spark-dfl run --preset demo"


def test_rounds_and_bytes_to_target_include_the_first_round_that_reaches_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, accuracies=(0.5, 0.79, 0.8, 0.7, 0.9))
    assert run.summary["rounds_to_target"] == 3
    assert run.summary["bytes_to_target"] == 3 * 3030
    assert run.bytes_to_target == 3 * 3030


def test_a_target_that_was_not_reached_is_null(tmp_path: Path) -> None:
    run = write_run(tmp_path, accuracies=(0.5, 0.79))
    assert run.summary["rounds_to_target"] is None
    assert run.summary["bytes_to_target"] is None


def test_a_run_without_a_finished_round_has_a_summary(tmp_path: Path) -> None:
    write_run(tmp_path, accuracies=(), status="interrupted")
    run = load_run(tmp_path)
    assert run.status == "interrupted"
    assert run.summary["final"] == {"aggregated_accuracy": None, "client_accuracy_mean": None}
    assert run.summary["seconds"]["per_round_mean"] is None
    assert run.best is run.final is run.reached is None


def test_figures_that_are_not_finite_become_null_and_come_back_as_nan(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", settings())
    folder.started(INFO)
    folder.round_done(record(1, math.nan, loss=math.inf))
    folder.finish("complete")
    text = (tmp_path / "run" / "rounds.jsonl").read_text() + (tmp_path / "run" / "summary.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    (row,) = load_run(tmp_path / "run").rounds
    assert math.isnan(row.loss)
    assert math.isnan(row.aggregated_accuracy)


def test_figures_that_a_round_does_not_have_are_null_and_never_zero(tmp_path: Path) -> None:
    run = write_run(tmp_path, told=bare_records())
    rows = rows_of(tmp_path)
    assert {row[name] for row in rows for name in ("loss", "t_star_mean", "eta", "alpha", "tau")} == {None}
    assert [row["client_accuracy_mean"] is None for row in rows] == [True, False, True, False, False]
    assert rows[0]["client_accuracy"] == dict.fromkeys(("min", "q1", "median", "q3", "max"))
    assert run.summary["final"]["client_accuracy_mean"] is not None
    assert len(run.summary["per_peer"]["accuracy"]) == INFO.peers
    again = load_run(tmp_path)
    assert [r.to_row() for r in again.rounds] == rows


def test_a_run_that_ends_between_evaluations_does_not_know_its_clients(tmp_path: Path) -> None:
    run = write_run(tmp_path, status="interrupted", told=list(bare_records())[:3])
    assert run.summary["final"]["client_accuracy_mean"] is None
    assert run.client_accuracy == ()


def test_the_name_of_the_host_is_not_written(tmp_path: Path) -> None:
    environment = write_run(tmp_path).summary["environment"]
    assert platform.node() not in environment.values()
    assert not any("host" in key for key in environment)


def test_no_temporary_file_stays_behind(tmp_path: Path) -> None:
    write_run(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.toml", "partition.json", "rounds.jsonl", "run-id", "summary.json"}


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = write_run(tmp_path)
    read = load_run(tmp_path)
    assert read.rounds == written.rounds
    assert read.config == written.config
    assert read.summary == written.summary
    assert read.label_counts == written.label_counts == tuple(map(tuple, LABEL_COUNTS))


def test_a_run_that_was_killed_is_read_as_unfinished_without_its_half_written_row(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "summary.json").unlink()
    text = (tmp_path / "rounds.jsonl").read_text()
    (tmp_path / "rounds.jsonl").write_text(text[:-40])
    run = load_run(tmp_path)
    assert run.status == "unfinished"
    assert len(run.rounds) == 4
    assert run.seconds == 8.0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", "this is no TOML"),
        ("config.toml", "[run]\nnodes = -3\n"),
        ("rounds.jsonl", "not json\n"),
        ("rounds.jsonl", "[]\n"),
        ("rounds.jsonl", '{"round": 1}\n'),
        ("rounds.jsonl", "null\n"),
        ("summary.json", "{"),
        ("summary.json", "[]"),
        ("summary.json", '{"status": 3}'),
        ("partition.json", "{}"),
        ("partition.json", '{"label_counts": [[1], [1, 2]]}'),
        ("partition.json", '{"label_counts": [["<b>"]]}'),
    ],
)
def test_a_folder_with_a_broken_file_is_refused_in_one_line(tmp_path: Path, name: str, content: str) -> None:
    write_run(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="not a readable run folder") as caught:
        load_run(tmp_path)
    assert name in str(caught.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_run(tmp_path / "nothing")
    with pytest.raises(UserError, match="not a run folder"):
        load_run(tmp_path)


def test_only_a_new_or_empty_folder_is_free(tmp_path: Path) -> None:
    check_is_free(tmp_path)
    check_is_free(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="not empty; give a new one"):
        check_is_free(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        check_is_free(tmp_path / "file")
    with pytest.raises(UserError, match="cannot be written to"):
        check_is_free(tmp_path / "file" / "below")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written to"):
        check_is_free(tmp_path / "run")


fractions = st.floats(0, 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.lists(fractions, min_size=1, max_size=20),
    fractions,
    numbers,
    st.dictionaries(st.text(max_size=5), st.integers(0, 2**60), max_size=4),
)
def test_every_row_reads_back_to_the_same_round(
    clients: list[float], accuracy: float, loss: float, sent: dict[str, int]
) -> None:
    written = Round.of(record(3, accuracy, client_accuracy=tuple(clients), loss=loss, bytes_sent=sent))
    assert Round.from_row(json.loads(json.dumps(written.to_row()))) == written


def interrupted(path: Path, rounds: int) -> str:
    """A run that was killed after some rounds, in the middle of a row; its identity."""
    folder = RunFolder(path, settings())
    folder.started(INFO)
    for k in range(1, rounds + 1):
        folder.round_done(record(k, 0.1 * k))
    with (path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 9, "half')
    return folder.run_id


def test_a_resumed_run_goes_on_without_duplicates_or_gaps(tmp_path: Path) -> None:
    path = tmp_path / "run"
    identity = interrupted(path, rounds=5)
    again = RunFolder(path, settings(), resumed=load_resumable(path))
    assert (again.run_id, again.recorded) == (identity, 5)
    again.started(INFO)
    for k in (4, 5, 6):
        again.round_done(record(k, 0.2))
        assert [row["round"] for row in rows_of(path)] == list(range(1, k + 1))
    summary = again.finish("complete").summary
    assert summary["rounds"] == 6
    assert summary["bytes_sent"]["total"] == 6 * 3030
    assert summary["resumes"] == [{"round": 4, "repeated_rounds": 2, "repeated_bytes": 2 * 3030}]
    assert load_run(path).bytes_after[-1] == 6 * 3030


def test_a_run_that_is_killed_again_counts_every_resumption(tmp_path: Path) -> None:
    path = tmp_path / "run"
    interrupted(path, rounds=5)
    for first in (5, 4):
        folder = RunFolder(path, settings(), resumed=load_resumable(path))
        folder.started(INFO)
        folder.round_done(record(first, 0.2))
    summary = folder.finish("interrupted").summary
    assert [found["round"] for found in summary["resumes"]] == [5, 4]
    assert summary["rounds"] == 4


def test_a_resumption_that_ends_before_its_first_round_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    interrupted(path, rounds=3)
    folder = RunFolder(path, settings(), resumed=load_resumable(path))
    folder.started(INFO)
    assert folder.finish("interrupted").summary["rounds"] == 3
    assert load_resumable(path).rounds == load_run(path).rounds


def test_what_cannot_be_resumed_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "done")
    with pytest.raises(UserError, match="complete"):
        load_resumable(tmp_path / "done")
    interrupted(tmp_path / "old", rounds=1)
    (tmp_path / "old" / "run-id").unlink()
    with pytest.raises(UserError, match="no run-id"):
        load_resumable(tmp_path / "old")
