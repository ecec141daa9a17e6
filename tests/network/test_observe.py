"""`spark-dfl observe` beside a network that others run: real processes, certificates, restarts."""

import asyncio
import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_node.generated.spark.v1 import orchestrator_pb2, peer_pb2
from spark_node.observe.observer import Observer
from tests.network.harness import Log, small
from tests.network.isolation import isolated
from tests.network.test_commands import PEER, SPARK, children_of, start, wait_for

pytestmark = pytest.mark.timeout(900)  # many processes one after the other, on a machine that may be busy
HISTORY = ["--set", "network.model_history=500"]


class Run:
    """An orchestrator and a host of six peers, each started by hand with certificates of one authority."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.processes: list[subprocess.Popen[str]] = []
        for made in (
            ["init", "authority"],
            ["issue", "authority", "--role", "orchestrator", "--out", "first"],
            ["issue", "authority", "--peers", "0:6", "--out", "peers"],
            ["issue", "authority", "--role", "observer", "--out", "watching"],
        ):
            subprocess.run([*SPARK, "certs", *made], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        self.address = ""

    def orchestrator(self) -> None:
        """Start it, where it was before."""
        port = self.address.rpartition(":")[2] or "0"
        words = ["--nodes", "6", "--degree", "3", "--certs", "first", "--port", port, "--run-id", "monday"]
        process = self.start("orchestrator", *words)
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"listens on (\S+?:\d+)", said)
        assert found is not None, said
        self.address = found[1]

    def host(self, *more: str) -> "subprocess.Popen[str]":
        settings = [*PEER, "--rounds", str(self.rounds), *HISTORY, "--certs", "peers", "--linger", "60", *more]
        return self.start("host", *settings, "--orchestrator", self.address)

    def observe(self, *more: str) -> "subprocess.Popen[str]":
        settings = [*PEER, "--rounds", str(self.rounds), *HISTORY, "--certs", "watching", "--out", "seen"]
        return self.start("observe", *settings, "--orchestrator", self.address, *more)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        self.processes.append(start(*words, cwd=self.folder))
        return self.processes[-1]

    def rows(self) -> list[dict[str, object]]:
        file = self.folder / "seen" / "rounds.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            process.communicate(timeout=180)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, rounds=40)
    yield made
    made.close()


def test_it_waits_for_the_orchestrator_and_follows_the_run_to_its_end(run: Run) -> None:
    run.rounds = 8
    run.orchestrator()
    run.processes.pop().terminate()  # its port is known now; nobody listens there
    seen = run.observe("--json", "--metrics-port", "0")
    assert seen.stderr is not None
    assert "Looking for the orchestrator" in seen.stderr.readline()
    run.orchestrator()
    run.host()
    metrics = re.search(r"http://\S+/metrics", seen.stderr.readline() + seen.stderr.readline())
    assert metrics is not None
    wait_for(lambda: len(run.rows()) >= 1, 240)
    with urllib.request.urlopen(metrics[0], timeout=10) as page:
        text = page.read().decode()
    assert re.search(r'spark_observer_aggregated_accuracy\{run="monday"\} 0\.\d+', text)
    assert re.search(r'spark_observer_client_accuracy_mean\{run="monday"\} 0\.\d+', text)
    out, said = seen.communicate(timeout=180)
    assert seen.returncode == 0, said
    summary = json.loads(out)
    assert summary["status"] == "complete"
    assert [row["round"] for row in run.rows()] == list(range(1, 9))
    assert all(row["seconds"]["round"] > 0 for row in run.rows())  # type: ignore[index]
    assert all(summary["bytes_sent"][kind] > 0 for kind in ("weights", "package", "control"))
    for name in ("report.html", "plots", "config.toml", "run-id", "logs/observer.log"):
        assert (run.folder / "seen" / name).exists(), name


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_observer_that_is_started_again_neither_loses_nor_repeats_a_round(run: Run, how: signal.Signals) -> None:
    run.orchestrator()
    host = run.host()
    first = run.observe("--quiet")
    wait_for(lambda: len(run.rows()) >= 3, 240)
    first.send_signal(how)
    _, said = first.communicate(timeout=180)
    written = len(run.rows())
    assert written < run.rounds, "too fast to stop it in the middle"
    if how is not signal.SIGKILL:
        assert first.returncode == 130, said
        assert json.loads((run.folder / "seen" / "summary.json").read_text())["status"] == "interrupted"
        assert (run.folder / "seen" / "report.html").exists()
        assert len(children_of(host.pid)) >= 6, "the peers go on"
    again = run.observe("--quiet", "--json")
    out, said = again.communicate(timeout=240)
    assert again.returncode == 0, said
    rows = run.rows()
    assert [row["round"] for row in rows] == list(range(1, run.rounds + 1))
    assert all(row["aggregated_accuracy"] is not None for row in rows)
    summary = json.loads(out)
    assert summary["bytes_sent"]["control"] < 3000 * 6 * run.rounds
    assert summary["resumes"] == []
    once_more = run.observe("--quiet", "--json", "--no-report")
    out, said = once_more.communicate(timeout=180)
    assert once_more.returncode == 0, said
    assert json.loads(out) == summary


def test_it_tells_in_one_line_what_is_wrong(run: Run) -> None:
    run.address = "127.0.0.1:9"
    absent = run.observe("--quiet", "--wait", "1")
    _, said = absent.communicate(timeout=180)
    assert absent.returncode == 2
    assert said.count("\n") == 1
    assert "not reached in 1 s" in said
    run.address = ""
    run.orchestrator()
    folder = run.folder / "seen"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    taken = run.observe("--quiet", "--wait", "60")
    _, said = taken.communicate(timeout=180)
    assert taken.returncode == 2
    assert "not a run folder" in said
    assert said.count("\n") == 1


def test_settings_that_are_not_those_of_the_peers_are_named(run: Run) -> None:
    run.orchestrator()
    run.host()
    seen = run.observe("--quiet", "--set", "model.hidden=[17]")
    _, said = seen.communicate(timeout=240)
    assert seen.returncode == 1
    assert "give the settings with which the peers run" in said


def test_peers_that_end_before_the_last_round_end_the_observation(run: Run) -> None:
    run.orchestrator()
    host = run.host("--set", "network.lease=2")
    seen = run.observe("--quiet", "--set", "network.lease=5")
    wait_for(lambda: len(run.rows()) >= 2, 240)
    host.terminate()
    host.communicate(timeout=180)
    run.processes[0].terminate()
    _, said = seen.communicate(timeout=200)
    assert seen.returncode == 1
    assert "no peer is left to finish round" in said
    assert json.loads((run.folder / "seen" / "summary.json").read_text())["status"] == "failed"


@isolated
def test_members_that_a_new_orchestrator_does_not_know_yet_are_waited_for_while_they_speak() -> None:
    """It hears of them one by one; rounds that end meanwhile would be recorded without the others' reports."""
    config = small(network__lease=5.0, security__tls="off")
    module, test = torch.nn.Linear(2, 2), (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
    observer = Observer(config, "127.0.0.1:1", lambda _: pytest.fail("no terms"), module, test, Log())

    class Orchestrator:
        def __init__(self, version: int, *names: str) -> None:
            run = orchestrator_pb2.RunDescription(run="monday", started=True, first_round=1)
            named = [orchestrator_pb2.Member(name=name, address="127.0.0.1:1") for name in names]
            self._reply = orchestrator_pb2.DescribeReply(
                run=run, members=orchestrator_pb2.Members(version=version, from_round=1, members=named)
            )

        async def Describe(self, request: Any, timeout: float) -> Any:
            return self._reply

    async def act() -> None:
        await observer._ask(Orchestrator(3, "a", "b", "c"))  # type: ignore[arg-type]
        observer._rounds[1].models["a"] = None
        for name in "abc":
            observer._spoke[name] = time.monotonic()
            observer._progress[name] = peer_pb2.Progress(name=name, state="training", round=1)
        await observer._ask(Orchestrator(1, "a"))  # type: ignore[arg-type]
        assert not observer._complete(1)
        observer._spoke["b"] -= 6.0  # it hangs: silent for longer than a lease
        observer._spoke.pop("c")  # its line broke
        assert observer._complete(1)
        for task in observer._followed.values():
            task.cancel()

    asyncio.run(act())
