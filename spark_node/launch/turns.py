"""Turns: only so many peers of one host compute at once, in the order in which they ask.

A connection to the steward is a request, a byte from it is the turn, and closing the connection gives the turn back:
the kernel does that for a peer that dies, however it dies. One that holds its turn for too long, because it was stopped
(SIGSTOP) or hangs, no longer counts, so that the others go on.
"""

import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

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
            for key, _ in self._lines.select(self._until_overdue()):
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
        while self._asking and sum(now - since < self._overdue for since in self._holding.values()) < self._count:
            line = self._asking.popleft()
            self._holding[line] = now
            try:
                line.send(b"!")
            except OSError:
                continue  # it is gone: select tells so next

    def _until_overdue(self) -> float | None:
        """Seconds until somebody's turn ceases to count; None where nobody waits for that."""
        now = time.monotonic()
        left = [self._overdue - (now - since) for since in self._holding.values() if now - since < self._overdue]
        return min(left) if self._asking and left else None
