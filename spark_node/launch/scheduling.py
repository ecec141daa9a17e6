"""Whose threads may interrupt whose, among the many peers of one host (Linux; elsewhere nothing is changed)."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SET_SLACK, _GET_SLACK = 29, 30
"""PR_SET_TIMERSLACK and PR_GET_TIMERSLACK of prctl(2), in nanoseconds."""
_SLACK, _MOST_SLACK = 1 / 150, 1.0
"""Seconds by which a timer of gRPC may be late, for every peer that shares a processor, and at the most."""


@contextmanager
def in_the_background(peers: int = 1) -> Iterator[None]:
    """Threads that are started meanwhile interrupt nobody; with many peers on a host they also look at clocks less.

    They take their share of a processor as others do (SCHED_BATCH): a thread that is woken waits for its turn. gRPC's
    workers hand an idle process's timers to each other several times a second; one that starts at once takes them from
    the one that woke it.

    A worker that has run anything looks for more after 15, 19, 24, ... ms, some twenty times in five seconds, and a
    message gives four of them something to run: 300 peers that wait for theirs took an eighth of two processors for
    that, and interrupted who computes 6,000 times a second. With slack the kernel puts such looks together, and what
    comes over the network is handled as soon as before: only gRPC's own timers (keep-alive, a pause before a new
    connection, the limits of handshakes) may be that much late.
    """
    batch = False
    slack, before = _slack_of(peers), timer_slack()
    if sys.platform == "linux":
        with suppress(OSError):  # where a sandbox forbids it, all stays as it is
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                batch = True
    if slack > before >= 0:
        _prctl(_SET_SLACK, slack)
    try:
        yield
    finally:
        if batch:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        if slack > before >= 0:
            _prctl(_SET_SLACK, before)


def _slack_of(peers: int) -> int:
    """Nanoseconds; none where each peer has a processor."""
    shared = peers / (os.cpu_count() or 1)
    return round(1e9 * min(_MOST_SLACK, _SLACK * shared)) if shared > 1 else 0


def timer_slack() -> int:
    """Nanoseconds by which the kernel may be late with this thread's timers; -1 where that is not known."""
    return _prctl(_GET_SLACK, 0)


def _prctl(what: int, value: int) -> int:
    """-1 where there is no such call, or it is forbidden."""
    if sys.platform != "linux":
        return -1
    try:
        return int(ctypes.CDLL(None).prctl(what, ctypes.c_ulong(value), 0, 0, 0))
    except (OSError, AttributeError):
        return -1
