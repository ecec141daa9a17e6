"""Many peers on one host: a parent that has loaded everything forks them, watches them, starts them again.

The parent never starts gRPC or a thread pool, so it can fork at any time. What it has loaded, libraries and data, is
shared by all its children until they write to it.
"""

import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

# What libraries import when they are first used: here once, and not in every peer.
import cryptography.hazmat.backends.openssl.backend  # noqa: F401
import numpy.ctypeslib
import numpy.ma  # noqa: F401

from spark_node.chaos.order import FILE
from spark_node.errors import OutOfMemory, UserError
from spark_node.launch.logs import log_to
from spark_node.launch.peer import PeerJob, run_peer
from spark_node.launch.pids import forget_pid, note_pid
from spark_node.launch.rehearsal import rehearse
from spark_node.launch.turns import Steward, Turns
from spark_node.memory import tune_allocator

log = logging.getLogger(__name__)

_SOON, _PAUSE = 10.0, 0.2
"""Seconds: a peer that ends sooner than that after its start waits longer each time before it is started again."""

EXIT_USAGE, EXIT_MEMORY = 2, 3
_PR_SET_PDEATHSIG = 1
_PATIENCE = 10.0
"""Seconds that peers get between SIGTERM and SIGKILL."""


def die_with_parent() -> None:
    """Be told with SIGTERM when the parent is gone, however it went (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def fork(work: Callable[[], int], name: str) -> int:
    """Run `work` in a child that leaves by os._exit, whatever happens; the child's pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, who says SIGTERM
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except UserError as error:
        log.error("%s: %s", name, error)
        print(f"spark-dfl: {name}: {error}", file=sys.stderr)
        code = EXIT_USAGE
    except OutOfMemory as error:
        log.error("%s", error)
        code = EXIT_MEMORY
    except BaseException:
        log.exception("%s failed", name)
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    return 0


def ending(code: int) -> str:
    """How a process ended, in words, by its exit code or the signal (negative) that ended it."""
    if code == EXIT_MEMORY:
        return "ran out of memory"
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL: by somebody, or by the system because memory ran out, which dmesg tells)"
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was ended by {names.get(-code, f'signal {-code}')}"
    return f"ended with {code}"


@dataclass
class _Child:
    job: PeerJob
    starts: int = 0
    started: float = 0.0
    in_a_row: int = 0
    not_before: float = 0.0


class Host:
    """Forks one process a job and keeps them going until all are done or SIGTERM comes."""

    def __init__(self, jobs: Sequence[PeerJob], logs: Path, *, workers: int, restarts: int, log_form: str) -> None:
        self._logs, self._workers, self._restarts, self._log_form = logs, workers, restarts, log_form
        self._waiting, self._crowd = [_Child(job) for job in jobs], len(jobs)
        self._running: dict[int, _Child] = {}
        self._turns: Turns | None = None
        self._stopping = False

    def run(self) -> int:
        """0: every peer finished; 1: some did not; 2: some could not begin."""
        self._logs.mkdir(parents=True, exist_ok=True)
        if not self._workers:
            return self._watch()
        with TemporaryDirectory(prefix="spark-turns-") as folder:
            address = Path(folder) / "steward"
            steward = Steward(address, self._workers)
            pid = fork(steward.serve, "the steward of turns")
            steward.close()
            self._turns = Turns(address)
            try:
                return self._watch()
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _watch(self) -> int:
        tune_allocator()
        rehearse([child.job for child in self._waiting])
        for child in self._waiting:
            if child.job.room is not None:
                child.job.room.hide()
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGTERM, self._terminate)
        worst = 0
        while self._waiting or self._running:
            self._start_due()
            pid, status = self._wait()
            if pid:
                worst = max(worst, self._ended(pid, os.waitstatus_to_exitcode(status)))
        return worst

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in [c for c in self._waiting if c.not_before <= now]:
            self._waiting.remove(child)
            child.starts, child.started = child.starts + 1, now
            with child.job.room.shown() if child.job.room is not None else nullcontext():
                pid = fork(partial(self._peer, child), child.job.name)
            self._running[pid] = child
            note_pid(self._logs, child.job.name, pid)

    def _peer(self, child: _Child) -> int:
        name = child.job.name
        log_to(self._logs / f"{name}.log", self._log_form, name)
        run_peer(child.job, self._turns, self._logs / FILE, crowd=self._crowd)
        return 0

    def _wait(self) -> tuple[int, int]:
        """The next child that ended; nothing while only restarts are pending."""
        try:
            if not self._running:
                time.sleep(0.05)
                return 0, 0
            return os.waitpid(-1, os.WNOHANG if self._waiting else 0)
        except (InterruptedError, ChildProcessError):
            return 0, 0
        finally:
            if self._waiting and self._running:
                time.sleep(0.02)

    def _ended(self, pid: int, code: int) -> int:
        child = self._running.pop(pid, None)
        if child is None:
            return 0
        forget_pid(self._logs, child.job.name)
        if code == 0 or self._stopping:
            return 0
        if code == EXIT_USAGE or child.starts > self._restarts:
            where = self._logs / f"{child.job.name}.log"
            log.error("%s %s, and is not started again; %s says more", child.job.name, ending(code), where)
            return EXIT_USAGE if code == EXIT_USAGE else 1
        now = time.monotonic()
        child.in_a_row = child.in_a_row + 1 if now - child.started < _SOON else 0
        child.not_before = now + min(_PAUSE * 2**child.in_a_row, 5.0)
        log.warning("%s %s; started again", child.job.name, ending(code))
        self._waiting.append(child)
        return 0

    def _terminate(self, *_: object) -> None:
        """Pass SIGTERM on; who is still there after a while is killed."""
        if self._stopping:
            return
        self._stopping = True
        self._waiting.clear()
        for pid in self._running:
            os.kill(pid, signal.SIGTERM)
        signal.signal(signal.SIGALRM, self._kill)
        signal.alarm(int(_PATIENCE))

    def _kill(self, *_: object) -> None:
        for pid in list(self._running):
            os.kill(pid, signal.SIGKILL)
