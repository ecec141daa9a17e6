"""Peers that are killed, stopped, late, or have no room on their disk: they come back, and nobody is held up."""

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import spark_node.launch.peer as peer_module
from spark_node.checkpoint import Owner, Store
from spark_node.launch.host import Host, fork
from spark_node.launch.logs import log_to
from spark_node.launch.network import Child, peer_jobs
from spark_node.launch.recovery import Recovery
from spark_node.learning.algorithms import signature
from spark_node.model import flatten
from tests.faults.processes import A_RUN, last_state, pid_of, rows, said, start_run, wait_for
from tests.network.harness import Network, logs, small
from tests.network.isolation import isolated
from tests.network.test_lost_peers import doomed

VICTIM = "peer-002"
ROUNDS = 20
PACE = 0.5
"""Seconds a round: what takes a while (a start, a lease) takes few rounds, on a fast machine too."""


def rounds_of(peer: str, folder: Path) -> list[int]:
    """The rounds that a peer has told of in its log."""
    file = folder / "logs" / f"{peer}.log"
    return [int(k) for k in re.findall(r" round (\d+): ", file.read_text())] if file.exists() else []


def test_a_killed_peer_goes_on_from_its_checkpoint_in_the_round_of_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start_run(small(run__rounds=ROUNDS, run__pace=PACE), "run", tmp_path) as run:
        wait_for(lambda: max(rounds_of(VICTIM, folder), default=0) >= 3, "three rounds")
        os.kill(pid_of(VICTIM, run, folder), signal.SIGKILL)
        assert run.wait(A_RUN) == 0, said(folder)
    log = (folder / "logs" / f"{VICTIM}.log").read_text()
    kept = [int(k) for k in re.findall(r"goes on from its checkpoint of round (\d+)", log)]
    began = [int(k) for k in re.findall(r"takes part from round (\d+) on", log)]
    assert len(kept) == 1, said(folder)
    assert began[0] == 1
    assert began[1] > kept[0] >= 3, log
    assert f"round {ROUNDS}: 3 of 3 neighbours" in log, said(folder)
    assert [row["round"] for row in rows(folder)] == list(range(1, ROUNDS + 1))
    assert torch.isfinite(last_state(folder, VICTIM)["algorithm.w"]).all()


def test_peers_that_come_back_one_after_the_other_meet_the_network_and_do_not_run_ahead_of_it(tmp_path: Path) -> None:
    """The others stand still meanwhile, so that it is known where the network is."""
    folder = tmp_path / "run"
    peers = [f"peer-{i:03d}" for i in range(6)]

    def began(peer: str) -> list[int]:
        return [
            int(k) for k in re.findall(r"takes part from round (\d+) on", (folder / "logs" / f"{peer}.log").read_text())
        ]

    with start_run(small(run__rounds=ROUNDS, run__pace=PACE), "run", tmp_path) as run:
        wait_for(lambda: all(max(rounds_of(peer, folder), default=0) >= 3 for peer in peers), "three rounds")
        pids = [pid_of(peer, run, folder) for peer in peers]
        for pid in pids[3:]:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids[:3]:
            os.kill(pid, signal.SIGKILL)
        finished = max(k for peer in peers for k in rounds_of(peer, folder))
        wait_for(lambda: all(len(began(peer)) == 2 for peer in peers[:3]), "all are back")
        for pid in pids[3:]:
            os.kill(pid, signal.SIGCONT)
        assert run.wait(A_RUN) == 0, said(folder)
    back = [began(peer)[1] for peer in peers[:3]]
    assert max(back) <= finished + 2, f"{back} after round {finished}\n{said(folder)}"
    assert [row["round"] for row in rows(folder)] == list(range(1, ROUNDS + 1))


@isolated
def test_a_peer_that_comes_back_when_all_is_done_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed(monkeypatch, "after package", 4)
    network = Network(small(run__rounds=4, network__restarts=1, network__lease=3.0), tmp_path)
    network.train()
    assert [record.round for record in network.log.records] == [1, 2, 3, 4], logs(tmp_path)
    assert len(network.log.records[-1].client_accuracy) == 5


class Unlisted(Recovery):
    """Comes back to a run whose next member list, the first with it, holds from a later round than the next one."""

    async def begin(self) -> tuple[int, torch.Tensor]:
        self._line.furthest += 2 if self._line.furthest else 0
        return await super().begin()


@isolated
def test_a_peer_that_comes_back_to_rounds_past_the_last_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_module, "Recovery", Unlisted)
    doomed(monkeypatch, "after package", 4)
    network = Network(small(run__rounds=4, network__restarts=1, network__lease=10.0), tmp_path)
    network.train()
    assert [record.round for record in network.log.records] == [1, 2, 3, 4], logs(tmp_path)


def test_a_stopped_peer_costs_ever_less_and_catches_up_when_it_wakes(tmp_path: Path) -> None:
    """The deadline is the same in all rounds here, so that what is granted can be compared."""
    folder = tmp_path / "run"
    config = small(
        run__rounds=ROUNDS,
        run__pace=PACE,
        run__workers=6,  # whoever is stopped may hold a slot
        network__deadline_floor=8.0,
        network__deadline_ceiling=8.0,
        network__suspicion_floor=0.5,
    )
    with start_run(config, "run", tmp_path) as run:
        wait_for(lambda: max(rounds_of(VICTIM, folder), default=0) >= 3, "three rounds")
        victim = pid_of(VICTIM, run, folder)
        os.kill(victim, signal.SIGSTOP)
        stopped = max(rounds_of(VICTIM, folder))
        wait_for(lambda: max(rounds_of("peer-000", folder)) >= stopped + 8, "others go on")
        waited = (folder / "logs" / "peer-000.log").read_text()
        os.kill(victim, signal.SIGCONT)
        assert run.wait(A_RUN) == 0, said(folder)
    log = (folder / "logs" / f"{VICTIM}.log").read_text()
    jump = re.search(r"from round (\d+) straight to round (\d+)", log)
    assert jump is not None, said(folder)
    assert int(jump[2]) > int(jump[1]) + 1
    assert re.search(r"starts round \d+ from the weights of peer-", log), log
    assert f"round {ROUNDS}: " in log, said(folder)
    grants = [float(seconds) for seconds in re.findall(rf"{VICTIM} did not come within ([\d.]+) s", waited)]
    assert grants[:1] in ([8.0], []), waited  # the first may have been a neighbour of others only
    assert all(later <= max(earlier / 2, 0.5) + 0.05 for earlier, later in pairwise(grants)), waited


class Telling(Recovery):
    """Leaves the weights that a peer begins with in a file."""

    folder: Path

    async def begin(self) -> tuple[int, torch.Tensor]:
        first, w = await super().begin()
        np.save(self.folder / f"{self._node.peer}-{first}.npy", w.numpy())
        return first, w


@isolated
def test_a_late_peer_starts_from_the_weights_of_a_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(run__nodes=7, topology__degree=2, run__rounds=ROUNDS, run__pace=PACE, network__start_timeout=4.0)
    Telling.folder = tmp_path
    monkeypatch.setattr(peer_module, "Recovery", Telling)
    network = Network(config, tmp_path)
    local = network.local
    local._start_orchestrator()
    joined = network.config.replace(network__orchestrator=local.orchestrator_address, checkpoint__keep=1000)

    def host(chosen: range, name: str, wait: bool) -> Child:
        def work() -> int:
            while wait and max(rounds_of("peer-000", tmp_path), default=0) < 5:
                time.sleep(0.02)
            log_to(tmp_path / "logs" / f"{name}.log", "human", name)
            jobs = peer_jobs(joined, network.dataset, network.partition, network.module, chosen, tmp_path / "kept")
            return Host(jobs, tmp_path / "logs", workers=2, restarts=0, log_form="human").run()

        return Child(fork(work, name))

    early, late = host(range(6), "early", False), host(range(6, 7), "late", True)
    try:
        asyncio.run(network.observer().follow(lambda: None if early.poll() is None else "over"))
    finally:
        for child in (early, late, local.orchestrator):
            if child is not None:
                child.stop()
    (begun,) = tmp_path.glob("peer-006-*.npy")
    first = int(begun.stem.rpartition("-")[2])
    assert first > 5
    mine, initial = torch.from_numpy(np.load(begun)), flatten(network.module)
    print_of = signature(joined, network.module)
    stores = [
        Store(tmp_path / "kept" / f"peer-{i:03d}", Owner(local.run_id, f"peer-{i:03d}", print_of), 1000)
        for i in range(6)
    ]
    models = [found.state["algorithm.w"] for store in stores for k in store.rounds if (found := store.load(k))]
    assert any(torch.equal(mine, w) for w in models), logs(tmp_path)
    assert not torch.equal(mine, initial)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A run folder whose checkpoints lie on a disk with room for a few."""
    place = tmp_path / "checkpoints"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "spark-test", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield tmp_path
    subprocess.run(["umount", "-l", str(place)], check=True)


@isolated
def test_a_full_disk_costs_checkpoints_and_nothing_else(tiny_disk: Path) -> None:
    config = small(run__rounds=8)
    network = Network(config, tiny_disk)
    network.train()
    assert [record.neighbours_used for record in network.log.records] == [18] * 8
    said_all = logs(tiny_disk)
    assert re.search(r"E peer-\d+ round \d+: no checkpoint \(\[Errno 28\] No space left", said_all), said_all
    assert "Traceback" not in said_all
    owners = [Owner(network.local.run_id, f"peer-{i:03d}", signature(config, network.module)) for i in range(6)]
    stores = [Store(tiny_disk / "checkpoints" / owner.peer, owner, 8) for owner in owners]
    assert all(store.newest() is not None for store in stores if list(store.folder.glob("*.safetensors")))
    assert any(store.rounds for store in stores)
