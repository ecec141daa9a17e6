"""What passes through the orchestrator: names and rounds. No tensor is ever in its memory."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spark_node.membership import peer_names
from spark_node.security.authority import make_run_folder
from tests.network.harness import Network, small
from tests.network.isolation import isolated
from tests.network.test_commands import environment


def memory_holds(pid: int, needle: bytes) -> bool:
    """Whether the bytes stand anywhere in the writable memory of a process."""
    with open(f"/proc/{pid}/mem", "rb") as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, permissions, *_ = line.split()
            if not permissions.startswith("rw"):
                continue
            start, end = (int(text, 16) for text in place.split("-"))
            try:
                memory.seek(start)
                if needle in memory.read(end - start):
                    return True
            except (OSError, ValueError, OverflowError):
                continue
    return False


@isolated
def test_the_orchestrator_sees_no_tensor_and_less_than_two_kilobytes_a_peer_and_round(tmp_path: Path) -> None:
    make_run_folder(tmp_path / "certs", "test", peer_names(6), 1.0)
    settings = ["--nodes", "6", "--degree", "3", "--set", "network.metrics=false", "--certs", "certs"]
    orchestrator = subprocess.Popen(
        [sys.executable, "-m", "spark_node", "orchestrator", *settings],
        env=environment(), cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert orchestrator.stdout is not None
        address = re.search(r"listens on (\S+?:\d+)", orchestrator.stdout.readline())
        assert address is not None
        certs = str(tmp_path / "certs")
        config = small(network__orchestrator=address[1], run__rounds=5, security__certs=certs)
        network = Network(config, tmp_path)
        models = network.train()
        assert "torch" not in Path(f"/proc/{orchestrator.pid}/maps").read_text()
        assert memory_holds(orchestrator.pid, b"peer-003")  # the search finds what is there
        for peer, w in models.items():
            numbers: np.ndarray = w.numpy()
            assert not memory_holds(orchestrator.pid, numbers[100:108].tobytes()), f"weights of {peer}"
        controls = [record.bytes_sent["control"] for record in network.log.records]
        assert max(controls) < 2000 * 6, controls
        assert controls[0] > 0
    finally:
        orchestrator.terminate()
        orchestrator.wait(20)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's counters")
@isolated
def test_counted_bytes_agree_with_the_kernels_count_of_the_loopback_within_three_percent(tmp_path: Path) -> None:
    def loopback() -> int:
        line = next(row for row in Path("/proc/net/dev").read_text().splitlines() if row.strip().startswith("lo:"))
        return int(line.split()[9])  # bytes sent

    own_loopback()
    # A model large enough for framing and handshakes not to matter; the observer's own traffic is counted apart below.
    config = small(model__hidden=[1200], run__rounds=3)
    network = Network(config, tmp_path)
    before = loopback()
    models = network.train()
    seen = loopback() - before
    counted = sum(sum(record.bytes_sent.values()) for record in network.log.records)
    observed = 3 * sum(_model_bytes(network, w) for w in models.values())
    assert counted + observed < seen < 1.03 * (counted + observed) + 200_000, (seen, counted, observed)


def own_loopback() -> None:
    """A network namespace for this process, where it may have one: other tests use the loopback too."""
    new_network = 0x40000000
    if os.geteuid() == 0 and shutil.which("ip") and ctypes.CDLL(None).unshare(new_network) == 0:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _model_bytes(network: Network, w: "object") -> int:
    from spark_node.learning.algorithms import make_terms
    from spark_node.learning.messages import Weights
    from spark_node.model import ParameterLayout
    from spark_node.package.writer import encode

    terms = make_terms(network.config, "x" * 16, ParameterLayout.of(network.module), network.dataset.classes)
    return sum(map(len, encode(Weights(w), terms, k=1, sender="peer-000").wire()))  # type: ignore[arg-type]
