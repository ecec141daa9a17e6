"""Memory that runs out in mid-round, for real: the system gives a process no more than it has."""

import json
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spark_node.config import Config
from tests.faults.processes import A_RUN, last_state, pid_of, rows, running, said, start_run, wait_for
from tests.faults.test_churn import rounds_of
from tests.network.harness import in_memory, small

VICTIM = "peer-002"
ROUNDS = 8


def large(**changes: object) -> Config:
    """A network whose rounds take blocks of megabytes, so that these fail and not some byte of a library's."""
    size: dict[str, Any] = {"run__nodes": 4, "model__hidden": [4000], "data__samples_per_node": 200}
    return small(run__rounds=ROUNDS, run__pace=1.0, **size, **changes)


def less_memory(pid: int, share: float, rounds: Callable[[], int]) -> None:
    """A process gets what it has between two rounds, and this share of what the last two took beside that."""

    def size() -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()

    sizes, end = [size()], rounds() + 2
    while rounds() < end:
        sizes.append(size())
        time.sleep(0.01)
    rest, most = min(sizes), max(sizes)
    assert most - rest > 2**24, "rounds take too little for this test"
    limit = int(rest + share * (most - rest))
    wait_for(lambda: size() < limit, "the end of a round")
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def test_a_peer_without_memory_says_so_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start_run(large(), "run", tmp_path) as run:
        wait_for(lambda: rounds_of(VICTIM, folder), "a round")
        # Room for messages: gRPC does not outlive the lack of it, and the peer could not say anything.
        less_memory(pid_of(VICTIM, run, folder), 0.6, lambda: max(rounds_of(VICTIM, folder)))
        assert run.wait(A_RUN) == 0, said(folder)
    log = (folder / "logs" / f"{VICTIM}.log").read_text()
    (told,) = re.findall(r" E \S+ out of memory in round (\d+) \(.*\); the checkpoint of round (\d+) is kept; let", log)
    assert int(told[1]) == int(told[0]) - 1
    assert "Traceback" not in log
    assert f"goes on from its checkpoint of round {told[1]}" in log
    assert f"{VICTIM} ran out of memory; started again" in (folder / "logs" / "host.log").read_text()
    assert [row["round"] for row in rows(folder)] == list(range(1, ROUNDS + 1))
    assert f"round {ROUNDS}: 3 of 3 neighbours" in log, said(folder)


def test_a_run_without_memory_ends_with_one_line_and_can_be_resumed(tmp_path: Path) -> None:
    config = large(run__transport="memory", run__workers=1)
    folder = tmp_path / "run"
    with start_run(config, "run", tmp_path) as run:
        wait_for(lambda: rows(folder) or run.poll() is not None, "a round")
        less_memory(run.pid, 0.2, lambda: len(rows(folder)))
        assert run.wait(A_RUN) == 1
    told = (tmp_path / "said.txt").read_text()
    assert re.search(r"^spark-dfl: error: the run failed: out of memory \(.*\); fewer peers at once", told, re.M), told
    assert "Traceback" not in told
    done = len(rows(folder))
    assert 2 <= done < ROUNDS
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    with running("run", "--resume", "run", "--quiet", cwd=tmp_path) as run:
        assert run.wait(A_RUN) == 0, (tmp_path / "said.txt").read_text()
    assert [row["round"] for row in rows(folder)] == list(range(1, ROUNDS + 1))
    for peer, w in in_memory(config).items():
        assert torch.equal(last_state(folder, peer)["algorithm.w"], w), peer
