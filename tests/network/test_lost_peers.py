"""Peers that go, come late, or do not fit: the others go on."""

import asyncio
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import spark_node.launch.peer as peer_module
from spark_node.launch.host import Host, fork
from spark_node.launch.logs import log_to
from spark_node.launch.network import Child, LocalNetwork, peer_jobs
from spark_node.learning.algorithms import make_algorithm
from tests.network.harness import Network, logs, small
from tests.network.isolation import isolated

VICTIM = "peer-002"


class Suicidal:
    """An algorithm whose process is killed, or stopped, when it comes to a stage of a round."""

    def __init__(self, inner: Any, stage: str, k: int, number: int) -> None:
        self._inner, self._stage, self._k, self._number = inner, stage, k, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def outgoing(self, stage: str, k: int, neighbours: Any) -> Any:
        if (stage, k) == (self._stage, self._k):
            os.kill(os.getpid(), self._number)
        return self._inner.outgoing(stage, k, neighbours)

    def incorporate(self, stage: str, k: int, arrived: Any) -> None:
        if (f"after {stage}", k) == (self._stage, self._k):
            os.kill(os.getpid(), self._number)
        self._inner.incorporate(stage, k, arrived)


def doomed(monkeypatch: pytest.MonkeyPatch, stage: str, k: int, number: int = signal.SIGKILL) -> None:
    """The victim's process gets the signal at that point; everybody else's does not."""

    def make(config: Any, peer: str, *args: Any, **kwargs: Any) -> Any:
        made = make_algorithm(config, peer, *args, **kwargs)
        return Suicidal(made, stage, k, number) if peer == VICTIM else made

    monkeypatch.setattr(peer_module, "make_algorithm", make)


@pytest.mark.parametrize(
    "stage", ["weights", "after weights", "consensus", "after consensus", "package", "after package"]
)
@isolated
def test_a_peer_that_is_killed_in_a_stage_is_left_out_and_nobody_waits_for_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    doomed(monkeypatch, stage, 2)
    config = small(run__rounds=4, network__restarts=0, network__lease=2.0, network__deadline_floor=60.0)
    network = Network(config, tmp_path)
    start = time.monotonic()
    found = network.train()
    assert VICTIM not in found
    assert len(found) == 5, logs(tmp_path)
    assert len(network.log.records) == 4
    assert time.monotonic() - start < 45, f"somebody waited for the deadline\n{logs(tmp_path)}"


@pytest.mark.parametrize("stage", ["weights", "after consensus"])
@isolated
def test_a_peer_that_hangs_is_left_out_when_it_gives_no_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """In its second round, when the deadline is the ceiling; slow neighbours are not left out."""
    doomed(monkeypatch, stage, 2, signal.SIGSTOP)
    config = small(run__rounds=6, network__restarts=0, network__lease=15.0, network__deadline_floor=8.0)
    network = Network(config, tmp_path)
    start = time.monotonic()
    found = network.train()
    assert time.monotonic() - start < 120, f"somebody waited for the deadline\n{logs(tmp_path)}"
    assert VICTIM not in found
    assert len(found) == 5, logs(tmp_path)
    assert f"{VICTIM} gives no sign of life" in logs(tmp_path)
    assert network.log.records[-1].neighbours_used > 0, logs(tmp_path)


@pytest.mark.parametrize("stage", ["weights", "after weights", "package"])
@isolated
def test_a_crashed_peer_is_started_again_takes_part_in_later_rounds_and_nobody_waits_for_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """In its second round, when the deadline is the ceiling; its new process is there before anybody misses it."""
    doomed(monkeypatch, stage, 2)
    config = small(run__rounds=60, network__restarts=1, network__lease=5.0, network__deadline_ceiling=150.0)
    network = Network(config, tmp_path)
    start = time.monotonic()
    found = network.train()
    assert time.monotonic() - start < 120, f"somebody waited for the deadline\n{logs(tmp_path)}"
    assert VICTIM in found, logs(tmp_path)
    said = logs(tmp_path)
    assert re.search(rf"{VICTIM} was killed \(SIGKILL: [^)]+\); started again", said), said
    rounds = [line for line in (tmp_path / "logs" / f"{VICTIM}.log").read_text().splitlines() if " round " in line]
    assert any("round 60:" in line for line in rounds), said


@isolated
def test_training_goes_on_without_the_orchestrator_and_finds_it_again(tmp_path: Path) -> None:
    from orchestrator.main import serve

    config = small(run__rounds=60, network__lease=5.0)
    network = Network(config, tmp_path)
    with network.local as local:
        assert local.orchestrator is not None
        port = int(local.orchestrator_address.rpartition(":")[2])
        second: list[Child] = []

        def restart() -> int:
            log_to(tmp_path / "logs" / "orchestrator-2.log", "human", "orchestrator-2")
            return serve(network.config, local.run_id, port=port)

        def interfere() -> int:
            time.sleep(2.5)
            os.kill(local.orchestrator.pid, signal.SIGKILL)  # type: ignore[union-attr]
            time.sleep(2.0)
            return restart()

        second.append(Child(fork(interfere, "orchestrator-2")))
        try:
            observer = network.observer()
            asyncio.run(observer.follow(local.over))
        finally:
            second[0].stop()
    assert len(network.log.records) == 60
    assert sum(r.neighbours_used for r in network.log.records) == 60 * 6 * 3, logs(tmp_path)
    assert "join of peer-003" in (tmp_path / "logs" / "orchestrator-2.log").read_text()


@isolated
def test_two_runs_on_one_machine_do_not_mix(tmp_path: Path) -> None:
    first = Network(small(), tmp_path / "a")
    second = Network(small(run__seed=1), tmp_path / "b")

    async def both() -> None:
        observers = [network.observer() for network in (first, second)]
        overs = [network.local.over for network in (first, second)]
        await asyncio.gather(*(o.follow(over) for o, over in zip(observers, overs, strict=True)))

    with first.local, second.local:
        asyncio.run(both())
    for network in (first, second):
        assert [r.neighbours_used for r in network.log.records] == [18] * 3
        assert "wrong_run" not in logs(network.folder)


@isolated
def test_a_late_peer_takes_part_from_a_later_round_on(tmp_path: Path) -> None:
    config = small(run__nodes=7, topology__degree=2, run__rounds=60, network__start_timeout=4.0, network__lease=5.0)
    network = Network(config, tmp_path)
    local = network.local
    local._start_orchestrator()
    joined = network.config.replace(network__orchestrator=local.orchestrator_address)

    def host(chosen: range, name: str, wait: bool) -> Child:
        def work() -> int:
            first = tmp_path / "logs" / "peer-000.log"
            while wait and not (first.exists() and "round 2:" in first.read_text()):
                time.sleep(0.02)
            log_to(tmp_path / "logs" / f"{name}.log", "human", name)
            jobs = peer_jobs(joined, network.dataset, network.partition, network.module, chosen)
            return Host(jobs, tmp_path / "logs", workers=2, restarts=0, log_form="human").run()

        return Child(fork(work, name))

    early, late = host(range(6), "early", False), host(range(6, 7), "late", True)
    try:
        observer = network.observer()
        asyncio.run(observer.follow(lambda: None if early.poll() is None else "over"))
        latecomer = (tmp_path / "logs" / "peer-006.log").read_text()
        assert "takes part from round 1 on" not in latecomer
        assert "round 60:" in latecomer, logs(tmp_path)
        assert len(network.log.records) == 60
    finally:
        for child in (early, late, local.orchestrator):
            if child is not None:
                child.stop()


@isolated
def test_a_peer_with_another_model_is_refused_by_name(tmp_path: Path) -> None:
    config = small(network__start_timeout=3.0, run__nodes=5, topology__degree=2)
    network = Network(config, tmp_path)
    local: LocalNetwork = network.local
    local._start_orchestrator()
    certs = network.config.security.certs
    other = Network(small(model__hidden=[8], run__nodes=5, topology__degree=2, security__certs=certs), tmp_path)

    def host(net: Network, chosen: range, wait: float) -> Child:
        def work() -> int:
            time.sleep(wait)
            joined = net.config.replace(network__orchestrator=local.orchestrator_address)
            jobs = peer_jobs(joined, net.dataset, net.partition, net.module, chosen)
            return Host(jobs, tmp_path / "logs", workers=2, restarts=0, log_form="human").run()

        return Child(fork(work, "host"))

    good, bad = host(network, range(4), 0.0), host(other, range(4, 5), 1.5)
    try:
        observer = network.observer()
        asyncio.run(observer.follow(lambda: None if good.poll() is None else "over"))
        end = time.monotonic() + 20
        while bad.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        assert bad.poll() == 2
        assert "signature" in (tmp_path / "logs" / "peer-004.log").read_text()
        assert len(network.log.records) == 3
    finally:
        for child in (good, bad, local.orchestrator):
            if child is not None:
                child.stop()
