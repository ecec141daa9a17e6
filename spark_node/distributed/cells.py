"""A comparison under torchrun: each of its runs is spread over all ranks, one run after the other.

Rank 0 keeps the comparison and says in the ranks' common store what every rank starts next; each starts it as a process
of its own, with its own place and a meeting point of that run's own.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from spark_node.distributed.place import Place

_PATIENCE = timedelta(seconds=30)
_GRACE_SECONDS = 20.0
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Whether torchrun itself holds the store at MASTER_ADDR and MASTER_PORT, and not rank 0."""


def _store(place: Place) -> Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    held = place.rank == 0 and os.environ.get(_AGENT) != "True"
    return PrefixStore("spark/cells", TCPStore(address, port, place.size, held, _PATIENCE, wait_for_workers=False))


def _meeting_point(port: int) -> dict[str, str]:
    return {"MASTER_PORT": str(port), _AGENT: "False"}


class Cells:
    """Rank 0's voice."""

    def __init__(self, place: Place) -> None:
        self._store, self._count = _store(place), 0

    def announce(self, command: Sequence[str]) -> dict[str, str]:
        """Have the other ranks start a command too; what its environment needs here."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self._say({"arguments": list(command[1:]), "port": port})
        return _meeting_point(port)

    def close(self) -> None:
        """Send the other ranks home."""
        with contextlib.suppress(RuntimeError):
            self._say({})

    def _say(self, said: dict[str, Any]) -> None:
        self._store.set(str(self._count), json.dumps(said))
        self._count += 1


@contextmanager
def leading_cells(place: Place) -> Iterator[Cells]:
    """Rank 0, until the comparison is over."""
    cells = Cells(place)
    try:
        yield cells
    finally:
        cells.close()


def follow_cells(place: Place) -> None:
    """Every other rank: start what rank 0 says until it says nothing more. What fails is rank 0's to tell."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        store, count = _store(place), 0
        while (said := _next(store, count)) != {}:
            environment = {**os.environ, **_meeting_point(said["port"])}
            _run([sys.executable, *said["arguments"]], environment)
            count += 1
    finally:
        signal.signal(signal.SIGTERM, previous)


def _next(store: Store, count: int) -> dict[str, Any]:
    """What rank 0 says next, however long its own part of the run before takes."""
    while True:
        try:
            store.wait([str(count)], _PATIENCE)
        except DistStoreError:
            continue
        said: dict[str, Any] = json.loads(store.get(str(count)))
        return said


def _run(command: Sequence[str], environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    try:
        process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
            process.kill()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
