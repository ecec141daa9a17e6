"""Commands at a real terminal, at a dumb one, and in a log: what is shown, and that Ctrl-C leaves everything tidy."""

import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.network.test_commands import QUICK, SPARK, alive, children_of, environment, hear_interrupts

pytestmark = pytest.mark.timeout(600)
MEMORY = [*QUICK, "--transport", "memory"]
ESCAPE, HIDE, SHOW = "\x1b", "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """A command whose output, errors and keyboard are a pseudo-terminal."""

    def __init__(self, *words: str, kind: str, cwd: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.shown = ""

        def own_terminal() -> None:
            os.setsid()
            hear_interrupts()
            os.close(os.open(os.ttyname(theirs), os.O_RDWR))  # Ctrl-C is for whoever the terminal belongs to

        self.process = subprocess.Popen(
            [*SPARK, *words],
            cwd=cwd,
            env={**environment(), "TERM": kind, "COLUMNS": "100", "LINES": "40", "PYTHONIOENCODING": "utf-8"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=own_terminal,
        )
        os.close(theirs)

    def read_until(self, text: str, seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, f"{text!r} was not shown: {self.shown[-2000:]}"
            assert self._read(), f"ended without {text!r}: {self.shown[-2000:]}"

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait(self, seconds: float = 240.0) -> int:
        end = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < end, "did not end"
        os.close(self._ours)
        return self.process.wait(60)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], 1.0)
        if not ready:
            return True
        try:
            piece = os.read(self._ours, 65536)
        except OSError:  # the other end is closed
            return False
        self.shown += piece.decode(errors="replace")
        return bool(piece)


ONE = ["run", *MEMORY, "--out", "out", "--no-report"]
TWO = ["compare", *MEMORY, "--algorithms", "spark,dpsgd", "--out", "out"]


@pytest.mark.parametrize("words", [ONE, TWO], ids=["run", "compare"])
def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path, words: list[str]) -> None:
    terminal = Terminal(*words, kind="dumb", cwd=tmp_path)
    assert terminal.wait() == 0, terminal.shown
    assert ESCAPE not in terminal.shown
    assert "round 2/2" in terminal.shown if words[0] == "run" else "[2/2]" in terminal.shown


def test_a_log_gets_a_line_a_round_and_json_alone_on_stdout(tmp_path: Path) -> None:
    words = [*SPARK, "run", *MEMORY, "--out", "out", "--no-report", "--json"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 2
    assert [line.split("  ")[0] for line in done.stderr.splitlines() if line.startswith("round")] == [
        "round 1/2",
        "round 2/2",
    ]
    assert ESCAPE not in done.stderr


@pytest.mark.parametrize("transport", ["grpc", "memory"])
def test_ctrl_c_at_a_terminal_stops_a_run_cleanly_and_its_report_is_written(tmp_path: Path, transport: str) -> None:
    words = [*QUICK, "--rounds", "5000", "--transport", transport, "--out", "out"]
    terminal = Terminal("run", *words, kind="xterm-256color", cwd=tmp_path)
    terminal.read_until(HIDE)
    rows = tmp_path / "out" / "rounds.jsonl"
    end = time.monotonic() + 240
    while not (rows.exists() and rows.read_text().count("\n") >= 2):
        assert time.monotonic() < end, terminal.shown[-2000:]
        terminal.read_until("")
        time.sleep(0.1)
    below = children_of(terminal.process.pid)
    terminal.press("\x03")
    assert terminal.wait() == 130, terminal.shown[-2000:]
    assert not alive(below)
    assert terminal.shown.rfind(SHOW) > terminal.shown.rfind(HIDE), "the cursor is there again"
    assert "Interrupted after" in terminal.shown
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "interrupted"
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


def test_ctrl_c_stops_a_comparison_and_its_runs(tmp_path: Path) -> None:
    words = ["compare", *MEMORY, "--rounds", "5000", "--algorithms", "spark,dpsgd", "--out", "out"]
    terminal = Terminal(*words, kind="xterm-256color", cwd=tmp_path)
    terminal.read_until("/5000, ")  # a round is over; which one is seen first depends on the machine
    below = children_of(terminal.process.pid)
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert terminal.wait() == 130, terminal.shown[-2000:]
    assert not alive(below)
    assert terminal.shown.rfind(SHOW) > terminal.shown.rfind(HIDE)
