"""Who interrupts whom among the threads of a host's peers."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from spark_node.launch.scheduling import in_the_background, timer_slack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are Linux's")

WITH_GRPC = """
import asyncio, os
from pathlib import Path
from grpc import aio
from spark_node.launch.scheduling import in_the_background

async def main():
    with in_the_background():
        server = aio.server()
        server.add_insecure_port("127.0.0.1:0")
        await server.start()
    for task in Path("/proc/self/task").iterdir():
        print((task / "comm").read_text().strip(), os.sched_getscheduler(int(task.name)) == os.SCHED_BATCH)
    await server.stop(None)

asyncio.run(main())
"""


def in_a_new_thread(look: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return found[0]


def policy_of_a_new_thread() -> int:
    return in_a_new_thread(lambda: os.sched_getscheduler(0))


def test_threads_started_meanwhile_interrupt_nobody_and_those_after_are_as_before() -> None:
    with in_the_background():
        assert policy_of_a_new_thread() == os.SCHED_BATCH
    assert policy_of_a_new_thread() == os.SCHED_OTHER
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_timers_of_a_crowd_may_be_late_by_as_much_as_the_crowd_is_large_and_the_event_loops_never() -> None:
    before, processors = timer_slack(), os.cpu_count() or 1
    slack = []
    for peers in (1, processors, 15 * processors, 300 * processors):
        with in_the_background(peers):
            slack.append(in_a_new_thread(timer_slack))
        assert timer_slack() == in_a_new_thread(timer_slack) == before
    assert slack == [before, before, 100_000_000, 1_000_000_000]


def test_whoever_runs_as_something_else_stays_that() -> None:
    code = (
        "import os; from spark_node.launch.scheduling import in_the_background as b\n"
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "with b(): print(os.sched_getscheduler(0) == os.SCHED_IDLE)\n"
        "print(os.sched_getscheduler(0) == os.SCHED_IDLE)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_the_threads_of_grpc_are_in_the_background_and_the_event_loop_is_not() -> None:
    done = subprocess.run([sys.executable, "-c", WITH_GRPC], capture_output=True, text=True, check=True)
    threads = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    workers = [batch for name, batch in threads if name == "event_engine"]
    assert workers
    assert set(workers) == {"True"}
    assert [batch for _, batch in threads].count("False") == 1
