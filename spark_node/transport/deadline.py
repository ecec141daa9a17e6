"""How long a stage waits for its neighbours: what waits were like so far, within a floor and a ceiling."""

from collections import defaultdict, deque
from statistics import median

_REMEMBERED = 64
_ENOUGH = 5
_ROUNDS = 3
LOOKS = 3
"""Calls in a row that a late neighbour does not answer, after which it is taken to hang."""
_ENDURANCE = 30
"""Failures in a row after which a grant shrinks no more."""


class Deadlines:
    """Median + k MAD of the waits seen in a stage; the ceiling for the first few rounds.

    It is never below twice the longest of the last rounds: peers that take turns on one machine, or that begin a round
    at different times, differ by up to a round, and that is no sign of a lost one. A first round says little: whose
    turn comes first is done long before the others.
    """

    def __init__(self, floor: float, ceiling: float, spread: float, sign_of_life: float = 0.0) -> None:
        self._floor, self._ceiling, self._spread = floor, ceiling, spread
        self.look = min(sign_of_life, floor / (LOOKS + 1))
        """Seconds that a late neighbour has to answer a call. Those that it misses are over before a deadline is, so
        that who waited for one that hangs is not late himself."""
        self._waits: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._rounds: deque[float] = deque(maxlen=_ROUNDS)

    def seen(self, stage: str, seconds: float) -> None:
        """A neighbour's message of that stage came so long after the wait for it began."""
        self._waits[stage].append(seconds)

    def round_took(self, seconds: float) -> None:
        """A round is over."""
        self._rounds.append(seconds)

    def of(self, stage: str) -> float:
        """Seconds that the next such wait may take."""
        if len(self._waits[stage]) < _ENOUGH or len(self._rounds) < _ROUNDS:
            return self._ceiling
        longest = max(self.usual(stage) + (LOOKS + 1) * self.look, 2 * self._longest, self._floor)
        return min(longest, self._ceiling)

    def usual(self, stage: str) -> float:
        """Seconds that hardly any wait takes: after them it is worth a look whether a neighbour is still there."""
        waits = self._waits[stage]
        if len(waits) < _ENOUGH:
            return self._floor
        middle = median(waits)
        spread = median(abs(wait - middle) for wait in waits)
        return max(middle + self._spread * spread, self.look, self._longest / 4)

    def until_next_look(self, waited: float) -> float:
        """Seconds until a neighbour that has just answered is called again, after a wait of so long.

        A call costs both ends milliseconds, and 300 peers of one machine wait most of the time: where rounds take
        minutes, a few calls a round are enough, and one that hangs from now on still costs less than a round.
        """
        return max(self.look, waited / 2, self._longest / 2)

    @property
    def _longest(self) -> float:
        return max(self._rounds, default=0.0)


class Suspicion:
    """How much of a deadline each neighbour is granted: half for every time in a row that it failed, down to a floor.

    So a process that hangs costs its neighbours one deadline, and then ever less. Anything that it says forgives it.
    """

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._failures: dict[str, int] = {}

    def failed(self, peer: str) -> None:
        """It was silent until its time was up, or could not be reached."""
        self._failures[peer] = self._failures.get(peer, 0) + 1

    def heard(self, peer: str) -> None:
        """Something of it came in time."""
        self._failures.pop(peer, None)

    def suspects(self, peer: str) -> bool:
        return peer in self._failures

    def granted(self, peer: str, deadline: float) -> float:
        """Seconds that this neighbour gets where others get `deadline`."""
        failures = min(self._failures.get(peer, 0), _ENDURANCE)
        return max(min(self._floor, deadline), deadline * 0.5**failures)
