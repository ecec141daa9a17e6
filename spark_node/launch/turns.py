"""Turns: only so many peers of one host compute at once, in the order in which they ask.

A connection to the steward is a request, a byte from it is the turn, and closing the connection gives the turn back:
the kernel does that for a peer that dies, however it dies. One that is stopped (SIGSTOP) does not count while it is so,
one that holds its turn for too long no longer counts, so that the others go on.
"""

import logging
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
"""Between two looks, while somebody waits, whether a holder was stopped."""
_OVERDUE_SECONDS = 30.0
"""After that a turn counts no more. Whoever really computes for so long shares the processors for the rest."""


class Turns:
    """What a peer holds: where its host's steward listens."""

    def __init__(self, address: Path) -> None:
        self._address = str(address)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a turn. Without a steward everybody computes when they like."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            try:
                line.connect(self._address)
                line.recv(1)
            except OSError as error:
                log.warning("nobody hands out turns (%s): computing at once", error)
            yield


class Steward:
    """Hands out `count` turns, first come, first served."""

    def __init__(self, address: Path, count: int, overdue: float = _OVERDUE_SECONDS) -> None:
        self._count, self._overdue = count, overdue
        self._asking: deque[socket.socket] = deque()
        self._holding: dict[socket.socket, float] = {}
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(str(address))
        self._door.listen(4096)

    def close(self) -> None:
        """Where a fork serves: whoever keeps the door open would keep peers waiting at it after the fork's death."""
        self._door.close()

    def serve(self) -> int:
        """Until the process is ended."""
        self._lines = selectors.DefaultSelector()
        self._lines.register(self._door, selectors.EVENT_READ)
        while True:
            for key, _ in self._lines.select(self._until_next_look()):
                if key.fileobj is self._door:
                    self._admit()
                elif isinstance(key.fileobj, socket.socket):
                    self._dismiss(key.fileobj)
            self._hand_out()

    def _admit(self) -> None:
        line, _ = self._door.accept()
        self._lines.register(line, selectors.EVENT_READ)
        self._asking.append(line)

    def _dismiss(self, line: socket.socket) -> None:
        """Closed by the peer or by its death; peers never send anything."""
        self._lines.unregister(line)
        if line in self._holding:
            del self._holding[line]
        else:
            self._asking.remove(line)
        line.close()

    def _hand_out(self) -> None:
        now = time.monotonic()
        while self._asking and sum(self._counts(line, now) for line in self._holding) < self._count:
            line = self._asking.popleft()
            self._holding[line] = now
            try:
                line.send(b"!")
            except OSError:
                continue  # it is gone: select tells so next

    def _counts(self, line: socket.socket, now: float) -> bool:
        """Whether a holder may still be computing."""
        return now - self._holding[line] < self._overdue and not _is_stopped(line)

    def _until_next_look(self) -> float | None:
        """Seconds until a turn may have ceased to count; None where nobody waits for that."""
        return _LOOK_SECONDS if self._asking and self._holding else None


def _is_stopped(line: socket.socket) -> bool:
    """Whether the process at the other end was stopped by a signal, as far as the system tells (Linux)."""
    with suppress(OSError, AttributeError):
        pid, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False
