"""The examples, as a reader runs them: scripts in processes of their own, in an empty folder."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.network.test_commands import SPARK, environment, start, wait_for

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(script: str, folder: Path, **variables: str) -> str:
    """What an example prints."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script)],
        cwd=folder, env={**environment(), "PYTHONPATH": path, **variables},
        text=True, capture_output=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def spark(folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*SPARK, *words], cwd=folder, env={**environment(), **variables}, text=True, capture_output=True, timeout=240,
        check=False,
    )  # fmt: skip


def percentages(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"([\d.]+)%", text)]


def test_hospitals_learn_more_together_and_their_file_runs_on_the_command_line(tmp_path: Path) -> None:
    said = run("own_dataset.py", tmp_path)
    alone = [percentages(line)[-1] for line in said.split("together")[0].splitlines()[1:] if "%" in line]
    together = percentages(re.findall(r"final ([\d.]+%)", said)[0])[0]
    assert len(alone) == 6
    assert together > sum(alone) / 6 + 3
    words = ["--dataset", "file:patients.npz", "--nodes", "6", "--degree", "3", "--rounds", "2"]
    done = spark(tmp_path, "run", *words, "--transport", "memory", "--quiet")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "runs").glob("patients-spark-*")]


def test_a_model_of_ones_own_learns_and_runs_on_the_command_line(tmp_path: Path) -> None:
    said = run("own_model.py", tmp_path)
    accuracies = percentages("\n".join(line for line in said.splitlines() if line.startswith("round")))
    assert len(accuracies) == 5
    assert accuracies[-1] > 60
    assert said.count("it says") == 3
    words = ["--set", "model.kind=own_model:Net", "--preset", "demo", "--nodes", "4", "--degree", "2", "--rounds", "1"]
    done = spark(EXAMPLES, "run", *words, "--transport", "memory", "--quiet", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr


def test_an_algorithm_of_ones_own_learns_and_runs_as_processes(tmp_path: Path) -> None:
    said = run("own_algorithm.py", tmp_path)
    assert percentages(said)[0] > 70
    assert len(said.splitlines()) == 3
    words = ["--algorithm", "own_algorithm:Proximal", "--preset", "demo", "--nodes", "4", "--degree", "2"]
    done = spark(EXAMPLES, "run", *words, "--rounds", "2", "--quiet", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert 'algorithm = "own_algorithm:Proximal"' in (tmp_path / "out" / "config.toml").read_text()


@contextmanager
def network(folder: Path, nodes: int, hosted: int, *settings: str) -> Iterator[str]:
    """An orchestrator for `nodes` peers and a host with some of them; the orchestrator's address."""
    for made in (
        ["init", "authority"],
        ["issue", "authority", "--role", "orchestrator", "--out", "orchestrator-certs"],
        ["issue", "authority", "--peers", f"0:{hosted}", "--out", "host-certs"],
        ["issue", "authority", "notebook", "--out", "my-certs"],
    ):
        assert spark(folder, "certs", *made).returncode == 0
    words = ["--certs", "orchestrator-certs", "--nodes", str(nodes), "--degree", str(min(3, nodes - 1))]
    started = [start("orchestrator", *words, cwd=folder)]
    try:
        assert started[0].stdout is not None
        found = re.search(r"listens on (\S+?:\d+)", started[0].stdout.readline())
        assert found is not None
        host = ["--certs", "host-certs", "--nodes", "4", "--count", str(hosted), "--orchestrator", found[1]]
        started.append(start("host", *host, *settings, cwd=folder))
        yield found[1]
    finally:
        for process in reversed(started):
            process.terminate()
            process.communicate(timeout=60)


def test_a_notebook_joins_a_network_that_the_command_line_started(tmp_path: Path) -> None:
    with network(tmp_path, 4, 3, "--rounds", "8") as address:
        said = run("join_from_notebook.py", tmp_path, ORCHESTRATOR=address)
        assert said.startswith(("<Peer notebook, waiting, round 0>", "<Peer notebook, training"))
        rounds = re.findall(r"round (\d+): ([\d.]+)% with (\d) neighbours", said)
        assert [int(number) for number, _, _ in rounds] == list(range(1, 9))
        assert all(neighbours == "3" for _, _, neighbours in rounds)
        assert float(rounds[-1][1]) > 80
        assert said.rstrip().endswith("<Peer notebook, finished, round 8>")
    assert "round 8: 3 of 3 neighbours" in (tmp_path / "host-logs" / "peer-001.log").read_text()


LATE = """
import sys, time, torch, spark_node
x, y = torch.randn(20, 64), torch.arange(20) % 10
peer = spark_node.Peer(x, y, classes=10, orchestrator=sys.argv[1], certs="my-certs", rounds=1000)
before = peer.weights
with peer:
    for done in peer.rounds():
        if done.round == peer.history[0].round + 1:
            break
assert done.neighbours == 2, done
assert peer.history[0].round > 1
assert peer.state == "stopped", peer
assert not torch.equal(before, peer.weights)
moved = peer.model(x).argmax(1)
assert len(moved) == 20
print("first round", peer.history[0].round)
"""


def test_a_peer_in_python_joins_late_and_leaves_early_and_the_others_go_on(tmp_path: Path) -> None:
    with network(tmp_path, 3, 3, "--rounds", "1000") as address:
        log = tmp_path / "host-logs" / "peer-000.log"
        wait_for(lambda: log.exists() and "round 3:" in log.read_text(), 90)
        done = subprocess.run(
            [sys.executable, "-c", LATE, address],
            cwd=tmp_path, env={**environment(), "PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=240,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        seen = len(log.read_text().splitlines())
        wait_for(lambda: "2 of 2 neighbours" in "\n".join(log.read_text().splitlines()[seen:]), 120)


REFUSED = """
import spark_node, torch
x, y = torch.randn(20, 64), torch.arange(20) % 10
try:
    spark_node.Peer(x, y, classes=10, rounds=7, orchestrator={address!r}, certs="my-certs").start()
except spark_node.UserError as error:
    print(error)
"""


def test_a_peer_with_other_settings_is_refused_in_one_line(tmp_path: Path) -> None:
    with network(tmp_path, 4, 3, "--rounds", "8") as address:
        log = tmp_path / "host-logs" / "peer-000.log"
        wait_for(log.exists, 90)
        done = subprocess.run(
            [sys.executable, "-c", REFUSED.format(address=address)],
            cwd=tmp_path, env={**environment(), "PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=240,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "refuses notebook" in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_example_has_a_test(script: str) -> None:
    assert f'run("{script}"' in Path(__file__).read_text()
