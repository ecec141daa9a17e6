"""A run whose processes are all killed goes on, and ends as if nothing had happened."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_tensors

from spark_node.config import Config, to_toml
from spark_node.launch.pids import live_pids
from tests.faults.processes import A_RUN, SPARK, kill_all, last_state, rows, running, said, start_run, wait_for
from tests.network.harness import in_memory, small
from tests.network.test_commands import environment

ROUNDS = 14
PACE = 0.3
"""Seconds a round: whoever kills the run when a round is recorded comes in time."""


def run_with_kills(config: Config, cwd: Path, kills: tuple[int, ...]) -> Path:
    """A run that is killed whenever so many rounds are recorded, and resumed each time."""
    folder = cwd / "run"
    with start_run(config, "run", cwd) as run:
        wait_for(lambda: len(rows(folder)) >= kills[0] or run.poll() is not None, "the first rounds")
        kill_all(run)
    for place in [*kills[1:], ROUNDS]:
        with running("run", "--resume", "run", "--quiet", cwd=cwd) as run:
            if place == ROUNDS:
                assert run.wait(A_RUN) == 0, (cwd / "said.txt").read_text() + said(folder)
            else:
                wait_for(lambda: len(rows(folder)) >= place or run.poll() is not None, "more rounds")  # noqa: B023
                kill_all(run)
    return folder


@pytest.mark.parametrize("mode", ["receiver", "sender"])
def test_a_network_that_is_killed_twice_ends_with_the_weights_of_an_undisturbed_run(tmp_path: Path, mode: str) -> None:
    config = small(run__nodes=8, run__rounds=ROUNDS, run__pace=PACE, learning__linearize_at=mode)
    folder = run_with_kills(config, tmp_path, (3, 8))
    for peer, w in in_memory(config).items():
        assert torch.equal(last_state(folder, peer)["algorithm.w"], w), f"{peer} differs\n{said(folder)}"
    assert [row["round"] for row in rows(folder)] == list(range(1, ROUNDS + 1))
    assert all(row["neighbours"] == {"expected": 24, "used": 24} for row in rows(folder))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("complete", ROUNDS)
    assert summary["bytes_sent"]["total"] == sum(sum(row["bytes_sent"].values()) for row in rows(folder))
    assert len(summary["resumes"]) == 2
    assert all(1 < found["round"] <= ROUNDS for found in summary["resumes"]), summary["resumes"]
    assert "takes part from round 1 on" in said(folder)
    assert "goes on from its checkpoint of round" in said(folder)


def test_what_int8_weights_owe_is_resumed_too(tmp_path: Path) -> None:
    config = small(
        run__rounds=ROUNDS, run__pace=PACE, package__weights="int8", package__bits=6, package__rounding="stochastic"
    )
    folder = run_with_kills(config, tmp_path, (4,))
    for peer, w in in_memory(config).items():
        assert torch.equal(last_state(folder, peer)["algorithm.w"], w), f"{peer} differs\n{said(folder)}"


def test_a_run_in_memory_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    config = small(run__rounds=ROUNDS, run__pace=PACE, run__transport="memory", package__weights="int8")
    folder = run_with_kills(config, tmp_path, (2, 5))
    for peer, w in in_memory(config).items():
        assert torch.equal(last_state(folder, peer)["algorithm.w"], w), peer
    assert [row["round"] for row in rows(folder)] == list(range(1, ROUNDS + 1))


def test_a_torn_and_a_foreign_checkpoint_are_named_and_all_start_from_an_earlier_one(tmp_path: Path) -> None:
    config = small(run__rounds=ROUNDS, run__pace=PACE)
    folder = tmp_path / "run"
    with start_run(config, "run", tmp_path) as run:
        wait_for(lambda: len(rows(folder)) >= 6 or run.poll() is not None, "six rounds")
        kill_all(run)
    torn = max((folder / "checkpoints" / "peer-001").glob("*.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-100])
    foreign = max((folder / "checkpoints" / "peer-002").glob("*.safetensors"))
    foreign.write_bytes(max((folder / "checkpoints" / "peer-003").glob("*.safetensors")).read_bytes())
    with running("run", "--resume", "run", "--quiet", cwd=tmp_path) as run:
        assert run.wait(A_RUN) == 0, (tmp_path / "said.txt").read_text() + said(folder)
    assert f"{torn.name} is not used: torn" in (folder / "logs" / "peer-001.log").read_text()
    assert f"{foreign.name} is not used: of another peer" in (folder / "logs" / "peer-002.log").read_text()
    for peer, w in in_memory(config).items():
        assert torch.equal(last_state(folder, peer)["algorithm.w"], w), f"{peer} differs\n{said(folder)}"


def test_a_run_whose_host_is_killed_says_so_and_can_be_resumed(tmp_path: Path) -> None:
    config = small(run__rounds=ROUNDS, run__pace=PACE)
    folder = tmp_path / "run"
    with start_run(config, "run", tmp_path) as run:
        wait_for(lambda: len(rows(folder)) >= 3 or run.poll() is not None, "three rounds")
        os.kill(live_pids(folder / "logs")["host"], signal.SIGKILL)
        assert run.wait(A_RUN) == 1
    told = (tmp_path / "said.txt").read_text()
    assert "the host of the peers was killed (SIGKILL: " in told
    assert "Traceback" not in told
    with running("run", "--resume", "run", "--quiet", cwd=tmp_path) as run:
        assert run.wait(A_RUN) == 0, (tmp_path / "said.txt").read_text() + said(folder)
    for peer, w in in_memory(config).items():
        assert torch.equal(last_state(folder, peer)["algorithm.w"], w), f"{peer} differs\n{said(folder)}"


def test_what_cannot_be_resumed_is_one_line(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        command = [*SPARK, "run", "--resume", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), text=True, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        return done.stderr

    assert "no such folder" in refused("nothing")
    assert "leave out --rounds" in refused("nothing", "--rounds", "3")
    config = small(run__rounds=1, run__nodes=2, topology__degree=1, run__transport="memory")
    with start_run(config, "done", tmp_path) as run:
        assert run.wait(A_RUN) == 0
    assert "the run is complete" in refused("done")


def test_hosts_that_are_killed_with_their_orchestrator_agree_on_a_round_and_go_on(tmp_path: Path) -> None:
    """Two hosts, each with its own folder of checkpoints; the second life has other ports."""
    config = small(run__rounds=ROUNDS, run__pace=PACE, security__tls="off")
    (tmp_path / "config.toml").write_text(to_toml(config))

    def life(stop: Callable[[], bool]) -> None:
        with ExitStack() as started:
            orchestrator = ["orchestrator", "--config", "config.toml", "--run-id", "monday", "--json"]
            (tmp_path / "said.txt").write_text("")
            started.enter_context(running(*orchestrator, cwd=tmp_path))
            found = wait_for(lambda: re.search(r'"address": "(\S+)"', (tmp_path / "said.txt").read_text()), "a port")
            line = ["--config", "config.toml", "--orchestrator", found[1], "--linger", "2"]
            hosts = [
                started.enter_context(running("host", *line, *flags, "--logs", "logs", cwd=tmp_path))
                for flags in (
                    ("--first", "0", "--count", "3", "--checkpoints", "a"),
                    ("--first", "3", "--count", "3", "--checkpoints", "b"),
                )
            ]
            wait_for(lambda: stop() or all(host.poll() is not None for host in hosts), "rounds")

    def reached(k: int) -> bool:  # whole files: one that is being written has another ending
        kept = [tmp_path / "ab"[i // 3] / f"peer-{i:03d}" / f"monday.{k:08d}.safetensors" for i in range(6)]
        return all(path.exists() for path in kept)

    life(lambda: reached(5))
    life(lambda: reached(ROUNDS))
    assert "goes on from its checkpoint of round" in (tmp_path / "logs" / "peer-004.log").read_text()
    for i, (peer, w) in enumerate(sorted(in_memory(config).items())):
        state = load_tensors(max((tmp_path / "ab"[i // 3] / peer).glob("*.safetensors")).read_bytes())
        assert torch.equal(state["algorithm.w"], w), f"{peer} differs\n{said(tmp_path)}"
