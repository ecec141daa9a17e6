"""How a process ended, in words: real processes, and what the system says of them."""

import signal
import subprocess
import sys

import pytest

from spark_node.launch.host import EXIT_MEMORY, ending


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (f"sys.exit({EXIT_MEMORY})", "ran out of memory"),
        ("sys.exit(7)", "ended with 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed (SIGKILL: by somebody, or by the system"),
        ("os.abort()", "was ended by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 6)", f"was ended by signal {signal.SIGRTMIN + 6}"),
    ],
)
def test_an_ending_is_told_in_words(end: str, told: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import os, signal, sys; {end}"], check=False)
    assert ending(done.returncode).startswith(told)
