"""A network cut in two: both halves go on, and afterwards they are one again. Two hosts in namespaces of their own."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.faults.processes import A_RUN, SPARK, kill_all, wait_for
from tests.network.test_commands import environment

ROUNDS = 60
SETTINGS = {
    "run.nodes": 8,
    "run.rounds": ROUNDS,
    "topology.degree": 5,
    "model.hidden": [16],
    "data.samples_per_node": 40,
    "learning.timesteps": [100, 200],
    "network.metrics": False,
    "network.lease": 30.0,
    "network.deadline_floor": 1.0,
    "network.deadline_ceiling": 4.0,
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"spark-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


class Hosts:
    """Two namespaces with a cable between them; addresses exist nowhere else."""

    def __init__(self) -> None:
        self.names = [f"spark-{side}-{os.getpid()}" for side in "ab"]
        self.addresses = ["10.123.45.1", "10.123.45.2"]

    def plug(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ends = [f"sp{side}{os.getpid() % 100000}" for side in "ab"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            ip("link", "set", end, "netns", name, "name", "cable")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", "cable", "down")

    def mend(self) -> None:
        ip("-n", self.names[0], "link", "set", "cable", "up")

    def unplug(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    found = Hosts()
    try:
        found.plug()
        yield found
    finally:
        found.unplug()


def start(namespace: str, *words: str, cwd: Path) -> "subprocess.Popen[str]":
    with (cwd / "said.txt").open("a") as said:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, *SPARK, *words],
            cwd=cwd, env=environment(), text=True, stdout=said, stderr=said,
        )  # fmt: skip


def rounds(folder: Path, peers: range) -> dict[str, list[tuple[int, int]]]:
    """(round, neighbours used) as the peers' logs tell."""
    found = {}
    for i in peers:
        log = folder / f"peer-{i:03d}.log"
        text = log.read_text() if log.exists() else ""
        found[log.stem] = [(int(k), int(used)) for k, used in re.findall(r"round (\d+): (\d+) of", text)]
    return found


def reached(folder: Path, peers: range) -> int:
    """The round that all of them have finished."""
    return min((told[-1][0] if told else 0) for told in rounds(folder, peers).values())


@pytest.mark.skipif(not can_make_namespaces(), reason="needs root and the ip command (Debian: iproute2)")
def test_two_halves_that_lose_each_other_go_on_and_merge_afterwards(tmp_path: Path, hosts: Hosts) -> None:
    for words in (["init", "ca"], ["issue", "ca", "--role", "orchestrator"], ["issue", "ca", "--peers", "0:8"]):
        subprocess.run([*SPARK, "certs", *words], cwd=tmp_path, check=True, env=environment(), capture_output=True)
    given = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    halves = (range(4), range(4, 8))
    processes = [start(hosts.names[0], "orchestrator", *given, "--host", hosts.addresses[0], "--port", "7000",
                       "--certs", "ca", cwd=tmp_path)]  # fmt: skip
    try:
        for name, address, half in zip(hosts.names, hosts.addresses, halves, strict=True):
            place = ["--first", str(half.start), "--count", str(len(half)), "--logs", "logs", "--certs", "ca"]
            host = ["--orchestrator", f"{hosts.addresses[0]}:7000", "--set", f"network.host={address}"]
            processes.append(
                start(name, "host", *given, *host, *place, "--checkpoints", "kept", "--linger", "2", cwd=tmp_path)
            )
        logs = tmp_path / "logs"
        wait_for(lambda: min(reached(logs, half) for half in halves) >= 4, "four rounds together")
        hosts.cut()
        cut_at = [reached(logs, half) for half in halves]
        for half, before in zip(halves, cut_at, strict=True):
            wait_for(lambda half=half, before=before: reached(logs, half) >= before + 6, "rounds of a half on its own")
        parted = [reached(logs, half) for half in halves]
        then = apart(tmp_path / "kept", halves)
        hosts.mend()
        for process in processes[1:]:
            assert process.wait(A_RUN) == 0, (tmp_path / "said.txt").read_text()
        together(rounds(logs, range(8)), max(parted))
        now = apart(tmp_path / "kept", halves)
        assert now < then / 100, f"the halves are {now:.4f} apart; when each was on its own it was {then:.4f}"
    finally:
        for process in processes:
            kill_all(process)


def together(told: dict[str, list[tuple[int, int]]], parted: int) -> None:
    """In the last rounds everybody hears more neighbours than its own half has."""
    for peer, rows in told.items():
        assert rows[-1][0] == ROUNDS, f"{peer} did not finish: {rows[-3:]}"
        late = [used for k, used in rows if k > max(parted, ROUNDS - 6)]
        assert max(late) > 3, f"{peer} hears only its own half: {rows[-8:]}"


def apart(kept: Path, halves: Sequence[range]) -> float:
    """How far the mean models of the two halves are from each other."""
    means = [torch.stack([newest(kept / f"peer-{i:03d}") for i in half]).mean(0) for half in halves]
    return float((means[0] - means[1]).norm())


def newest(folder: Path) -> torch.Tensor:
    """The weights of a peer's last checkpoint; the peer may be replacing it."""
    while True:
        with suppress(FileNotFoundError):
            last = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
            return load(last.read_bytes())["algorithm.w"]
