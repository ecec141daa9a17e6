"""The order of the day: which faults peers inject into what they send, in a file that they read again when it changes.

{"until": seconds since 1970, "groups": [["peer-000", ...], ...], "corrupt": {"peer-003": 0.5}}
"""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "chaos.json"
_LIMIT = 2**20


@dataclass(frozen=True)
class Order:
    """What is broken now."""

    groups: tuple[tuple[str, ...], ...] = ()
    """Peers of different groups do not reach each other; one that is in no group reaches everybody."""
    corrupt: dict[str, float] = field(default_factory=dict)
    """Share of its messages that a peer damages."""
    until: float = 0.0
    """Seconds since 1970 after which all is well again, whatever became of the one who gave the order."""

    def separates(self, one: str, other: str) -> bool:
        """Whether nothing gets from one to the other."""
        place = {peer: i for i, group in enumerate(self.groups) for peer in group}
        return one in place and other in place and place[one] != place[other]

    def write(self, path: Path) -> None:
        """Whole or not at all: peers may read at any time."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(fresh, path)


def read_order(path: Path) -> Order:
    """The order in the file; none where there is no sound file."""
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(_LIMIT))
        groups = tuple(tuple(str(peer) for peer in group) for group in said["groups"])
        corrupt = {str(peer): float(share) for peer, share in said["corrupt"].items()}
        return Order(groups, corrupt, float(said["until"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Order()


class StandingOrder:
    """The order as of now; the file is looked at a few times a second at most."""

    def __init__(self, path: Path, every: float = 0.2) -> None:
        self._path, self._every = path, every
        self._order, self._looked, self._seen = Order(), 0.0, (0, 0)

    def now(self) -> Order:
        moment = time.monotonic()
        if moment - self._looked >= self._every:
            self._looked = moment
            self._look()
        return self._order if time.time() < self._order.until else Order()

    def _look(self) -> None:
        try:
            found = self._path.stat()
        except OSError:
            self._order, self._seen = Order(), (0, 0)
            return
        if (found.st_mtime_ns, found.st_ino) != self._seen:
            self._seen = (found.st_mtime_ns, found.st_ino)
            self._order = read_order(self._path)
