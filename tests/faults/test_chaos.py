"""`spark-dfl chaos` against a real network: it breaks what it is told to, and the network goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RUN = {
    "run.nodes": 6,
    "run.rounds": 14,
    "run.pace": 1.0,  # a chaos that takes seconds to begin still finds the network at work
    "topology.degree": 3,
    "model.hidden": [16],
    "data.samples_per_node": 40,
    "learning.timesteps": [100, 200],
    "network.metrics": False,
    "network.chaos": True,
    "network.lease": 3.0,
    "network.deadline_floor": 3.0,
    "network.deadline_ceiling": 20.0,
}


def spark(*words: str, **named: Any) -> "subprocess.Popen[str]":
    environment = {**os.environ, "SPARK_RUN__TRANSPORT": "grpc"}
    command = [sys.executable, "-m", "spark_node", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **named
    )


def start(folder: Path, **changes: Any) -> "subprocess.Popen[str]":
    settings = {**RUN, **{key.replace("__", ".", 1): value for key, value in changes.items()}}
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    run = spark("run", *given, "--out", str(folder), "--quiet", "--json", "--no-report")
    end = time.monotonic() + 60
    while not list((folder / "logs").glob("peer-*.pid")):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    return run


def finish(run: "subprocess.Popen[str]", folder: Path, seconds: float = 240) -> dict[str, Any]:
    try:
        out, error = run.communicate(timeout=seconds)
    finally:
        run.kill()
    logs = "\n".join(path.read_text() for path in (folder / "logs").glob("*.log"))
    assert run.returncode == 0, f"{error}\n{logs}"
    summary: dict[str, Any] = json.loads(out)
    return summary


def test_a_network_outlives_every_fault_there_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(
        folder, run__nodes=8, run__rounds=24
    )  # may be rounds ahead of a chaos that comes late: all lines at once
    lines = [
        "round 1 kill peer-001",
        "round 2 pause peer-002 1s",
        "round 3 slow peer-003 1s",
        "round 4 corrupt peer-004 2s",
        "round 5 full-disk peer-005 1s",
        "round 6 kill orchestrator",
        "round 7 cut peer-000,peer-006 2s",
    ]
    script = tmp_path / "faults.txt"
    script.write_text("\n".join(lines))
    chaos = spark("chaos", str(folder), "--script", str(script), "--json")
    out, said = chaos.communicate(timeout=240)
    assert chaos.returncode == 0, said
    summary = finish(run, folder)
    assert summary["status"] == "complete"
    assert json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])["round"] == 24
    told = json.loads(out)
    assert [fault["kind"] for fault in told["faults"]] == [line.split()[2] for line in lines], said
    assert told["summary"]["processes_back"] >= 2, said
    assert "orchestrator" in said
    assert "is over" in said
    log = (folder / "logs" / "orchestrator.log").read_text()
    assert log.count("join of peer-003") >= 2, "the second orchestrator was joined again"


def test_random_faults_until_the_time_is_up_and_all_is_mended(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder)
    chaos = spark("chaos", str(folder), "--rate", "240", "--faults", "pause,slow", "--last", "0.5", "--for", "4")
    _, said = chaos.communicate(timeout=60)
    assert chaos.returncode == 0, said
    assert "peer-" in said
    assert said.count("goes on") + said.count("is quick again") >= 1
    assert finish(run, folder)["rounds"] == RUN["run.rounds"]


def test_an_interrupted_chaos_mends_what_it_broke(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder)
    chaos = spark(
        "chaos", str(folder), "--do", "at 0s pause peer-002 600s",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert chaos.stderr is not None
    while "pause peer-002" not in (line := chaos.stderr.readline()):
        assert "round" in line  # one that ended just then is told first
    chaos.send_signal(signal.SIGINT)
    said = chaos.communicate(timeout=30)[1]
    assert "peer-002 goes on" in said
    assert finish(run, folder)["rounds"] == RUN["run.rounds"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rate", "1"), "no peer of this run is there"),
        ((), "nothing to break"),
        (("--rate", "0"), "--rate 0"),
        (("--do", "at 1s burn x"), "no fault 'burn'"),
        (("--script", "nowhere.txt"), "cannot be read"),
    ],
    ids=["no run", "nothing", "rate", "fault", "script"],
)
def test_bad_usage_is_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    chaos = spark("chaos", str(tmp_path), *words, cwd=tmp_path)
    _, error = chaos.communicate(timeout=60)
    assert chaos.returncode == 2
    assert said in error
    assert len(error.splitlines()) == 1
