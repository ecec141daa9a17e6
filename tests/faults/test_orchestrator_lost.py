"""An orchestrator that is killed after the start and never comes back: the run completes as if it were there."""

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors

from spark_node.config import Config, to_toml
from spark_node.launch.pids import live_pids
from tests.faults.processes import A_RUN, kill_all, last_state, rows, running, said, start_run, wait_for
from tests.network.harness import in_memory, small

ROUNDS = 30
LEASE = 2.0
"""Seconds; a run takes several of them, and none can be renewed."""


def configuration() -> Config:
    return small(run__rounds=ROUNDS, run__pace=0.3, network__lease=LEASE, network__restarts=0, security__tls="off")


def check_rounds(folder: Path) -> None:
    """All are recorded, and in each everybody was heard by everybody."""
    recorded = rows(folder)
    assert [row["round"] for row in recorded] == list(range(1, ROUNDS + 1)), said(folder)
    assert {row["neighbours"]["used"] for row in recorded} == {6 * 3}, said(folder)


def test_a_run_completes_without_its_orchestrator(tmp_path: Path) -> None:
    config, folder = configuration(), tmp_path / "run"
    with start_run(config, "run", tmp_path) as run:
        wait_for(lambda: rows(folder) or run.poll() is not None, "the first round")
        os.kill(live_pids(folder / "logs")["orchestrator"], signal.SIGKILL)
        assert run.wait(A_RUN) == 0, (tmp_path / "said.txt").read_text() + said(folder)
    check_rounds(folder)
    assert (folder / "logs" / "orchestrator.log").read_text().count("join of peer-003") == 1, "it was not started again"
    for peer, w in in_memory(config).items():
        assert torch.equal(last_state(folder, peer)["algorithm.w"], w), f"{peer} differs\n{said(folder)}"


def test_hosts_and_their_observer_complete_without_their_orchestrator(tmp_path: Path) -> None:
    """As on several machines: nobody is there who could start it again."""
    config, folder = configuration(), tmp_path / "monday"
    (tmp_path / "config.toml").write_text(to_toml(config))
    with ExitStack() as started:
        orchestrator = started.enter_context(running("orchestrator", "--config", "config.toml", "--json", cwd=tmp_path))
        found = wait_for(lambda: re.search(r'"address": "(\S+)"', (tmp_path / "said.txt").read_text()), "a port")
        line = ["--config", "config.toml", "--orchestrator", found[1]]
        stays = ["--linger", "5", "--logs", "logs", "--checkpoints", "checkpoints"]
        commands = [
            ["observe", *line, "--out", "monday"],
            ["host", *line, *stays, "--first", "0", "--count", "3"],
            ["host", *line, *stays, "--first", "3", "--count", "3"],
        ]
        others = [started.enter_context(running(*command, cwd=tmp_path)) for command in commands]
        wait_for(lambda: rows(folder) or others[0].poll() is not None, "the first round")
        kill_all(orchestrator)
        for command, process in zip(commands, others, strict=True):
            assert process.wait(A_RUN) == 0, f"{command}\n{(tmp_path / 'said.txt').read_text()}{said(tmp_path)}"
    check_rounds(folder)
    for peer, w in in_memory(config).items():
        state = load_tensors(max((tmp_path / "checkpoints" / peer).glob("*.safetensors")).read_bytes())
        assert torch.equal(state["algorithm.w"], w), f"{peer} differs\n{said(tmp_path)}"
