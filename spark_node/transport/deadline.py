"""How long a stage waits for its neighbours: what waits were like so far, within a floor and a ceiling."""

from collections import defaultdict, deque
from statistics import median

_REMEMBERED = 64
_ENOUGH = 5


class Deadlines:
    """Median + k MAD of the waits seen in a stage; the ceiling until enough were seen."""

    def __init__(self, floor: float, ceiling: float, spread: float) -> None:
        self._floor, self._ceiling, self._spread = floor, ceiling, spread
        self._waits: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def seen(self, stage: str, seconds: float) -> None:
        """A neighbour's message of that stage came so long after the wait for it began."""
        self._waits[stage].append(seconds)

    def of(self, stage: str) -> float:
        """Seconds that the next such wait may take."""
        waits = self._waits[stage]
        if len(waits) < _ENOUGH:
            return self._ceiling
        middle = median(waits)
        spread = median(abs(wait - middle) for wait in waits)
        # A wait that took as long as any before is no sign of a lost peer.
        expected = max(middle + self._spread * spread, 2 * max(waits))
        return min(max(expected, self._floor), self._ceiling)
