"""gRPC and fork do not mix: each test that forks a network runs in a process of its own."""

import contextlib
import functools
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest


def isolated(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test in a forked child, in a session of its own: whatever it leaves behind ends with it.

    What it says of its failure goes to a file, not a pipe: a process that it left behind would keep a pipe open.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
            child = os.fork()
            if child == 0:
                os.setsid()
                code = 0
                try:
                    test(*args, **kwargs)
                except BaseException:
                    code = 1
                    traceback.print_exc(file=said)
                    said.flush()
                sys.stdout.flush()
                os._exit(code)
            try:
                _, status = os.waitpid(child, 0)
            except BaseException:  # the test's time is up
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(status)
            if code != 0:
                said.seek(0)
                pytest.fail(said.read() or f"the test's process ended with {code}", pytrace=False)

    return run
