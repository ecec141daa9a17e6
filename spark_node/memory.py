"""What a process holds in memory, as the kernel counts it (Linux; nothing elsewhere)."""

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path

_M_ARENA_MAX = -8


def memory_of(pid: int | str = "self") -> dict[str, int]:
    """Bytes of resident memory, and of the process's proportional share (PSS) of what it shares with others."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    names = {"Rss:": "resident_bytes", "Pss:": "pss_bytes"}
    return {names[word]: int(rest[0]) * 1024 for word, *rest in map(str.split, lines) if word in names}


def use_few_arenas() -> None:
    """One heap for all threads but two: a peer has many threads that hardly allocate, and each would keep its own."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def give_back() -> None:
    """Return freed memory to the system: peers of one host take turns, and what one has freed another needs."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> "ctypes._FuncPointer | None":
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
