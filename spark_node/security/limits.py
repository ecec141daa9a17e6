"""How much one sender may ask for: rates, streams at once, and the end of patience with one that breaks them."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from spark_node.config import SecuritySettings

_REMEMBERED = 4096
"""Senders whose rates are kept; the one that was silent longest is forgotten first."""


class TokenBucket:
    """`rate` tokens a second, of which up to `burst` are saved up."""

    __slots__ = ("_burst", "_rate", "_seen", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._seen = burst, now

    def take(self, count: float, now: float) -> bool:
        """Whether so many are there; if so, they are gone."""
        self._tokens, self._seen = self._saved(now), now
        if self._tokens < count:
            return False
        self._tokens -= count
        return True

    def is_full(self, now: float) -> bool:
        """Whether it is as a new one is."""
        return self._saved(now) >= self._burst

    def _saved(self, now: float) -> float:
        return min(self._burst, self._tokens + (now - self._seen) * self._rate)


class Rates:
    """Calls a second by caller, and nothing else: what the orchestrator needs."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = per_second, clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def allow(self, who: str) -> bool:
        now = self._clock()
        bucket = self._buckets.get(who)
        if bucket is None:
            bucket = self._buckets[who] = TokenBucket(self._rate, 2 * self._rate, now)
            while len(self._buckets) > _REMEMBERED:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(who)
        return bucket.take(1.0, now)


@dataclass(slots=True)
class _Sender:
    messages: TokenBucket
    bytes: TokenBucket
    streams: int = 0
    strikes: Counter[int] = field(default_factory=Counter)
    """By round."""
    cut_off_until: int = -1


class Guard:
    """What each sender has used up, and who has been cut off until which round.

    A sender is whoever a certificate names; without certificates, a connection. What one of them does costs the
    others nothing.
    """

    def __init__(self, settings: SecuritySettings, largest: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._burst = 2.0 * max(largest, settings.bytes_per_second)
        self._senders: OrderedDict[str, _Sender] = OrderedDict()

    def enter(self, who: str) -> bool:
        """Whether a message may begin; if so, `leave` follows."""
        sender = self._of(who)
        if sender.streams >= self._settings.streams_per_sender or not sender.messages.take(1.0, self._clock()):
            return False
        sender.streams += 1
        return True

    def leave(self, who: str) -> None:
        """The message is over, whatever became of it."""
        self._of(who).streams -= 1

    def spend(self, who: str, count: int) -> bool:
        """Whether the sender may send so many bytes more now."""
        return self._of(who).bytes.take(float(count), self._clock())

    def strike(self, who: str, k: int) -> bool:
        """Something that no honest sender does. Whether that was once too often: then it is cut off."""
        sender = self._of(who)
        sender.strikes = Counter({r: n for r, n in sender.strikes.items() if r >= k - self._settings.cut_off_rounds})
        sender.strikes[k] += 1
        if k <= sender.cut_off_until or sender.strikes.total() < self._settings.strikes:
            return False
        sender.cut_off_until = k + self._settings.cut_off_rounds - 1
        sender.strikes.clear()
        return True

    def is_cut_off(self, who: str, k: int) -> bool:
        """Whether this sender's messages of round k are refused: by their round, so that both sides agree on it."""
        sender = self._senders.get(who)
        return sender is not None and k <= sender.cut_off_until

    def cut_off(self, k: int) -> int:
        """How many are cut off in round k."""
        return sum(k <= sender.cut_off_until for sender in list(self._senders.values()))

    def round_begins(self, k: int) -> None:
        """Forget those of whom nothing is left to know. Without certificates every new connection is one more."""
        now, since = self._clock(), k - self._settings.cut_off_rounds
        self._senders = OrderedDict(
            (who, sender)
            for who, sender in self._senders.items()
            if sender.streams
            or k <= sender.cut_off_until
            or any(r >= since for r in sender.strikes)
            or not (sender.messages.is_full(now) and sender.bytes.is_full(now))
        )

    def _of(self, who: str) -> _Sender:
        sender = self._senders.get(who)
        if sender is None:
            now, rate = self._clock(), self._settings.messages_per_second
            buckets = TokenBucket(rate, 2 * rate, now), TokenBucket(self._settings.bytes_per_second, self._burst, now)
            sender = self._senders[who] = _Sender(*buckets)
            self._forget()
        self._senders.move_to_end(who)
        return sender

    def _forget(self) -> None:
        """Those that hold no stream, the longest silent first, where there are too many."""
        spare = len(self._senders) - _REMEMBERED
        if spare > 0:
            for who in [who for who, sender in self._senders.items() if not sender.streams][:spare]:
                del self._senders[who]
