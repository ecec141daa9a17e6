"""What a round leaves behind is gone after it, where looking for it costs nothing; lack of memory is known as such."""

import ctypes
import errno
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from spark_node.memory import held, ran_out

CYCLE = """
import gc, weakref
from spark_node.memory import tidy

class Thing: pass

gc.disable()
gc.collect()
if {frozen}: gc.freeze()
thing = Thing()
thing.itself = thing
gone = weakref.ref(thing)
gc.collect(0), gc.collect(1)  # it is old now
del thing
tidy()
print(gone() is None)
"""


@pytest.mark.parametrize("frozen", [True, False])
def test_what_only_refers_to_itself_ends_with_the_round_where_the_rest_is_frozen(frozen: bool) -> None:
    code = CYCLE.format(frozen=frozen)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(frozen)]


NAMES = """
import gc, sys
from spark_node.memory import tidy

def ask():
    names = ["".join(("re", "al")) for _ in range(500)]  # each a string of its own, as C code makes them
    for name in names:
        getattr(5, name)

gc.collect()
gc.freeze()
ask(), tidy()
before = sys.getallocatedblocks()
ask(), gc.collect()
collected = sys.getallocatedblocks()
tidy()
print(collected - before, sys.getallocatedblocks() - before)
"""


def test_names_of_methods_that_were_asked_for_are_not_kept() -> None:
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=True)
    collected, tidied = map(int, done.stdout.split())
    assert tidied < 20
    if sys.version_info < (3, 12):
        assert collected > 200, "the collector alone does not end them"


def test_what_is_held_rises_and_falls_with_what_is_asked_for() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("glibc 2.33 or newer says what malloc has given out")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    before = held()
    blocks = [libc.malloc(5000) for _ in range(1000)]
    things = [object() for _ in range(10_000)]
    during = held()
    for block in blocks:
        libc.free(block)
    del things
    after = held()
    assert during["malloc_bytes"] - before["malloc_bytes"] > 4.9e6
    assert during["python_blocks"] - before["python_blocks"] > 9_900
    assert after["malloc_bytes"] - before["malloc_bytes"] < 1e6
    assert after["python_blocks"] - before["python_blocks"] < 5_000


RESTARTED = """
import json, os, sys
from spark_node.memory import restart_without_thread_caches
restart_without_thread_caches()
print(json.dumps([os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], os.getpid(), sys.flags.utf8_mode]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's caches of freed blocks")
@pytest.mark.parametrize(
    ("given", "tunables"),
    [
        (None, "glibc.malloc.tcache_count=0"),
        ("glibc.malloc.hugetlb=1", "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=0"),
        ("glibc.malloc.tcache_count=3", "glibc.malloc.tcache_count=3"),
    ],
    ids=["nothing set", "something else set", "set by the user"],
)
def test_a_program_begins_anew_as_it_was_called(given: str | None, tunables: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    environment |= {"GLIBC_TUNABLES": given} if given else {}
    words = [sys.executable, "-X", "utf8", "-c", RESTARTED, "run", "--set", "a.b=[1, 2]", "ü"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        said = json.loads(process.communicate()[0])
    assert said == [tunables, ["run", "--set", "a.b=[1, 2]", "ü"], process.pid, 1]


COMMAND = """
import os, sys
import spark_node.__main__ as program
sys.argv = ["spark-dfl", *{words}]
program.restart_without_thread_caches = lambda: print("begins anew")
program.command()
"""


@pytest.mark.parametrize(
    ("words", "anew"),
    [(["run", "--help"], True), (["node", "--help"], True), (["data", "--help"], False), (["--help"], False)],
)
def test_commands_that_stay_begin_anew(words: list[str], anew: bool) -> None:
    code = COMMAND.format(words=words)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("begins anew") == anew
    assert "usage: spark-dfl" in done.stdout


FAR_TOO_MUCH = 2**60


@pytest.mark.parametrize(
    "ask",
    [
        lambda: bytearray(FAR_TOO_MUCH),
        lambda: np.empty(FAR_TOO_MUCH, np.uint8),
        lambda: torch.empty(FAR_TOO_MUCH, dtype=torch.uint8),
        lambda: mmap.mmap(-1, FAR_TOO_MUCH),
    ],
    ids=["python", "numpy", "torch", "system"],
)
def test_memory_that_ran_out_is_told_from_other_failures(ask: Callable[[], object]) -> None:
    with pytest.raises((MemoryError, RuntimeError, OSError)) as caught:
        ask()
    assert ran_out(caught.value)
    assert ran_out(ExceptionGroup("of several tasks", [ValueError(), caught.value]))


def test_other_failures_are_no_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) @ torch.zeros(3)
    for error in (caught.value, OSError(errno.ENOSPC, "No space left on device"), ValueError("out of memory")):
        assert not ran_out(error)


WITHOUT_A_THREAD = """
import asyncio, resource
from pathlib import Path
import spark_node.launch.peer as peer
from spark_node.errors import OutOfMemory

async def round_without_memory(*_):
    await asyncio.to_thread(int)  # the loop has a pool of threads to end
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**20,) * 2)
    raise OutOfMemory("in round 3")

peer._run = round_without_memory
try:
    peer.run_peer(None, None)
except OutOfMemory as error:
    print(error)
"""


def test_what_a_peer_says_of_lack_of_memory_is_not_lost_when_no_thread_can_be_started_either() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_A_THREAD], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "in round 3\n"), done.stderr
