"""Who takes part in a run: members, their leases, the common start. Pure: the clock is handed in, nothing is sent."""

import enum
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from spark_node import topology
from spark_node.config import TopologySettings
from spark_node.errors import ConfigError

MAX_MEMBERS = 100_000
MAX_ROUND = 10_000_000
MAX_HELD = 1000
_CHEAP = 10
"""Rounds that are rather computed again than missing from a run's records."""
_REMEMBERED = 8
"""Earlier member lists that are kept for peers that have not heard of them."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[A-Za-z0-9:.%_-]+\]):([0-9]{1,5})")
_SIGNATURE = re.compile(r"[!-~]{1,128}")


class Refusal(enum.IntEnum):
    """Why a peer may not join: the protocol's JoinRefusal."""

    WRONG_RUN = 1
    WRONG_SIGNATURE = 2
    NAME_TAKEN = 3
    FULL = 4
    MALFORMED = 5
    UNAUTHENTICATED = 6
    WRONG_IDENTITY = 7


class Refused(Exception):
    """A join that was refused; the detail is one line that names the fix."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Member:
    """A peer as the others see it: addresses are host:port, that of its metrics may be empty."""

    name: str
    address: str
    metrics_address: str = ""


@dataclass(frozen=True)
class MemberList:
    """The members, sorted by name, and the round from which they hold."""

    version: int
    from_round: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Terms:
    """What a run is made with. Without a signature, that of the first to join becomes the run's."""

    run: str
    seed: int
    nodes: int
    topology: TopologySettings
    start_timeout: float
    lease: float
    signature: str = ""
    closed: bool = False
    recorded: int = MAX_ROUND
    """Rounds that the run's records have: a run that is resumed goes on from one of them where it can."""


@dataclass(frozen=True)
class Event:
    """Something that happened, for logs and metrics: join, return, leave, expiry, refusal, wait or start."""

    kind: str
    detail: str
    reason: str = ""


@dataclass(frozen=True)
class _Place:
    member: Member
    round: int
    expires: float
    held: frozenset[int] = frozenset()


class Registry:
    """The member list and its versions.

    Before the common start every change makes a new version of the list of round 1, which peers get when it is
    complete. After it a change makes a version that holds from two rounds past the furthest living peer, so that
    peers hear of it before they get there.

    Peers that come with checkpoints start from a round that they all have; `first_round` is the one after it.

    A restarted registry knows nobody: the first peer to come back from a round tells it that the run is on. For a
    lease from then on, lists from before the restart still hold, since the new one does not have everyone yet.
    """

    def __init__(
        self,
        terms: Terms,
        clock: Callable[[], float],
        first_version: int = 0,
        listener: Callable[[Event], None] = lambda event: None,
    ) -> None:
        if not _NAME.fullmatch(terms.run):
            raise ConfigError(f"run id {terms.run[:80]!r}: allowed: 1 to 64 letters, digits, dots, dashes, underscores")
        topology.check(terms.topology.kind, terms.nodes, terms.topology.degree)
        self.terms, self.started = terms, False
        self._clock, self._listener = clock, listener
        self._places: dict[str, _Place] = {}
        self._soonest = math.inf  # no lease runs out before
        self._first_version = self._version = first_version
        self._from_round = self.first_round = 1
        self._earlier: list[MemberList] = []  # replaced, but in force until a later round
        self._newest: MemberList | None = None  # made when asked for
        self._at_start: MemberList | None = None
        self._signature = terms.signature
        self._opened = math.inf  # when the first joined
        self._settled = math.inf  # when those who were here before a restart should all be back
        self._waits_for = ""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def newest(self) -> MemberList:
        """The newest list, in force or not."""
        if self._newest is None:
            members = tuple(self._places[name].member for name in sorted(self._places))
            self._newest = MemberList(self._version, self._from_round, members)
        return self._newest

    @property
    def version(self) -> int:
        """The version of the newest list."""
        return self._version

    @property
    def furthest(self) -> int:
        """The latest round that a living member is in."""
        return max((place.round for place in self._places.values()), default=0)

    def join(
        self, run: str, member: Member, signature: str, round: int = 0, version: int = 0, held: Sequence[int] = ()
    ) -> MemberList | None:
        """Take a peer in, or back; once the run is on, the newest list if the peer's is older. Or raise Refused."""
        now = self.tick()
        try:
            self._check_request(run, member, signature, round, held)
            self._check_place(member, signature, now)
        except Refused as refused:
            self.turn_away(member.name, refused)
            raise
        kind = "return" if member.name in self._places else "join"
        self._signature = self._signature or signature
        self._opened = min(self._opened, now)
        self._note(member, round, now, frozenset(held))
        self._tell(kind, f"{kind} of {member.name} at {member.address}; {len(self)} of {self.terms.nodes}")
        self._start_if_due(now)
        return self._news(version) if self.started else None

    def turn_away(self, name: str, refused: Refused) -> None:
        """A join that was refused, here or before it came here, is told of."""
        self._tell("refusal", f"{name[:64]!r} may not join: {refused}", refused.reason.name.lower())

    def renew(self, run: str, name: str, address: str, round: int, version: int) -> tuple[bool, MemberList | None]:
        """Give a member another lease. Whether it is one, and a list where the run is on and its own is older."""
        now = self.tick()
        place = self._find(run, name, address)
        if place is None or round > MAX_ROUND:
            return False, None
        self._note(place.member, round, now)
        first = self._at_start
        if round == 0 and first is not None and version < first.version and place.member in first.members:
            return True, first  # it is still to hear of the start, whatever came after that
        return True, self._news(version) if self.started else None

    def leave(self, run: str, name: str, address: str, round: int) -> None:
        """A member goes after this round; a stranger's farewell changes nothing."""
        self.tick()
        if self._find(run, name, address) is None or round > MAX_ROUND:
            return
        del self._places[name]
        self._change(at_least=round + 1)
        self._tell("leave", f"{name} leaves; {len(self)} left")

    def before(self, news: MemberList | None, version: int) -> tuple[MemberList, ...]:
        """Lists that a peer with that version needs besides the news: it may be in a round in which they hold."""
        if news is None or news is not self._newest or version == 0:
            return ()
        return tuple(found for found in self._earlier if version < found.version)

    def describe(self, version: int) -> MemberList | None:
        """The newest list where the observer's is older."""
        self.tick()
        return self._news(version)

    def tick(self) -> float:
        """Do what time alone brings: leases run out, the start falls due. The time it is."""
        now = self._clock()
        if now >= self._soonest:
            self._expire(now)
        self._start_if_due(now)
        if now >= self._settled:
            self._settled = math.inf
            self._change()
        return now

    def _check_request(self, run: str, member: Member, signature: str, round: int, held: Sequence[int]) -> None:
        if not _NAME.fullmatch(member.name):
            raise _malformed("name", member.name, "1 to 64 letters, digits, dots, dashes, underscores")
        for what, value in (("address", member.address), ("metrics address", member.metrics_address or "none:1")):
            match = _ADDRESS.fullmatch(value)
            if match is None or len(value) > 255 or not 1 <= int(match[1]) <= 65_535:
                raise _malformed(what, value, "host:port of at most 255 characters")
        if not _SIGNATURE.fullmatch(signature):
            raise _malformed("signature", signature, "1 to 128 printable characters")
        if not 0 <= round <= MAX_ROUND:
            raise _malformed("round", str(round), f"0 to {MAX_ROUND}")
        if len(held) > MAX_HELD or not all(0 < k <= MAX_ROUND for k in held):
            raise _malformed("held", str(list(held[:8])), f"at most {MAX_HELD} rounds from 1 to {MAX_ROUND}")
        if run not in ("", self.terms.run):
            there = f"this orchestrator has run {self.terms.run!r}, not {run[:64]!r}"
            raise Refused(Refusal.WRONG_RUN, f"{there}; give the peer that run id, or its own orchestrator's address")

    def _check_place(self, member: Member, signature: str, now: float) -> None:
        if self._signature and signature != self._signature:
            differs = f"model or settings differ from the run's (signature {signature}, not {self._signature})"
            raise Refused(Refusal.WRONG_SIGNATURE, f"{differs}; start the peer with the run's configuration")
        place = self._places.get(member.name)
        if place is not None and place.member.address != member.address:
            left = max(1, math.ceil(place.expires - now))
            taken = f"a living peer at {place.member.address} has the name {member.name}"
            raise Refused(Refusal.NAME_TAKEN, f"{taken}; choose another, or join again in {left} s if that one is dead")
        limit = self.terms.nodes if self.terms.closed else MAX_MEMBERS
        if place is None and len(self) >= limit:
            full = f"the run has all {limit} peers that it takes"
            raise Refused(Refusal.FULL, f"{full}; start its orchestrator with a larger --nodes, or without --closed")

    def _find(self, run: str, name: str, address: str) -> _Place | None:
        place = self._places.get(name)
        if place is None or place.member.address != address or run not in ("", self.terms.run):
            return None
        return place

    def _note(self, member: Member, round: int, now: float, held: frozenset[int] = frozenset()) -> None:
        """Where a member stands, for another lease; a new list where it is new, or the first that is back in a run."""
        known, expires = self._places.get(member.name), now + self.terms.lease
        held = held or (known.held if known is not None else held)
        self._places[member.name] = _Place(member, round, expires, held)
        self._soonest = min(self._soonest, expires)
        resumed = round > 0 and not self.started
        if resumed:
            self.started, self._settled = True, expires
            self._tell("start", f"{member.name} is back in round {round}: the run goes on")
        if resumed or known is None or known.member != member:
            self._change()

    def _change(self, at_least: int = 1) -> None:
        """A new version of the list. Its round never falls: lists come into force in the order of their versions."""
        self._version += 1
        handed_out, self._newest = self._newest, None
        if self.started:
            furthest = max(self.furthest, self.first_round - 1)
            self._from_round = max(self._from_round, furthest + 2, at_least)
            if handed_out is not None and handed_out.from_round < self._from_round:
                self._earlier = [*self._earlier, handed_out][-_REMEMBERED:]
        elif not self._places:  # nobody is left to wait for, or to agree with
            self._opened, self._signature = math.inf, self.terms.signature

    def _expire(self, now: float) -> None:
        gone = [name for name, place in self._places.items() if place.expires <= now]
        for name in gone:
            del self._places[name]
            self._tell("expiry", f"the lease of {name} ran out; {len(self)} left")
        self._soonest = min((place.expires for place in self._places.values()), default=math.inf)
        if gone:
            self._change()

    def _start_if_due(self, now: float) -> None:
        """The common start: everyone is here, or the time is up and those who are make a graph."""
        if self.started or not (len(self) >= self.terms.nodes or self._may_start_early(now)):
            return
        agreed = agreed_round([place.held for place in self._places.values()], self.terms.recorded)
        if agreed:
            self.first_round = self._from_round = agreed + 1
            self._version += 1
            self._newest = None
        self.started, self._at_start = True, self.newest
        resumed = f", from round {self.first_round} on" if agreed else ""
        self._tell("start", f"the run starts with {len(self)} of {self.terms.nodes} peers{resumed}")

    def _may_start_early(self, now: float) -> bool:
        if len(self) < 2 or now < self._opened + self.terms.start_timeout:
            return False
        try:
            topology.check(self.terms.topology.kind, len(self), self.terms.topology.degree)
        except ConfigError as error:
            if self._waits_for != str(error):
                self._waits_for = str(error)
                self._tell("wait", f"the time to start has come, but there is no such graph: {error}")
            return False
        return True

    def _news(self, version: int) -> MemberList | None:
        """The newest list for who has an older one; until a restart is settled, not for who has one from before it."""
        settling = self._settled < math.inf and 0 < version < self._first_version
        return self.newest if version < self._version and not settling else None

    def _tell(self, kind: str, detail: str, reason: str = "") -> None:
        self._listener(Event(kind, detail, reason))


def agreed_round(held: Sequence[Collection[int]], recorded: int = MAX_ROUND) -> int:
    """The round after which all go on: the newest that everyone holds, else that most hold, else 0: the beginning.

    Of those, one that the run's records reach up to is preferred: they are to have no gap. Who does not hold it
    starts from a neighbour's weights, like a newcomer.
    """

    def best(common: Sequence[int]) -> int:
        beginning = 0 if min(common) <= _CHEAP else min(common)
        return max((k for k in common if k <= recorded), default=beginning)

    holders = Counter(k for rounds in held for k in set(rounds))
    for enough in (len(held), len(held) // 2 + 1):
        common = [k for k, count in holders.items() if count >= enough]
        if common:
            return best(common)
    return 0


def _malformed(what: str, value: str, allowed: str) -> Refused:
    return Refused(Refusal.MALFORMED, f"{what} {value[:80]!r}: allowed: {allowed}")
