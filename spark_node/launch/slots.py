"""Turns: only so many peers of one host compute at once.

A slot is a lock file. The kernel frees it when its holder dies, however it dies.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Slots:
    """`count` slots in a folder that the peers of a host share. Opened after the fork: locks belong to open files."""

    def __init__(self, folder: Path, count: int, start: int) -> None:
        self._files = [os.open(folder / f"slot-{i}", os.O_RDWR | os.O_CREAT, 0o600) for i in range(count)]
        self._turn = start

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a slot: a free one, or the next of a queue that differs from peer to peer."""
        held = self._take()
        try:
            yield
        finally:
            fcntl.flock(held, fcntl.LOCK_UN)

    def _take(self) -> int:
        for file in self._files:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                continue
        self._turn += 1
        file = self._files[self._turn % len(self._files)]
        fcntl.flock(file, fcntl.LOCK_EX)
        return file
