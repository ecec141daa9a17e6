"""What a process holds in memory, as the kernel counts it (Linux; nothing elsewhere)."""

import ctypes
import errno
import gc
import os
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1
_REUSED = 4 * 2**20
"""Blocks up to this size, a few chunks of a message, come from the heap: a mapping costs a page fault each 4 KiB."""
_KEPT = 2**22
"""Free memory at the end of the heap that stays with the process until `give_back`."""
_THREAD_CACHES = "glibc.malloc.tcache_count"


_USED_UP = "can't allocate memory", "out of memory", "alloc_failed", "std::bad_alloc"
"""What torch's errors say, whose types do not tell: of the processor's memory, and of a device's and its libraries'."""


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there is no memory left: the interpreter's, numpy's, torch's, or the system's."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(ran_out, error.exceptions))
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = str(error).lower()
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(t in said for t in _USED_UP))


def memory_of(pid: int | str = "self") -> dict[str, int]:
    """Bytes of resident memory, and of the process's proportional share (PSS) of what it shares with others."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    names = {"Rss:": "resident_bytes", "Pss:": "pss_bytes"}
    return {names[word]: int(rest[0]) * 1024 for word, *rest in map(str.split, lines) if word in names}


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 or newer."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def held() -> dict[str, int]:
    """What this process has asked for and not given back: bytes of malloc, and blocks of the interpreter's own pools.

    Pages tell less of a leak: they also fill up with gaps, and with copies of what was shared.
    """
    found = {"python_blocks": sys.getallocatedblocks()}
    mallinfo = _libc("mallinfo2")
    if mallinfo is not None:
        mallinfo.restype = _Mallinfo
        now = mallinfo()
        found["malloc_bytes"] = now.uordblks + now.hblkhd
    return found


class MemoryMeter:
    """This process's memory, looked at every few minutes: the kernel walks all pages for it, 60 ms beside 300 peers.

    Never more than a ten-thousandth of a processor goes into it.
    """

    def __init__(self, seconds: float = 300.0) -> None:
        self._seconds, self._until = seconds, 0.0
        self._found: dict[str, int] = {}

    def now(self) -> dict[str, int]:
        """`memory_of` this process, as it was some minutes ago at the longest."""
        if time.monotonic() >= self._until:
            start = time.thread_time()
            self._found = memory_of()
            self._until = time.monotonic() + max(self._seconds, 1e4 * (time.thread_time() - start))
        return self._found


def tune_allocator() -> None:
    """For a process that has many threads, handles messages of megabytes, and says itself when to give memory back.

    One heap for all threads (each would keep its own), and no mapping made and unmapped for every large block:
    putting 8 MiB together from chunks takes a third of the time.
    """
    mallopt = _libc("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _REUSED)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)


def restart_without_thread_caches() -> None:
    """Begin this process's program anew, with the same words, without glibc's caches of freed blocks.

    Each thread keeps up to seven freed blocks of 64 sizes, and gRPC frees in one thread what it allocated in another:
    a peer grows by half a megabyte in the first thousand connections until all caches are full, and their blocks are
    the gaps that the heap cannot give back. glibc reads its environment when a program starts, and then only. Who has
    set GLIBC_TUNABLES to something else for these caches keeps that.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or not sys.executable or _THREAD_CACHES in tunables:
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{_THREAD_CACHES}=0")))
    with suppress(OSError):  # then it goes on as it is
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def give_back() -> None:
    """Return freed memory to the system: peers of one host take turns, and what one has freed another needs."""
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)


def tidy() -> None:
    """After a round: end what only refers to itself (calls, tasks, exceptions), and return freed memory.

    The collector comes to its oldest generation after hundreds of rounds only, and a peer grows until then. Where all
    that a process began with is frozen this takes a millisecond; elsewhere it is left to the collector.

    The interpreter's cache of methods keeps the names that it was asked for, and numpy, torch and protobuf ask with
    strings that they make anew each time: a dozen a round, until 4,096 are kept.
    """
    if gc.get_freeze_count():
        gc.collect()
        _forget_names()
    give_back()


def _forget_names() -> None:
    # The second is what the first was called before Python 3.13.
    for name in ("_clear_internal_caches", "_clear_type_cache"):
        if hasattr(sys, name):
            getattr(sys, name)()
            return


@cache
def _libc(name: str) -> "ctypes._FuncPointer | None":
    """A function of the C library, where it has one of that name."""
    try:
        found: ctypes._FuncPointer = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return found
