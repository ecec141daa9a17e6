"""What a process holds in memory, as the kernel counts it (Linux; nothing elsewhere)."""

import ctypes
import gc
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1
_REUSED = 4 * 2**20
"""Blocks up to this size, a few chunks of a message, come from the heap: a mapping costs a page fault each 4 KiB."""
_KEPT = 2**22
"""Free memory at the end of the heap that stays with the process until `give_back`."""


def memory_of(pid: int | str = "self") -> dict[str, int]:
    """Bytes of resident memory, and of the process's proportional share (PSS) of what it shares with others."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    names = {"Rss:": "resident_bytes", "Pss:": "pss_bytes"}
    return {names[word]: int(rest[0]) * 1024 for word, *rest in map(str.split, lines) if word in names}


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
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _REUSED)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)


def give_back() -> None:
    """Return freed memory to the system: peers of one host take turns, and what one has freed another needs."""
    trim = _trim()
    if trim is not None:
        trim(0)


def tidy() -> None:
    """After a round: end what only refers to itself (calls, tasks, exceptions), and return freed memory.

    The collector comes to its oldest generation after hundreds of rounds only, and a peer grows until then. Where all
    that a process began with is frozen this takes a millisecond; elsewhere it is left to the collector.
    """
    if gc.get_freeze_count():
        gc.collect()
    give_back()


@cache
def _trim() -> "ctypes._FuncPointer | None":
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
