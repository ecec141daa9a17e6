"""The orchestrator's member list: who is in, from which round on, and when the run starts. The clock is a fake."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator import registry as module
from orchestrator.main import SteadyClock
from orchestrator.registry import MAX_ROUND, Event, Member, MemberList, Refusal, Refused, Registry, Terms, agreed_round
from spark_node.config import TopologySettings
from spark_node.errors import ConfigError
from spark_node.generated.spark.v1 import orchestrator_pb2 as pb

LEASE, TIMEOUT = 15.0, 60.0
TERMS = Terms("monday", 7, 4, TopologySettings("regular", 2, True), TIMEOUT, LEASE)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Room:
    """A registry, its clock, what it told, and calls in the words of the tests."""

    def __init__(self, terms: Terms = TERMS, first_version: int = 0) -> None:
        self.clock, self.events = Clock(), list[Event]()
        self.registry = Registry(terms, self.clock, first_version, self.events.append)

    def join(self, name: str, round: int = 0, port: int = 5000, version: int = 0) -> MemberList | None:
        return self.registry.join("monday", member(name, port), "sig", round, version)

    def renew(self, name: str, round: int = 0, version: int = 0, port: int = 5000) -> tuple[bool, MemberList | None]:
        return self.registry.renew("monday", name, f"{name}:{port}", round, version)

    def leave(self, name: str, round: int = 0, port: int = 5000) -> None:
        self.registry.leave("monday", name, f"{name}:{port}", round)

    def wait(self, seconds: float, *renewing: str, round: int = 0) -> None:
        """Let time pass, while some keep their places."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + LEASE / 3)
            for name in renewing:
                assert self.renew(name, round)[0]
        self.registry.tick()

    @property
    def names(self) -> str:
        return " ".join(member.name for member in self.registry.newest.members)

    def told(self, kind: str) -> list[str]:
        return [event.detail for event in self.events if event.kind == kind]


def member(name: str, port: int = 5000, metrics: str = "") -> Member:
    return Member(name, f"{name}:{port}", metrics)


def started(*names: str, terms: Terms = TERMS) -> Room:
    room = Room(replace(terms, nodes=len(names)))
    for name in names:
        room.join(name)
    assert room.registry.started
    return room


def refusal(room: Room, asking: Member, run: str = "monday", signature: str = "sig", round: int = 0) -> Refused:
    before = room.registry.newest
    with pytest.raises(Refused) as caught:
        room.registry.join(run, asking, signature, round)
    assert room.registry.newest == before
    assert "\n" not in caught.value.detail
    assert room.events[-1].kind == "refusal"
    assert room.events[-1].reason == caught.value.reason.name.lower()
    return caught.value


def test_refusals_are_those_of_the_protocol() -> None:
    assert {f"JOIN_REFUSAL_{r.name}": r.value for r in Refusal} | {"JOIN_REFUSAL_NONE": 0} == dict(
        pb.JoinRefusal.items()
    )


def test_a_run_that_cannot_be_is_not_made() -> None:
    with pytest.raises(ConfigError, match="run id"):
        Room(replace(TERMS, run="two words"))
    with pytest.raises(ConfigError, match=r"topology\.degree"):
        Room(replace(TERMS, nodes=2))


# Before the common start


def test_while_it_collects_every_change_is_a_new_version_of_the_list_of_round_one() -> None:
    room = Room(first_version=100)
    seen = [room.registry.newest]
    for change in (lambda: room.join("b"), lambda: room.join("a"), lambda: room.leave("b"), lambda: room.join("c")):
        change()
        seen.append(room.registry.newest)
    assert [found.version for found in seen] == [100, 101, 102, 103, 104]
    assert {found.from_round for found in seen} == {1}
    assert room.names == "a c"
    assert not room.registry.started


def test_the_run_starts_when_everyone_is_here_with_that_list_for_round_one() -> None:
    room = Room()
    replies = [room.join(name) for name in "dbca"]
    assert room.registry.started
    assert room.names == "a b c d"
    assert replies == [None, None, None, MemberList(4, 1, tuple(map(member, "abcd")))]
    assert room.told("start") == ["the run starts with 4 of 4 peers"]


def test_a_list_that_is_not_complete_is_for_observers_only() -> None:
    room = Room()
    assert room.join("a") is None
    assert room.renew("a") == (True, None)
    assert room.registry.describe(0) == MemberList(1, 1, (member("a"),))
    assert room.registry.describe(1) is None


def test_one_peer_alone_is_a_run() -> None:
    assert started("a").registry.started


def test_after_the_timeout_the_run_starts_with_those_who_are_here() -> None:
    room = Room()
    room.join("a")
    room.wait(10, "a")
    room.join("b")
    room.join("c")
    room.wait(TIMEOUT - 11, "a", "b", "c")
    assert not room.registry.started
    room.wait(1, "a", "b", "c")
    assert room.registry.started
    assert (room.names, room.registry.newest.from_round) == ("a b c", 1)


def test_the_timeout_counts_from_the_first_join_of_those_who_are_here() -> None:
    room = Room()
    room.join("a")
    room.wait(TIMEOUT - 1, "a")
    room.leave("a")
    for name in "abc":
        room.join(name)
    room.wait(TIMEOUT - 1, "a", "b", "c")
    assert not room.registry.started
    room.wait(1)
    assert room.registry.started


@pytest.mark.parametrize(
    ("kind", "degree", "needs"), [("line", 2, 2), ("ring", 2, 3), ("regular", 4, 5), ("cluster", 2, 3)]
)
def test_the_timeout_waits_for_as_many_as_the_topology_needs(kind: str, degree: int, needs: int) -> None:
    room = Room(replace(TERMS, nodes=10, topology=TopologySettings(kind, degree), start_timeout=0.0))
    for count, name in enumerate("abcdef"[:needs], 1):
        assert not room.registry.started
        room.join(name)
        assert room.registry.started == (count == needs)


def test_it_says_once_why_it_does_not_start_though_the_time_has_come() -> None:
    room = Room(replace(TERMS, nodes=6, topology=TopologySettings("regular", 3)))
    for name in "abcde":
        room.join(name)
    room.wait(TIMEOUT + LEASE, *"abcde")
    assert not room.registry.started
    assert len(room.told("wait")) == 1
    assert "an odd number of peers" in room.told("wait")[0]
    room.leave("e")
    room.registry.tick()
    assert room.registry.started


def test_who_is_slow_to_hear_of_the_start_gets_its_list_before_any_later_one() -> None:
    room = started("a", "b", "c", "d")
    first = room.registry.newest
    room.join("e")
    assert room.registry.newest.from_round == 2
    assert room.renew("a") == (True, first)
    assert room.renew("a", version=first.version) == (True, room.registry.newest)
    assert room.renew("e") == (True, room.registry.newest)
    assert room.renew("b", round=1) == (True, room.registry.newest)


# After it


def test_a_late_joiner_learns_from_which_round_it_takes_part() -> None:
    room = started("a", "b", "c")
    room.renew("a", round=5)
    room.renew("b", round=7)
    room.renew("c", round=3)
    assert room.join("late") == MemberList(4, 9, tuple(map(member, ("a", "b", "c", "late"))))


def test_a_peer_that_is_behind_holds_nothing_back() -> None:
    room = started("a", "b", "c")
    room.renew("a", round=50)
    room.renew("b", round=2)
    room.leave("c", round=2)
    assert room.registry.newest.from_round == 52


def test_changes_before_a_list_is_in_force_replace_it_by_one_of_the_same_round() -> None:
    room = started("a", "b", "c", "d")
    room.renew("a", round=5)
    found = [room.join("e"), room.join("f")]
    room.leave("b", round=5)
    assert [(lst.version, lst.from_round) for lst in found if lst] == [(5, 7), (6, 7)]
    assert (room.registry.newest.version, room.registry.newest.from_round) == (7, 7)
    assert room.names == "a c d e f"
    room.renew("a", round=6)
    room.leave("c", round=5)
    assert (room.registry.newest.version, room.registry.newest.from_round) == (8, 8)


def test_the_round_of_a_list_never_falls_when_the_peer_that_was_ahead_is_gone() -> None:
    room = started("a", "b", "c")
    room.renew("a", round=20)
    room.renew("b", round=10)
    room.join("d")
    assert room.registry.newest.from_round == 22
    room.leave("a", round=20)
    assert room.registry.newest.from_round == 22


def test_a_list_without_a_peer_holds_only_after_the_last_round_it_took_part_in() -> None:
    room = started("a", "b", "c")
    room.renew("a", round=3)
    room.leave("b", round=9)
    assert room.registry.newest.from_round == 10


def test_a_lease_that_runs_out_is_a_change_and_several_at_once_are_one() -> None:
    room = started("a", "b", "c", "d")
    room.wait(LEASE - 1, "c", "d", round=4)
    assert room.names == "a b c d"
    room.wait(1, "c", "d", round=4)
    assert (room.names, room.registry.newest.version, room.registry.newest.from_round) == ("c d", 5, 6)
    assert len(room.told("expiry")) == 2


def test_expiry_is_seen_on_any_call_without_a_tick() -> None:
    room = started("a", "b", "c")
    room.clock.now += LEASE / 2
    room.renew("a", round=1)
    room.renew("b", round=1)
    room.clock.now += LEASE / 2
    found = room.registry.describe(0)
    assert found is not None
    assert [m.name for m in found.members] == ["a", "b"]
    assert room.renew("c", round=1) == (False, None)


def test_all_may_leave_and_the_run_stays_started() -> None:
    room = started("a", "b", "c")
    for name in "abc":
        room.leave(name, round=20)
    assert room.registry.newest.members == ()
    assert room.registry.started
    assert room.registry.newest.from_round == 21


# Names, addresses, signatures


def test_to_join_again_is_no_change() -> None:
    room = started("a", "b", "c")
    assert room.join("a") == room.registry.newest
    assert room.join("a", round=3, version=3) is None
    assert room.registry.version == 3
    assert (len(room.told("join")), len(room.told("return"))) == (3, 2)


def test_to_join_again_renews_the_lease() -> None:
    room = Room()
    room.join("a")
    room.clock.now += LEASE - 1
    room.join("a")
    room.clock.now += LEASE - 1
    assert room.renew("a")[0]


def test_to_join_again_after_the_lease_is_a_change() -> None:
    room = started("a", "b", "c")
    room.wait(LEASE, "b", "c", round=2)
    assert room.names == "b c"
    found = room.join("a", round=1)
    assert found is not None
    assert (room.names, found.version, found.from_round) == ("a b c", 5, 4)


def test_new_metrics_address_of_a_member_makes_a_new_version() -> None:
    room = Room()
    room.join("a")
    room.registry.join("monday", member("a", metrics="a:9000"), "sig")
    assert room.registry.newest == MemberList(2, 1, (member("a", metrics="a:9000"),))


def test_a_living_peers_name_is_taken() -> None:
    room = Room()
    room.join("a")
    room.clock.now += 5
    refused = refusal(room, member("a", 6000))
    assert refused.reason is Refusal.NAME_TAKEN
    assert "a:5000" in refused.detail
    assert "in 10 s" in refused.detail


def test_after_the_lease_a_name_is_taken_over_and_the_old_one_is_a_stranger() -> None:
    room = started("a", "b", "c")
    room.wait(LEASE, "b", "c", round=1)
    room.join("a", port=6000)
    assert room.registry.newest.members[0].address == "a:6000"
    assert room.renew("a", port=5000) == (False, None)
    room.leave("a", port=5000)
    assert room.names == "a b c"


def test_the_first_signature_is_the_runs() -> None:
    room = Room()
    room.join("a")
    refused = refusal(room, member("b"), signature="other")
    assert refused.reason is Refusal.WRONG_SIGNATURE
    assert "configuration" in refused.detail


def test_a_signature_given_to_the_run_binds_the_first_peer_too() -> None:
    room = Room(replace(TERMS, signature="given"))
    assert refusal(room, member("a"), signature="sig").reason is Refusal.WRONG_SIGNATURE
    room.registry.join("", member("a"), "given")


def test_when_all_have_gone_before_the_start_the_next_signature_counts() -> None:
    room = Room()
    room.join("a")
    room.leave("a")
    room.registry.join("monday", member("b"), "other")
    assert room.names == "b"


def test_another_runs_peer_is_refused_and_an_empty_run_is_any() -> None:
    room = Room()
    refused = refusal(room, member("a"), run="tuesday")
    assert refused.reason is Refusal.WRONG_RUN
    assert "monday" in refused.detail
    room.registry.join("", member("a"), "sig")
    assert room.registry.renew("tuesday", "a", "a:5000", 1, 0) == (False, None)
    room.registry.leave("tuesday", "a", "a:5000", 1)
    assert room.names == "a"


def test_late_peers_are_refused_only_where_the_run_is_closed() -> None:
    assert started("a", "b", "c").join("d") is not None
    room = started("a", "b", "c", terms=replace(TERMS, closed=True))
    refused = refusal(room, member("d"))
    assert refused.reason is Refusal.FULL
    assert "--nodes" in refused.detail
    assert room.join("a") is not None
    room.leave("a")
    room.join("d")
    assert room.names == "b c d"


def test_the_number_of_members_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MEMBERS", 3)
    room = started("a", "b", "c")
    assert refusal(room, member("d")).reason is Refusal.FULL


GOOD = Member("a", "host:1", "host:2")


@pytest.mark.parametrize(
    "bad",
    [
        *(replace(GOOD, name=name) for name in ("", "a" * 65, "a b", "ä", "a\n", "a/b")),
        *(replace(GOOD, address=address) for address in ("", "host", "host:", ":1", "host:0", "host:65536", "a b:1")),
        *(replace(GOOD, address=address) for address in ("a" * 256 + ":1", "::1:5", "[::1]", "host:1\n", "host:१")),
        *(replace(GOOD, metrics_address=address) for address in ("host", "http://host:1/metrics")),
    ],
)
def test_malformed_members_are_refused(bad: Member) -> None:
    refused = refusal(Room(), bad)
    assert refused.reason is Refusal.MALFORMED
    assert "allowed:" in refused.detail
    assert len(refused.detail) < 300


@pytest.mark.parametrize(
    ("signature", "round"),
    [("", 0), ("s" * 129, 0), ("a b", 0), ("sig", -1), ("sig", MAX_ROUND + 1), ("sig", 2**64 - 1)],
)
def test_malformed_signatures_and_rounds_are_refused(signature: str, round: int) -> None:
    assert refusal(Room(), GOOD, signature=signature, round=round).reason is Refusal.MALFORMED


@pytest.mark.parametrize("address", ["10.0.0.1:1", "[::1]:65535", "[fe80::1%eth0]:80", "peer-1.spark.svc:443", "h_1:9"])
def test_addresses_of_every_kind_are_welcome(address: str) -> None:
    room = Room()
    room.registry.join("", replace(GOOD, address=address, metrics_address=address), "s" * 128)
    assert room.registry.newest.members[0].address == address


def test_an_impossible_round_neither_renews_nor_leaves() -> None:
    room = started("a", "b", "c")
    assert room.renew("a", round=2**63) == (False, None)
    room.leave("a", round=2**63)
    assert (room.names, room.registry.newest.from_round) == ("a b c", 1)


# News


def test_the_list_is_sent_only_to_those_who_have_an_older_one() -> None:
    room = started("a", "b", "c")
    assert room.renew("a", round=1, version=3) == (True, None)
    assert room.renew("a", round=1, version=2) == (True, room.registry.newest)
    assert room.registry.describe(3) is None
    assert room.registry.describe(2) == room.registry.newest
    room.leave("c", round=1)
    assert room.renew("a", round=1, version=3) == (True, room.registry.newest)


# A restart


def test_after_a_restart_peers_are_strangers_until_they_join_again() -> None:
    room = Room(first_version=1000)
    assert room.renew("a", round=7, version=4) == (False, None)
    assert not room.registry.started


def test_a_peer_that_comes_back_in_a_round_tells_that_the_run_is_on() -> None:
    room = Room(first_version=1000)
    found = room.join("a", round=7)
    assert room.registry.started
    assert room.told("start") == ["a is back in round 7: the run goes on"]
    assert found == MemberList(1001, 9, (member("a"),))
    assert room.join("b", round=9) == MemberList(1002, 11, (member("a"), member("b")))


def test_a_member_that_waits_already_may_be_the_one_that_comes_back() -> None:
    room = Room(first_version=1000)
    room.join("late")
    assert not room.registry.started
    assert room.renew("late", round=3, version=1001) == (True, MemberList(1002, 5, (member("late"),)))
    assert room.registry.started


def test_until_all_can_be_back_lists_from_before_the_restart_hold() -> None:
    room = Room(first_version=1000)
    assert room.join("a", round=7, version=4) is None
    room.wait(LEASE / 3, "a", round=8)
    assert room.join("b", round=9, version=4) is None
    assert room.registry.describe(4) is None
    new = room.join("new")
    assert new is not None
    assert new.from_round == 11
    assert room.renew("a", round=9, version=4) == (True, None)
    room.wait(LEASE, "a", "b", "new", round=12)
    assert room.renew("a", round=13, version=4) == (True, room.registry.newest)
    assert (room.names, room.registry.newest.from_round) == ("a b new", 14)


def test_a_pause_of_the_process_costs_nobody_the_lease() -> None:
    real = Clock()
    steady = SteadyClock(5.0, real)
    began = steady()
    for pause, passed in ((4.0, 4.0), (100.0, 9.0), (5.0, 14.0), (0.0, 14.0)):
        real.now += pause
        assert steady() - began == passed


# Going on after everything was killed


@pytest.mark.parametrize(
    ("held", "recorded", "agreed"),
    [
        ([{1, 2, 3}, {2, 3, 4}, {1, 2, 3}], 99, 3),
        ([{1, 2, 3}, {2, 3, 4}, {1, 2, 3}], 2, 2),
        ([{12, 13}, {13, 14}], 11, 13),  # rows are missing anyway; thirteen rounds are not computed again for them
        ([{1, 2}, {1, 2}], 0, 0),  # two are
        ([{5, 6}, {5, 6}, {1}], 99, 6),  # one that was away for long does not hold up the others
        ([{5}, {6}], 99, 0),
        ([set(), set()], 99, 0),
        ([], 99, 0),
    ],
)
def test_the_agreed_round_is_the_newest_that_all_or_most_hold(held: list[set[int]], recorded: int, agreed: int) -> None:
    assert agreed_round(held, recorded) == agreed


def test_peers_with_checkpoints_start_after_the_newest_that_all_hold() -> None:
    room = Room(first_version=100)
    for name, held in (("a", [4, 5]), ("b", [5, 6]), ("c", [5]), ("d", [3, 4, 5])):
        room.registry.join("monday", member(name), "sig", held=held)
    assert room.registry.started
    assert (room.registry.first_round, room.registry.newest.from_round) == (6, 6)
    assert room.told("start") == ["the run starts with 4 of 4 peers, from round 6 on"]
    assert room.renew("a") == (True, room.registry.newest)
    room.leave("d")
    assert room.registry.newest.from_round == 7  # not two: the others are about to begin round 6


def test_a_late_peer_with_checkpoints_changes_no_start() -> None:
    room = started("a", "b", "c")
    room.registry.join("monday", member("d"), "sig", held=[7])
    assert room.registry.first_round == 1


@pytest.mark.parametrize("held", [[0], [MAX_ROUND + 1], range(1, 1002)])
def test_impossible_checkpoints_are_malformed(held: list[int]) -> None:
    with pytest.raises(Refused, match="held") as caught:
        Room().registry.join("monday", member("a"), "sig", held=held)
    assert caught.value.reason is Refusal.MALFORMED


def test_a_list_that_was_replaced_before_a_peer_heard_of_it_is_sent_along() -> None:
    """a is in round 9 and hears of both lists at once; in rounds 10 and 11 the first of them holds."""
    room = started("a", "b", "c", "d", "e")
    start = room.registry.version
    for name in "abcde":
        room.renew(name, 8, start)
    room.leave("e", 8)
    second = room.renew("b", 9, start)[1]
    assert second is not None
    assert second.from_round == 10
    room.renew("b", 10, second.version)
    room.leave("d", 9)
    news = room.renew("a", 9, start)[1]
    assert news is not None
    assert news.from_round == 12
    assert room.registry.before(news, start) == (second,)
    assert room.registry.before(news, second.version) == ()
    assert room.registry.before(None, start) == ()
    assert room.registry.before(news, 0) == ()  # a newcomer is in none of those rounds


# Whatever happens


class AnyHistory(RuleBasedStateMachine):
    """Joins, renewals, farewells and time in any order, beside a model of who should be in."""

    names, rounds = st.sampled_from("abcdefg"), st.integers(0, 6)

    @initialize(nodes=st.integers(3, 6), timeout=st.sampled_from([0.0, 20.0]), closed=st.booleans())
    def open(self, nodes: int, timeout: float, closed: bool) -> None:
        self.room = Room(replace(TERMS, nodes=nodes, start_timeout=timeout, closed=closed), first_version=100)
        self.leases: dict[str, tuple[float, int, int]] = {}  # name: end, port, round
        self.lists = {100: self.room.registry.newest}
        self.was_started, self.rounds = False, dict[str, int]()

    @property
    def now(self) -> float:
        return self.room.clock.now

    def living(self) -> dict[str, tuple[float, int, int]]:
        self.leases = {name: lease for name, lease in self.leases.items() if lease[0] > self.now}
        return self.leases

    @rule(name=names, port=st.sampled_from([5000, 5001]), round=rounds)
    def join(self, name: str, port: int, round: int) -> None:
        held, terms = self.living().get(name), self.room.registry.terms
        taken = held is not None and held[1] != port
        full = held is None and terms.closed and len(self.leases) >= terms.nodes
        if taken or full:
            assert refusal(self.room, member(name, port)).reason is (Refusal.NAME_TAKEN if taken else Refusal.FULL)
            return
        found = self.room.join(name, round, port)
        assert (found is not None) == self.room.registry.started
        assert found is None or member(name, port) in found.members
        self.leases[name] = (self.now + LEASE, port, round)

    @rule(name=names, port=st.sampled_from([5000, 5001]), round=rounds, old=st.integers(0, 200))
    def renew(self, name: str, port: int, round: int, old: int) -> None:
        held = self.living().get(name)
        known, found = self.room.renew(name, round, old, port)
        assert known == (held is not None and held[1] == port)
        if known:
            self.leases[name] = (self.now + LEASE, port, round)
        if found is not None:
            assert found.version > old

    @rule(name=names, port=st.sampled_from([5000, 5001]))
    def leave(self, name: str, port: int) -> None:
        held = self.living().get(name)
        self.room.leave(name, port=port)
        if held is not None and held[1] == port:
            del self.leases[name]

    @rule(seconds=st.sampled_from([1.0, 4.0, 5.0, 15.0]))
    def time_passes(self, seconds: float) -> None:
        self.room.clock.now += seconds

    @precondition(lambda self: hasattr(self, "room"))
    @invariant()
    def holds(self) -> None:
        registry, last = self.room.registry, self.lists[max(self.lists)]
        registry.tick()
        newest = registry.newest
        names = [found.name for found in newest.members]
        assert names == sorted(self.living())  # sorted, nobody twice, nobody whose lease ran out
        assert self.lists.setdefault(newest.version, newest) == newest  # a version never means two lists
        assert newest.version >= last.version
        rounds = {name: round for name, (_, _, round) in self.leases.items()}
        if not registry.started:
            assert newest.from_round == 1
            assert len(names) < registry.terms.nodes
        elif self.was_started and newest.version > last.version:
            surely = max((min(round, self.rounds.get(name, round)) for name, round in rounds.items()), default=-1)
            at_most = max([0, *rounds.values(), *self.rounds.values()])
            assert max(last.from_round, surely + 2) <= newest.from_round <= max(last.from_round, at_most + 2)
        self.was_started, self.rounds = registry.started, rounds


AnyHistory.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAnyHistory = AnyHistory.TestCase
