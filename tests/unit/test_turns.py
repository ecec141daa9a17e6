"""Whose turn it is to compute: real processes that ask, hold, stop and die."""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_node.launch.host import fork
from spark_node.launch.turns import Steward, Turns


@contextmanager
def steward(folder: Path, count: int, overdue: float = 30.0) -> Iterator[Turns]:
    """A steward in a process of its own."""
    serving = Steward(folder / "steward", count, overdue)
    pid = fork(serving.serve, "steward")
    serving.close()
    try:
        yield Turns(folder / "steward")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid


def holder(turns: Turns) -> int:
    """A process that has a turn and keeps it."""
    ready, tell = os.pipe()

    def hold() -> None:
        with turns.one():
            os.write(tell, b"x")
            time.sleep(60)

    pid = child(hold)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    return pid


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_turn_is_free_again_when_its_holder_is_killed(tmp_path: Path) -> None:
    with steward(tmp_path, 1) as turns:
        pid = holder(turns)
        killer = child(lambda: (time.sleep(0.3), os.kill(pid, signal.SIGKILL))[0])
        started = time.monotonic()
        with turns.one():
            waited = time.monotonic() - started
        assert 0.1 < waited < 20
        for gone in (pid, killer):
            os.waitpid(gone, 0)


def test_a_holder_that_never_ends_costs_one_wait_and_no_more(tmp_path: Path) -> None:
    with steward(tmp_path, 1, overdue=0.5) as turns:
        pid = holder(turns)
        started = time.monotonic()
        for _ in range(5):
            with turns.one():
                pass
        assert 0.3 < time.monotonic() - started < 10
        end(pid)


def test_a_stopped_holder_is_not_waited_for_and_counts_again_when_it_goes_on(tmp_path: Path) -> None:
    with steward(tmp_path, 1, overdue=3600.0) as turns:
        pid = holder(turns)
        os.kill(pid, signal.SIGSTOP)
        with turns.one():
            pass
        os.kill(pid, signal.SIGCONT)
        os.waitpid(pid, os.WCONTINUED)
        ready, tell = os.pipe()
        waiting = child(lambda: _take(turns, tell))
        soon, _, _ = select.select([ready], [], [], 1.5)
        assert not soon, "somebody has a turn beside a holder that computes again"
        end(pid)
        os.waitpid(waiting, 0)
        assert os.read(ready, 1) == b"x"


def _take(turns: Turns, tell: int) -> None:
    with turns.one():
        os.write(tell, b"x")


def test_who_dies_in_the_queue_is_passed_over(tmp_path: Path) -> None:
    with steward(tmp_path, 1) as turns:
        first = holder(turns)
        second = child(lambda: holder(turns) and None)
        time.sleep(0.3)
        end(second)
        end(first)
        with turns.one():
            pass


@pytest.mark.parametrize("count", [1, 2, 3])
def test_as_many_as_given_compute_at_once_and_no_more(tmp_path: Path, count: int) -> None:
    """24 turns of 50 ms: never more than `count` inside, and again and again so many.

    Those who end at the same moment are counted out before the next are counted in, so it is not always `count`.
    """
    log = tmp_path / "log"

    def work(turns: Turns) -> None:
        for _ in range(4):
            with turns.one():
                with log.open("a") as file:
                    file.write("in\n")
                time.sleep(0.05)
                with log.open("a") as file:
                    file.write("out\n")

    with steward(tmp_path, count) as turns:
        children = [child(lambda: work(turns)) for _ in range(6)]
        for pid in children:
            os.waitpid(pid, 0)
    inside, seen = 0, []
    for line in log.read_text().splitlines():
        inside += 1 if line == "in" else -1
        seen.append(inside)
    assert max(seen) == count
    assert len(seen) == 48
    assert seen.count(count) >= 24 // count // 2, "a turn lay idle"


def test_without_a_steward_everybody_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Turns(tmp_path / "nobody").one():
        pass
    assert "nobody hands out turns" in caplog.text


def test_turns_are_given_in_the_order_in_which_they_are_asked_for(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def work(turns: Turns, name: str) -> None:
        with turns.one(), log.open("a") as file:
            file.write(name)

    with steward(tmp_path, 1) as turns:
        first = holder(turns)
        others = []
        for name in "abcde":
            others.append(child(lambda name=name: work(turns, name)))  # type: ignore[misc]
            time.sleep(0.15)
        end(first)
        for pid in others:
            os.waitpid(pid, 0)
    assert log.read_text() == "abcde"
