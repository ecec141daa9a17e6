"""The parts of the transport, each by itself: deadlines, mailbox, member lists, frames, turns."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable

import torch
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from spark_node.config import NetworkSettings, SecuritySettings, TopologySettings, load
from spark_node.generated.spark.v1 import package_pb2, peer_pb2
from spark_node.learning.algorithms import make_terms
from spark_node.learning.messages import Weights
from spark_node.membership import Roster
from spark_node.model import ParameterLayout
from spark_node.package.errors import PackageError
from spark_node.package.peer import PeerCodec
from spark_node.security.tls import Plaintext
from spark_node.transport import frames
from spark_node.transport.deadline import Deadlines, Suspicion
from spark_node.transport.grpc import GrpcTransport
from spark_node.transport.mailbox import Mailbox
from spark_node.transport.traffic import Traffic

# Deadlines


def test_the_ceiling_holds_until_waits_and_three_rounds_were_seen() -> None:
    deadlines = Deadlines(1.0, 100.0, 8.0)
    assert deadlines.of("weights") == 100.0
    for _ in range(10):
        deadlines.seen("weights", 2.0)
    assert deadlines.of("weights") == 100.0
    deadlines.round_took(0.1)  # whose turn came first
    deadlines.round_took(3.0)
    assert deadlines.of("weights") == 100.0
    deadlines.round_took(2.0)
    assert deadlines.of("weights") == 6.0  # twice the longest round
    assert deadlines.of("package") == 100.0


def test_a_deadline_is_the_median_and_k_deviations_within_floor_and_ceiling() -> None:
    deadlines = Deadlines(1.0, 100.0, 8.0)
    for _ in range(3):
        deadlines.round_took(0.1)
    for wait in (10.0, 11.0, 12.0, 13.0, 14.0):
        deadlines.seen("package", wait)
    assert deadlines.of("package") == 12.0 + 8 * 1.0
    for _ in range(64):
        deadlines.seen("package", 0.01)
    assert deadlines.of("package") == 1.0
    for _ in range(64):
        deadlines.seen("package", 1000.0)
    assert deadlines.of("package") == 100.0


def test_a_look_after_a_neighbour_begins_when_it_is_later_than_usual_and_is_over_before_the_deadline() -> None:
    deadlines = Deadlines(12.0, 600.0, 8.0, sign_of_life=10.0)
    assert deadlines.look == 3.0  # a quarter of the floor
    assert deadlines.usual("package") == 12.0  # the floor, as long as nothing is known
    for _ in range(3):
        deadlines.round_took(0.1)
    for wait in (10.0, 11.0, 12.0, 13.0, 14.0):
        deadlines.seen("package", wait)
    assert deadlines.usual("package") == 12.0 + 8 * 1.0
    assert deadlines.of("package") == deadlines.usual("package") + 4 * deadlines.look
    assert Deadlines(120.0, 600.0, 8.0, sign_of_life=10.0).look == 10.0


def test_where_rounds_are_long_a_neighbour_that_answers_is_called_a_few_times_a_round() -> None:
    deadlines = Deadlines(12.0, 600.0, 8.0, sign_of_life=10.0)
    assert deadlines.until_next_look(0.0) == deadlines.look == 3.0
    assert deadlines.until_next_look(40.0) == 20.0  # no round is over yet: ever more seldom
    for _ in range(3):
        deadlines.round_took(200.0)
    for _ in range(5):
        deadlines.seen("package", 1.0)
    assert deadlines.usual("package") == 50.0
    assert deadlines.until_next_look(50.0) == 100.0
    hanging = deadlines.usual("package") + deadlines.until_next_look(50.0) + 4 * deadlines.look
    assert hanging < deadlines.of("package")  # one that hangs after it has answered is still left out in time


def test_each_failure_in_a_row_halves_what_a_neighbour_is_granted_and_a_word_of_it_forgives() -> None:
    suspicion = Suspicion(floor=1.0)
    grants = []
    for _ in range(8):
        grants.append(suspicion.granted("a", 40.0))
        suspicion.failed("a")
    assert grants == [40.0, 20.0, 10.0, 5.0, 2.5, 1.25, 1.0, 1.0]
    assert suspicion.suspects("a")
    assert suspicion.granted("b", 40.0) == 40.0
    assert suspicion.granted("a", 0.5) == 0.5  # the floor lengthens nothing
    suspicion.heard("a")
    assert not suspicion.suspects("a")
    assert suspicion.granted("a", 40.0) == 40.0


@given(failures=st.integers(0, 5000), floor=st.floats(0.01, 100), deadline=st.floats(0.01, 1e5))
def test_a_grant_is_never_below_the_floor_or_above_the_deadline(failures: int, floor: float, deadline: float) -> None:
    suspicion = Suspicion(floor)
    for _ in range(failures):
        suspicion.failed("a")
    assert min(floor, deadline) <= suspicion.granted("a", deadline) <= deadline


# Mailbox


def give(mailbox: Mailbox, k: int, stage: str, sender: str, data: bytes = b"x") -> "peer_pb2.Reason":
    reason = mailbox.admits(k, stage, sender)
    if reason == peer_pb2.REASON_NONE:
        asyncio.run(mailbox.put(k, stage, sender, memoryview(data)))
    return reason


def take(mailbox: Mailbox, k: int, stage: str, due: Iterable[str], seconds: float | None = 0.05) -> set[str]:
    return set(asyncio.run(mailbox.take(k, stage, lambda: due, seconds)))


def test_a_mailbox_keeps_a_few_rounds_and_says_why_it_refuses_others() -> None:
    mailbox = Mailbox(ahead=2)
    asyncio.run(mailbox.enter(5))
    assert give(mailbox, 4, "weights", "a") == peer_pb2.REASON_STALE
    assert [give(mailbox, k, "weights", "a") for k in (5, 6, 7)] == [peer_pb2.REASON_NONE] * 3
    assert give(mailbox, 8, "weights", "a") == peer_pb2.REASON_EARLY
    assert give(mailbox, 5, "weights", "a") == peer_pb2.REASON_DUPLICATE
    assert take(mailbox, 5, "weights", ["a"]) == {"a"}
    assert give(mailbox, 5, "weights", "b") == peer_pb2.REASON_STALE  # that stage is over
    assert give(mailbox, 5, "package", "b") == peer_pb2.REASON_NONE
    asyncio.run(mailbox.enter(6))
    assert take(mailbox, 6, "weights", ["a"]) == {"a"}


def test_a_wait_ends_when_everybody_has_come_or_will_not_come_or_time_is_up() -> None:
    async def play() -> None:
        mailbox = Mailbox(ahead=1)
        await mailbox.enter(1)
        due = {"a", "b"}

        async def later() -> None:
            await asyncio.sleep(0.05)
            await mailbox.put(1, "weights", "a", memoryview(b"x"))
            await asyncio.sleep(0.05)
            due.discard("b")
            await mailbox.give_up()

        waits: list[float] = []
        task = asyncio.create_task(later())
        start = time.monotonic()
        found = await mailbox.take(1, "weights", lambda: due, 10.0, waits.append)
        assert set(found) == {"a"}
        assert time.monotonic() - start < 5
        assert len(waits) == 1
        assert waits[0] > 0.03
        await task
        start = time.monotonic()
        assert await mailbox.take(1, "package", lambda: {"a"}, 0.1) == {}
        assert 0.05 < time.monotonic() - start < 5

    asyncio.run(play())


# Member lists


def test_a_list_holds_from_its_round_until_the_next_one_does() -> None:
    roster = Roster(0, TopologySettings("ring", 2, True))
    first = {f"peer-{i}": f"h:{i}" for i in range(5)}
    roster.add(10, 1, first)
    roster.add(11, 6, {**first, "peer-5": "h:5"})
    assert len(roster.members(5)) == 5
    assert len(roster.members(6)) == 6
    assert roster.neighbours("peer-5", 5) == ()
    assert len(roster.neighbours("peer-5", 6)) == 2
    roster.add(9, 1, {})  # older: nothing happens
    assert roster.version == 11
    roster.add(12, 6, {name: a for name, a in first.items() if name != "peer-0"})
    assert roster.members(5) == tuple(sorted(first))
    assert roster.members(7) == ("peer-1", "peer-2", "peer-3", "peer-4")
    assert roster.address("peer-3") == "h:3"


@given(members=st.integers(2, 12), degree=st.integers(1, 11), kind=st.sampled_from(["regular", "cluster", "line"]))
@effort(deadline=None, max_examples=60)
def test_whoever_is_left_has_a_graph_of_the_nearest_degree(members: int, degree: int, kind: str) -> None:
    roster = Roster(0, TopologySettings(kind, degree, True))
    roster.add(1, 1, {f"peer-{i:02d}": "h:1" for i in range(members)})
    for k in (1, 2):
        neighbours = {peer: roster.neighbours(peer, k) for peer in roster.members(k)}
        assert all(neighbours.values())
        assert all(peer in neighbours[other] for peer, others in neighbours.items() for other in others)


def test_the_next_round_of_a_peer_is_the_first_whose_list_has_it() -> None:
    roster = Roster(0, TopologySettings("ring", 2, True))
    first = {f"peer-{i}": f"h:{i}" for i in range(5)}
    roster.add(10, 3, first)
    assert roster.round_with("peer-1", 1) == 3
    assert roster.round_with("peer-1", 7) == 7
    roster.add(11, 6, {name: a for name, a in first.items() if name != "peer-1"})
    roster.add(12, 9, first)
    assert [roster.round_with("peer-1", k) for k in (5, 6, 8, 9, 12)] == [5, 9, 9, 9, 12]
    assert roster.round_with("stranger", 4) == 4


def transport_of(roster: Roster) -> GrpcTransport:
    """That of peer-0 in the run "monday", of a tiny model."""
    layout = ParameterLayout.of(torch.nn.Linear(3, 2))
    codec = PeerCodec(make_terms(load(environment={}), "monday", layout, 2), "peer-0", 0)

    async def compute(work: Callable[..., object], *arguments: object, heavy: bool = False) -> object:
        return work(*arguments)

    network, traffic = NetworkSettings(), Traffic()
    return GrpcTransport("peer-0", codec, roster, network, traffic, compute, Plaintext(), SecuritySettings())


def test_a_message_of_a_member_list_that_is_on_its_way_is_held_until_that_comes() -> None:
    roster = Roster(0, TopologySettings("regular", 2, True))
    members = {f"peer-{i}": f"h:{i}" for i in range(3)}
    roster.add(1, 1, {"peer-0": "h:0", "peer-2": "h:2", "peer-3": "h:3"})
    sent = PeerCodec(transport_of(roster).codec.terms, "peer-1", 0).encode(Weights(torch.zeros(8)), 1, "peer-0")
    envelope = peer_pb2.Envelope(run="monday", round=1, stage="weights", sender="peer-1", members_version=2)

    async def arriving() -> AsyncIterator[bytes]:
        for raw in frames.deliveries(envelope, sent, 2**20):
            yield raw

    async def play() -> None:
        transport = transport_of(roster)
        await transport.enter(1)
        asked: list[int] = []
        transport.reception.on_newer_members = lambda: asked.append(1)
        receiving = asyncio.create_task(transport.reception.receive(arriving(), None, "h:1"))
        await asyncio.sleep(0.3)
        assert not receiving.done()
        assert asked, "the member list is asked for"
        roster.add(2, 1, members)
        receipt = await asyncio.wait_for(receiving, 10)
        assert receipt.reason == peer_pb2.REASON_NONE, receipt
        assert not transport.traffic.refused

    asyncio.run(play())


def test_the_networks_round_is_what_half_of_the_neighbours_have_reached() -> None:
    roster = Roster(0, TopologySettings("regular", 4, True))
    roster.add(1, 1, {f"peer-{i}": f"h:{i}" for i in range(5)})

    async def play() -> None:
        transport = transport_of(roster)
        assert transport.network_round(7) == 7  # nobody has said anything
        transport.life.rounds = {"peer-1": 10**9}
        assert transport.network_round(7) == 7  # one that claims to be far ahead moves nothing
        transport.life.rounds = {"peer-1": 10**9, "peer-2": 12, "peer-3": 11, "peer-4": 6}
        assert transport.network_round(7) == 11
        transport.life.rounds = {f"peer-{i}": 5 for i in range(1, 5)}
        assert transport.network_round(7) == 7

    asyncio.run(play())


# Frames


ENVELOPE = peer_pb2.Envelope(run="r", round=3, stage="weights", sender="peer-000", members_version=7)


@given(pieces=st.lists(st.binary(max_size=400), max_size=5), size=st.integers(1, 300))
@effort(deadline=None, max_examples=200)
def test_frames_are_what_protobuf_would_write_and_read(pieces: list[bytes], size: int) -> None:
    whole = b"".join(pieces)
    joined = b""
    for i, raw in enumerate(frames.deliveries(ENVELOPE, pieces, size)):
        parsed = peer_pb2.Delivery.FromString(raw)
        assert parsed.HasField("envelope") == (i == 0)
        assert (parsed.chunk.total, parsed.chunk.offset) == (len(whole), len(joined))
        frame = frames.read(raw)
        assert (frame.total, frame.offset, bytes(frame.data)) == (len(whole), len(joined), parsed.chunk.data)
        assert frame.envelope == (ENVELOPE if i == 0 else None)
        joined += parsed.chunk.data
    assert joined == whole


@given(st.binary(max_size=200))
@effort(deadline=None, max_examples=500)
def test_any_bytes_are_a_frame_or_one_typed_error(raw: bytes) -> None:
    try:
        frame = frames.read(raw)
    except PackageError:
        return
    try:
        parsed = peer_pb2.Delivery.FromString(raw)
    except DecodeError:
        return  # protobuf is stricter in what it passes over
    if len(set(_numbers(raw))) == len(_numbers(raw)):  # protobuf merges repeated messages; we take the last
        assert bytes(frame.data) == parsed.chunk.data or parsed.chunk == package_pb2.Chunk()


def _numbers(raw: bytes) -> list[int]:
    return [number for number, _ in frames._fields(memoryview(raw))]
