"""Several ranks: real processes that torchrun starts, gloo between them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.network.harness import in_memory, small
from tests.network.test_commands import SPARK, alive, children_of, environment, hear_interrupts, start, wait_for

ROOT = Path(__file__).resolve().parents[2]
QUICK = [
    "--nodes", "6", "--degree", "3", "--transport", "memory", "--quiet", "--no-report",
    "--set", "model.hidden=[16]", "--set", "data.samples_per_node=40", "--set", "learning.timesteps=[100,200]",
]  # fmt: skip
THREE = [*QUICK, "--rounds", "3"]
ENDLESS = [*QUICK, "--rounds", "100000", "--set", "run.rank_timeout=20"]


def over(ranks: int, *words: str, cwd: Path) -> "subprocess.Popen[str]":
    """A command under torchrun."""
    module = words if words[0] == "tests.network.ranks" else ("spark_node", *words)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return subprocess.Popen(
        [*torchrun, *module],
        cwd=cwd,
        env={**environment(), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
    )


def finished(process: "subprocess.Popen[str]", seconds: float = 240.0) -> str:
    """What a command that must go well said."""
    try:
        out, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        _, said = process.communicate(timeout=60)
        pytest.fail(f"not done after {seconds:g} s: {said}")
    assert process.returncode == 0, said
    return out


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process of what a torchrun has started."""
    found: dict[int, int] = {}
    for pid in children_of(launcher):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = next((v[5:] for v in variables if v.startswith(b"RANK=")), None)
        if rank is not None:
            found.setdefault(int(rank), pid)
    return found


@pytest.mark.parametrize(("ranks", "what"), [(2, "kernels"), (4, "kernels by rows")])
def test_a_kernel_over_ranks_is_that_of_one_process(ranks: int, what: str, tmp_path: Path) -> None:
    finished(over(ranks, "tests.network.ranks", what, "out.json", cwd=tmp_path))
    rows = json.loads((tmp_path / "out.json").read_text())
    assert len(rows) == 14
    for row in rows:
        assert row["samples"][0] == row["samples"][1] > 0
        assert max(row[part] for part in ("apply", "pull_back", "evolution", "residuals")) < 1e-10, row


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_spread_run_is_that_of_one_process_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    finished(over(ranks, "tests.network.ranks", "spread", "out.json", cwd=tmp_path))
    rows = json.loads((tmp_path / "out.json").read_text())
    assert len(rows) == 6
    for row in rows:
        assert row["peers"] == [9 // ranks, 9]
        assert row["moved"] > 0.01, row["case"]
        assert row["same_weights"], row["case"]
        assert row["records"] == row["expected"], row["case"]
    assert len(rows[-1]["records"]) < 6  # rank 0 told the others that the target was reached


def test_run_under_torchrun_writes_the_folder_of_one_process(tmp_path: Path) -> None:
    alone = subprocess.run([*SPARK, "run", *THREE, "--out", "alone"], cwd=tmp_path, env=environment(), check=False)
    assert alone.returncode == 0
    spread = over(3, "run", *THREE, "--out", "spread", "--set", "checkpoint.keep=1", cwd=tmp_path)
    finished(spread)
    assert rows_of(tmp_path / "alone") == rows_of(tmp_path / "spread")
    kept = {path.parent.name: path for path in (tmp_path / "spread" / "checkpoints").rglob("*.safetensors")}
    assert len(kept) == 6
    for path in (tmp_path / "alone" / "checkpoints").rglob("*.safetensors"):
        mine, theirs = load_file(path), load_file(kept[path.parent.name])
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert rows
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def wait_for_rounds(run: "subprocess.Popen[str]", folder: Path, count: int) -> None:
    rows = folder / "rounds.jsonl"

    def there() -> bool:
        assert run.poll() is None, run.communicate()[1]
        return rows.exists() and rows.read_text().count("\n") >= count

    wait_for(there, 120)


def test_an_interrupted_spread_run_keeps_its_rounds_and_goes_on_where_it_was(tmp_path: Path) -> None:
    run = over(2, "run", *ENDLESS, "--out", "run", cwd=tmp_path)
    wait_for_rounds(run, tmp_path / "run", 3)
    below = children_of(run.pid)
    assert len(ranks_of(run.pid)) == 2
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode != 0
    wait_for(lambda: not alive(below), 20)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted", said
    assert "RankLost" not in said
    before = rows_of(tmp_path / "run")
    again = over(2, "run", "--resume", "run", "--quiet", "--no-report", cwd=tmp_path)
    wait_for_rounds(again, tmp_path / "run", len(before) + 3)
    again.terminate()
    again.communicate(timeout=60)
    rows = rows_of(tmp_path / "run")
    assert rows[: len(before)] == before
    assert [row["round"] for row in rows] == list(range(1, len(rows) + 1))


def test_a_killed_rank_ends_a_spread_run_with_one_clear_line(tmp_path: Path) -> None:
    run = over(2, "run", *ENDLESS, "--out", "run", cwd=tmp_path)
    wait_for_rounds(run, tmp_path / "run", 1)
    below = children_of(run.pid)
    os.kill(ranks_of(run.pid)[1], signal.SIGKILL)
    _, said = run.communicate(timeout=120)
    assert run.returncode != 0
    assert re.search(r"spark-dfl: error: the run failed: .*rank 1 is gone", said), said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    wait_for(lambda: not alive(below), 20)


def test_a_comparison_under_torchrun_spreads_each_of_its_runs(tmp_path: Path) -> None:
    words = [word for word in QUICK if word not in ("--quiet", "--no-report")]
    grid = ["--algorithms", "spark,dfedavg", "--seeds", "1", "--rounds", "2", "--set", "local.epochs=1", "--quiet"]
    finished(over(2, "compare", *words, *grid, "--out", "out", cwd=tmp_path))
    cells = sorted((tmp_path / "out" / "cells").iterdir())
    assert len(cells) == 2
    config = ["--config", str(tmp_path / "out" / "configs" / f"{cells[1].name}.toml"), "--no-report"]
    alone = [*SPARK, "run", *config, "--out", "alone"]
    subprocess.run(alone, cwd=tmp_path, env=environment(), check=True, stderr=subprocess.DEVNULL)
    assert rows_of(cells[1]) == rows_of(tmp_path / "alone")


def test_what_cannot_be_spread_is_refused_in_one_line(tmp_path: Path) -> None:
    given = {**environment(), "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for words, changed, expected in (
        (["--transport", "grpc"], {}, "give --transport memory"),
        (["--transport", "memory", "--nodes", "1", "--degree", "1"], {}, "run.nodes = 1"),
        (["--transport", "memory", "--device", "cuda:1"], {}, "LOCAL_RANK"),
        (["--transport", "memory"], {"MASTER_PORT": ""}, "MASTER_PORT"),
    ):
        done = subprocess.run(
            [*SPARK, "run", *words, "--out", "run"],
            cwd=tmp_path, env={**given, **changed}, text=True, capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert expected in done.stderr
        assert done.stderr.count("\n") == 1


class SmallNetwork:
    """An orchestrator, two peers on a host, and a third peer over two ranks."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        shape = ["--nodes", "3", "--set", "security.tls=off", "--set", "network.metrics=false"]
        peers = [
            *shape, "--rounds", str(rounds), "--set", "model.hidden=[16]", "--set", "data.samples_per_node=40",
            "--set", "learning.timesteps=[100,200]", "--set", "learning.kernel=full", "--set", "run.rank_timeout=20",
            "--set", "network.deadline_floor=60", "--linger", "1",
        ]  # fmt: skip
        self.orchestrator = start("orchestrator", *shape, "--degree", "2", cwd=folder)
        assert self.orchestrator.stdout is not None
        said = self.orchestrator.stdout.readline()
        address = re.search(r"listens on (\S+?:\d+)", said)
        assert address is not None, said
        line = ["--orchestrator", address[1], "--checkpoints", "kept"]
        self.host = start("host", *peers, *line, "--first", "0", "--count", "2", cwd=folder)
        self.node = over(2, "node", *peers, *line, "--index", "2", cwd=folder)

    def stop(self) -> None:
        for process in (self.node, self.host, self.orchestrator):
            process.terminate()
            process.communicate(timeout=60)


def newest(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"), key=lambda path: int(path.name.split(".")[-2]))
    return load_file(files[-1])


def test_a_network_with_a_peer_over_two_ranks_trains_as_without(tmp_path: Path) -> None:
    network = SmallNetwork(tmp_path, rounds=3)
    try:
        _, said = network.node.communicate(timeout=200)
        assert network.node.returncode == 0, said
        assert "round 3: 2 of 2 neighbours" in said
        _, others = network.host.communicate(timeout=60)
        assert network.host.returncode == 0, others
    finally:
        network.stop()
    config = small(run__nodes=3, run__rounds=3, topology__degree=2, learning__kernel="full", run__transport="memory")
    for peer, w in in_memory(config).items():
        found = newest(tmp_path / "kept" / peer)["algorithm.w"]
        assert float((found - w).norm() / w.norm()) < 1e-4, peer


def test_a_killed_rank_ends_its_peer_with_one_clear_line(tmp_path: Path) -> None:
    network = SmallNetwork(tmp_path, rounds=100000)
    try:
        wait_for(lambda: len(list((tmp_path / "kept" / "peer-002").glob("*.safetensors"))) >= 2, 120)
        below = children_of(network.node.pid)
        os.kill(ranks_of(network.node.pid)[1], signal.SIGKILL)
        began = time.monotonic()
        _, said = network.node.communicate(timeout=120)
        assert network.node.returncode != 0
        assert re.search(r"spark-dfl: error: rank 0 of 2: .*is gone.*this peer ends", said), said
        assert time.monotonic() - began < 100
        wait_for(lambda: not alive(below), 20)
    finally:
        network.stop()
