"""`spark_node.Peer` against real orchestrators, in processes of their own: gRPC must not start in the tests'."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.network.test_commands import environment, start

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def orchestrator(folder: Path, *words: str) -> Iterator[str]:
    """One without encryption, on the loopback; its address."""
    process = start("orchestrator", "--set", "security.tls=off", *words, cwd=folder)
    try:
        assert process.stdout is not None
        found = re.search(r"listens on (\S+?:\d+)", process.stdout.readline())
        assert found is not None
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def python(folder: Path, code: str, *words: str, timeout: float = 200) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder, env={**environment(), "PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=timeout,
        check=False,
    )  # fmt: skip


PARITY = """
import sys, torch, spark_node
from sklearn.datasets import load_digits
torch.set_num_threads(1)
x, y = load_digits(return_X_y=True)
x = (x - x.mean(0)) / (x.std(0) + 0.1)
shares = [(x[i * 40:(i + 1) * 40], y[i * 40:(i + 1) * 40]) for i in range(4)]
settings = {"model.hidden": [16], "learning.timesteps": [50, 100]}
expected = spark_node.simulate(shares, test=(x[1000:], y[1000:]), rounds=3, degree=3, settings=settings)
one = {**settings, "security.tls": "off", "network.metrics": False}
peers = [
    spark_node.Peer(*share, classes=10, name=f"peer-{i:03d}", orchestrator=sys.argv[1], rounds=3, settings=one)
    for i, share in enumerate(shares)
]
for peer in peers:
    peer.start()
for peer in peers:
    assert [done.round for done in peer.rounds()] == [1, 2, 3]
    assert all(done.neighbours == done.expected == 3 for done in peer.history)
for peer in peers:
    assert torch.equal(peer.weights, expected.weights[peer.name]), peer
    peer.stop()
    assert list(peer.rounds()) == []
print("the same")
"""


def test_four_peers_in_one_process_end_with_the_weights_of_the_simulation(tmp_path: Path) -> None:
    with orchestrator(tmp_path, "--nodes", "4", "--degree", "3") as address:
        done = python(tmp_path, PARITY, address)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the same\n"
    assert "Traceback" not in done.stderr


FORGETFUL = """
import sys, torch, spark_node
x, y = torch.randn(20, 8), torch.arange(20) % 2
settings = {"security.tls": "off"}
peer = spark_node.Peer(x, y, classes=2, name="alone", orchestrator=sys.argv[1], rounds=1000, settings=settings)
for done in peer.rounds():
    if done.round == 2:
        break
print(peer.state)
try:
    peer.start()
except spark_node.UserError as error:
    print(error)
"""


def test_a_script_that_forgets_to_stop_its_peer_still_ends(tmp_path: Path) -> None:
    with orchestrator(tmp_path, "--nodes", "1", "--degree", "1", "--topology", "line") as address:
        done = python(tmp_path, FORGETFUL, address, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["training", "alone has been started already; make a new Peer to join again"]


NOBODY = """
import torch, spark_node
x, y = torch.randn(20, 8), torch.arange(20) % 2
settings = {"security.tls": "off", "network.lease": 0.5, "network.start_timeout": 0.5}
try:
    spark_node.Peer(x, y, classes=2, name="alone", orchestrator="127.0.0.1:1", settings=settings).start()
except spark_node.UserError as error:
    print(error)
"""


def test_an_orchestrator_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = python(tmp_path, NOBODY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert "127.0.0.1:1" in done.stdout
    assert "is it running?" in done.stdout
