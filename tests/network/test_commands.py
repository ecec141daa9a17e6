"""The commands as a user runs them: real processes, nothing left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

SPARK = [sys.executable, "-m", "spark_node"]
QUICK = [
    "--nodes", "6", "--rounds", "2", "--degree", "3",
    "--set", "model.hidden=[16]", "--set", "data.samples_per_node=40", "--set", "learning.timesteps=[100]",
]  # fmt: skip
PEER = [word for word in QUICK if word not in ("--degree", "3")]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def start(*arguments: str, cwd: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*SPARK, *arguments],
        cwd=cwd,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
    )


def hear_interrupts() -> None:
    """A test run in the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def children_of(pid: int) -> list[int]:
    """All living descendants of a process."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            found.append(int(path.parent.name)) if int(fields[1]) == pid else None
    return found + [below for child in found for below in children_of(child)]


def alive(pids: list[int]) -> list[int]:
    return [
        pid
        for pid in pids
        if Path(f"/proc/{pid}").exists() and "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    ]


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def test_run_trains_over_grpc_by_default_and_writes_what_it_sent(tmp_path: Path) -> None:
    done = subprocess.run(
        [*SPARK, "run", *QUICK, "--out", "run", "--quiet", "--json"],
        cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["status"] == "complete"
    assert summary["rounds"] == 2
    assert all(summary["bytes_sent"][kind] > 0 for kind in ("weights", "package", "control"))
    assert summary["bytes_sent"]["control"] < 2000 * 6 * 2
    assert 0 < summary["memory"]["pss_per_peer_mean"] < 200e6
    logs = sorted(path.name for path in (tmp_path / "run" / "logs").iterdir())
    assert logs[-6:] == [f"peer-{i:03d}.log" for i in range(6)]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_keeps_its_rounds_and_leaves_no_process(tmp_path: Path, sent: signal.Signals) -> None:
    run = start("run", *QUICK, "--rounds", "1000", "--out", "run", "--quiet", cwd=tmp_path)
    rows = tmp_path / "run" / "rounds.jsonl"
    wait_for(lambda: rows.exists() and rows.read_text().count("\n") >= 1)
    below = children_of(run.pid)
    assert len(below) >= 9  # orchestrator, host, observer, six peers
    run.send_signal(sent)
    assert run.wait(60) == 130, run.stderr.read() if run.stderr else ""
    wait_for(lambda: not alive(below), 20)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"


def test_a_run_that_is_killed_takes_its_processes_with_it(tmp_path: Path) -> None:
    run = start("run", *QUICK, "--rounds", "1000", "--out", "run", "--quiet", cwd=tmp_path)
    wait_for(lambda: (tmp_path / "run" / "rounds.jsonl").exists() and len(children_of(run.pid)) >= 9)
    below = children_of(run.pid)
    run.kill()
    run.wait(10)
    wait_for(lambda: not alive(below), 30)


def test_a_port_in_use_is_one_line_that_names_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = ["--set", f"network.port={port}", "--set", "security.tls=off"]
        node = start("node", *PEER, "--orchestrator", "127.0.0.1:1", *settings, cwd=tmp_path)
        _, said = node.communicate(timeout=60)
    assert node.returncode == 2
    assert said.count("\n") == 1
    assert f"network.port = {port}" in said


def test_orchestrator_hosts_and_a_node_started_by_hand_train_together(tmp_path: Path) -> None:
    for made in (
        ["init", "authority", "--name", "monday"],
        ["issue", "authority", "--role", "orchestrator", "--out", "first"],
        ["issue", "authority", "--peers", "0:3", "--out", "a-certs"],
        ["issue", "authority", "--peers", "3:6", "--out", "b-certs"],
    ):
        subprocess.run([*SPARK, "certs", *made], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    orchestrator = start("orchestrator", "--nodes", "6", "--degree", "3", "--certs", "first", cwd=tmp_path)
    hosts: list[subprocess.Popen[str]] = []
    try:
        assert orchestrator.stdout is not None
        said = orchestrator.stdout.readline()
        address = re.search(r"listens on (\S+?:\d+)", said)
        discovery = re.search(r"http://\S+/sd", said)
        assert address is not None, said
        assert discovery is not None, said
        line = ["--orchestrator", address[1], "--linger", "4"]
        hosts = [
            start(
                "host", *PEER, *line, "--first", "0", "--count", "3", "--logs", "a", "--certs", "a-certs", cwd=tmp_path
            ),
            start(
                "host", *PEER, *line, "--first", "3", "--count", "2", "--logs", "b", "--certs", "b-certs", cwd=tmp_path
            ),
            start("node", *PEER, *line, "--index", "5", "--certs", "b-certs", cwd=tmp_path),
        ]
        scraped: list[str] = []

        def scrape() -> bool:
            with urllib.request.urlopen(discovery[0], timeout=5) as page:
                groups = json.load(page)
            targets = [target for group in groups for target in group["targets"]]
            if len(targets) == 6 and not scraped:
                with urllib.request.urlopen(f"http://{targets[0]}/metrics", timeout=5) as page:
                    text = page.read().decode()
                if 'role="peer"' in text:
                    scraped.append(text)
            return bool(scraped)

        wait_for(scrape, 90)
        for label in ('kind="weights"', 'codec="lossless"', 'role="orchestrator"'):
            assert label in scraped[0]
        for host in hosts:
            _, said = host.communicate(timeout=90)
            assert host.returncode == 0, said
        assert "round 2: 3 of 3 neighbours" in (tmp_path / "b" / "peer-004.log").read_text()
    finally:
        for process in (*hosts, orchestrator):
            process.terminate()
            process.wait(20)


def test_a_network_until_its_target_ends_there_and_leaves_no_process(tmp_path: Path) -> None:
    settings = ["--set", "run.until_target=true", "--set", "run.target_accuracy=0.1", "--set", "run.transport=grpc"]
    words = ["--nodes", "4", "--degree", "3", "--rounds", "50", "--out", "run", "--quiet", "--json", "--no-report"]
    done = start("run", *words, *settings, cwd=tmp_path)
    out, said = done.communicate(timeout=120)
    assert done.returncode == 0, said
    assert json.loads(out)["rounds"] < 50
    logs = tmp_path / "run" / "logs"
    assert len(list(logs.glob("peer-*.log"))) == 4
    assert not list(logs.glob("*.pid")), "a process that nobody ended"
