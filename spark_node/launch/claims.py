"""Which peers a host runs, where hosts are replicas of each other: each claims a block of peers in a shared folder.

A claim is a lock on the block's file. The kernel drops it when the last process that holds it has died, however it
died, so there is no lease to wait for, and a replacement takes over exactly what was left. The lock passes to forked
peers: a block whose host was killed stays claimed until its peers are gone too.
"""

import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from spark_node.errors import ConfigError

_PAUSE = 0.5
_MOST_NAME_BYTES = 256


@dataclass(frozen=True)
class Claim:
    """Peers `first` to `first + count - 1`, for as long as the descriptor is open."""

    first: int
    count: int
    descriptor: int

    def release(self) -> None:
        """Leave the block to others."""
        os.close(self.descriptor)


def claim(folder: Path, nodes: int, size: int, *, owner: str = "", patience: float = 0.0) -> Claim | None:
    """A free block of `size` of the run's peers (the last may be smaller); None where all are taken.

    A host that had a block before gets that one if it is free; then come those that nobody ever had, then any other.
    With `patience` it waits so many seconds for one to become free.
    """
    if size < 1:
        raise ConfigError(f"--count {size}: a host has at least one peer")
    who = owner or socket.gethostname()
    end = time.monotonic() + patience
    while True:
        found = _try_all(folder, nodes, size, who)
        if found is not None or time.monotonic() >= end:
            return found
        time.sleep(_PAUSE)


def _try_all(folder: Path, nodes: int, size: int, who: str) -> Claim | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        former = {first: _owner(_file(folder, first, size)) for first in range(0, nodes, size)}
        rank = {who: 0, "": 1}
        for first in sorted(former, key=lambda first: (rank.get(former[first], 2), first)):
            descriptor = _lock(_file(folder, first, size), who)
            if descriptor is not None:
                return Claim(first, min(size, nodes - first), descriptor)
    except OSError as error:
        raise ConfigError(f"--claim {folder}: {error.strerror}; give a folder that all hosts can write to") from None
    return None


def _file(folder: Path, first: int, size: int) -> Path:
    return folder / f"peers-{first}-to-{first + size - 1}"


def _owner(path: Path) -> str:
    """Who had the block last; nobody, where nobody did."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_NAME_BYTES).strip()
    except FileNotFoundError:
        return ""


def _lock(path: Path, who: str) -> int | None:
    """The block's file, locked and signed; None while another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{who}\n".encode(), 0)
    return descriptor
