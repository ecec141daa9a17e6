"""Real runs that are hurt: started as a user starts them, killed as nothing else can be."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from spark_node.config import Config, to_toml
from tests.network.test_commands import alive, children_of, environment

SPARK = [sys.executable, "-m", "spark_node"]
PATIENCE = 120.0
A_RUN = 600.0
"""Seconds in which a run ends, however busy the machine is: six of them at once on two cores took 140."""


def wait_for(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """What the condition gives once it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"did not happen in time: {what}"
        time.sleep(0.01)
    return found


@contextmanager
def running(*arguments: str, cwd: Path) -> Iterator["subprocess.Popen[str]"]:
    """A command of spark-dfl; whatever it has started is gone in the end."""
    with (cwd / "said.txt").open("a") as said:
        process = subprocess.Popen(
            [*SPARK, *arguments], cwd=cwd, env=environment(), text=True, stdout=said, stderr=said
        )
    try:
        yield process
    finally:
        kill_all(process)


def start_run(config: Config, out: str, cwd: Path) -> Any:
    """`spark-dfl run` with this configuration."""
    (cwd / "config.toml").write_text(to_toml(config))
    return running("run", "--config", "config.toml", "--out", out, "--quiet", cwd=cwd)


def kill_all(process: "subprocess.Popen[str]") -> None:
    """SIGKILL for a process and all below it, at one moment: they are stopped first, so that none can react."""
    if process.poll() is not None:
        return
    os.kill(process.pid, signal.SIGSTOP)
    below = children_of(process.pid)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in [*below, process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    process.wait(PATIENCE)
    wait_for(lambda: not alive(below), "the end of all processes")


def pid_of(peer: str, run: "subprocess.Popen[str]", folder: Path) -> int:
    """The process of a peer: the one that has its log open."""
    log = (folder / "logs" / f"{peer}.log").resolve()

    def find() -> int:
        for pid in children_of(run.pid):
            with suppress(OSError):
                if Path(os.readlink(f"/proc/{pid}/fd/1")) == log:
                    return pid
        return 0

    return int(wait_for(find, f"a process of {peer}"))


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rounds that are recorded so far."""
    file = folder / "rounds.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]


def last_state(folder: Path, peer: str) -> dict[str, Tensor]:
    """The newest checkpoint of a peer, read without our own code."""
    return load(max((folder / "checkpoints" / peer).glob("*.safetensors")).read_bytes())


def said(folder: Path) -> str:
    """Everything that was logged."""
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(folder.glob("logs/*.log")))
