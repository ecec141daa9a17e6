"""gRPC and fork do not mix: each test that forks a network runs in a process of its own."""

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest


def isolated(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test in a forked child of the test process, which itself never starts gRPC."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            code, said = 0, ""
            try:
                test(*args, **kwargs)
            except BaseException:
                code, said = 1, traceback.format_exc()
            with os.fdopen(writing, "w") as pipe:
                pipe.write(said)
            sys.stdout.flush()
            os._exit(code)
        os.close(writing)
        try:
            with os.fdopen(reading) as pipe:
                said = pipe.read()
        except BaseException:  # the test's time is up: its processes end with it
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != 0:
            pytest.fail(said or f"the test's process ended with {os.waitstatus_to_exitcode(status)}", pytrace=False)

    return run
