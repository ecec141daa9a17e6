"""What a peer's codec remembers: coded messages, factors sent and held, owed weights, requested weights."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.learning.messages import Message, Package, Weights
from spark_node.package import peer, tensors, writer
from spark_node.package.errors import MissingFactor, PackageError, Refusal
from spark_node.package.format import Terms, block_digest, digest
from spark_node.package.peer import FactorCache, PeerCodec
from spark_node.package.reader import decode
from tests.unit.packages import assert_same, blocks_of, case, header_of, terms_for, vectors

NEIGHBOURS = [f"peer-{i}" for i in range(2, 7)]


def wire(codec: PeerCodec, message: Message, k: int, to: str = "peer-2", *, whole: bool = False) -> bytes:
    return b"".join(codec.encode(message, k, to, whole=whole))


def named(data: bytes) -> list[bytes]:
    return [block.digest for block in header_of(data).blocks if block.named]


@pytest.fixture
def pair() -> tuple[PeerCodec, PeerCodec]:
    """Two neighbours, and a package of 40 samples between them."""
    terms = case("mlp").terms
    return PeerCodec(terms, "peer-1", seed=0), PeerCodec(terms, "peer-2", seed=0)


def packages(rounds: int, samples: int = 40) -> Iterator[tuple[int, Package]]:
    """Packages about the same samples, each with weights of its own and no request."""
    made = case("mlp", "sender", samples=samples).package
    for k in range(rounds):
        logits = made.jacobian.logits + k
        yield k, replace(made, jacobian=replace(made.jacobian, logits=logits))


def test_inputs_travel_once_and_are_named_afterwards(pair: tuple[PeerCodec, PeerCodec]) -> None:
    one, other = pair
    sizes = []
    for k, package in packages(3):
        data = wire(one, package, k)
        assert_same(other.decode(data, k, "peer-1"), package)
        sizes.append(len(data))
        inputs = blocks_of(data, pb.ROLE_INPUTS)
        assert [block.named for block in inputs] == [k > 0, False]
    assert sizes[1] < sizes[0] - 0.8 * 4 * 40 * 36
    assert abs(sizes[1] - sizes[2]) < 50


def test_every_neighbour_gets_the_inputs_once(pair: tuple[PeerCodec, PeerCodec]) -> None:
    one, _ = pair
    for k, package in packages(2):
        assert [bool(named(wire(one, package, k, to))) for to in NEIGHBOURS] == [k > 0] * 5


def test_weights_that_were_encoded_are_ready_for_every_neighbour_of_that_round(
    pair: tuple[PeerCodec, PeerCodec],
) -> None:
    one, _ = pair
    w = case("mlp").w
    weights, request = Weights(w), Weights(w, request=True)
    assert one.ready(weights, 3) is None
    pieces = one.encode(weights, 3, "peer-2")
    assert one.ready(weights, 3) is pieces is one.encode(weights, 3, "peer-3")
    assert one.ready(weights, 4) is None
    assert one.ready(replace(weights), 3) is None  # equal, but another message
    one.encode(request, 3, "peer-2")
    assert one.ready(request, 3) is not None
    assert one.ready(weights, 3) is None  # no longer the last one


def test_a_package_is_never_ready_since_what_is_named_in_it_differs_by_neighbour(
    pair: tuple[PeerCodec, PeerCodec],
) -> None:
    one, _ = pair
    _, package = next(packages(1))
    one.encode(package, 1, "peer-2")
    assert one.ready(package, 1) is None


def test_other_samples_are_sent_in_full(pair: tuple[PeerCodec, PeerCodec]) -> None:
    one, other = pair
    for k in range(3):
        package = case("mlp", "sender", samples=40, seed=k).package
        data = wire(one, package, k)
        assert not named(data)
        assert_same(other.decode(data, k, "peer-1"), package)


def test_a_neighbour_that_lost_the_inputs_asks_and_is_sent_them_whole(pair: tuple[PeerCodec, PeerCodec]) -> None:
    one, other = pair
    (_, first), (k, second) = packages(2)
    wire(one, first, 0)  # never arrives
    data = wire(one, second, k)
    with pytest.raises(MissingFactor) as caught:
        other.decode(data, k, "peer-1")
    assert caught.value.digests == tuple(named(data))
    assert caught.value.refusal is Refusal.MISSING_FACTOR
    whole = wire(one, second, k, whole=True)
    assert not named(whole)
    assert_same(other.decode(whole, k, "peer-1"), second)
    assert_same(other.decode(data, k, "peer-1"), second)


def test_factors_are_held_up_to_the_limit_and_the_oldest_go_first() -> None:
    cache = FactorCache(100)
    for i in range(5):
        cache.put(bytes([i]), (b"x" * 20, b"y" * 10))
        assert cache.size <= 100
    assert [cache.get(bytes([i])) is not None for i in range(5)] == [False, False, True, True, True]
    assert cache.size == 90
    cache.get(bytes([2]))  # used again: 3 is the oldest now
    cache.put(b"new", (b"z" * 30,))
    assert cache.get(bytes([2])) is not None
    assert cache.get(bytes([3])) is None


def test_a_factor_that_is_held_is_not_counted_twice_and_one_above_the_limit_is_not_held() -> None:
    cache = FactorCache(100)
    for _ in range(3):
        cache.put(b"a", (b"x" * 60,))
    assert cache.size == 60
    cache.put(b"b", (b"x" * 101,))
    assert cache.get(b"b") is None
    assert cache.get(b"a") == (b"x" * 60,)


def test_a_held_factor_does_not_hold_the_message_it_came_in() -> None:
    cache, message = FactorCache(100), bytearray(b"x" * 1000)
    cache.put(b"a", (memoryview(message)[:10],))
    message[:10] = b"y" * 10
    assert cache.get(b"a") == (b"x" * 10,)


def test_a_peer_holds_no_more_than_its_cache_allows() -> None:
    sent = {seed: case("mlp", "sender", samples=40, seed=seed).package for seed in range(5)}
    terms = case("mlp", factor_cache_bytes=12_000).terms
    one, other = PeerCodec(terms, "peer-1", seed=0), PeerCodec(terms, "peer-2", seed=0)
    for k, package in sent.items():
        other.decode(wire(one, package, k), k, "peer-1")
        assert other._held.size <= 12_000
    with pytest.raises(MissingFactor):
        other.decode(wire(one, sent[0], 5), 5, "peer-1")
    assert_same(other.decode(wire(one, sent[4], 6), 6, "peer-1"), sent[4])


@pytest.mark.parametrize("refit", [False, True], ids=["old digest", "another digest"])
def test_a_factor_whose_bytes_do_not_match_its_digest_is_refused_and_not_held(
    pair: tuple[PeerCodec, PeerCodec], refit: bool
) -> None:
    one, other = pair
    (_, package), (k, again) = packages(2)
    coded = one._encode_once(package, 0)
    honest = next(block for block in coded.blocks if block.static)
    poisoned = honest.streams[0][:-1] + bytes([honest.streams[0][-1] ^ 1])
    block = pb.Block.FromString(honest.block.SerializeToString())
    if refit:  # the header agrees with itself; only the block's name is not that of its bytes
        block.digest = digest(b"anything")
        assert block_digest(block, (poisoned,)) != block.digest
    swapped = tuple(writer.CodedBlock(block, (poisoned,), static=True) if b is honest else b for b in coded.blocks)
    with pytest.raises(PackageError) as caught:
        other.decode(b"".join(writer.CodedMessage(coded.header, swapped).wire()), 0, "peer-1")
    assert caught.value.refusal is Refusal.CHECKSUM
    assert other._held.size == 0
    wire(one, package, 0)
    with pytest.raises(MissingFactor):
        other.decode(wire(one, again, k), k, "peer-1")


def test_nothing_of_a_message_that_is_refused_is_held(pair: tuple[PeerCodec, PeerCodec]) -> None:
    one, other = pair
    (_, package), _ = packages(2)
    data = wire(one, package, 0)
    with pytest.raises(PackageError) as caught:
        other.decode(data, 1, "peer-1")
    assert caught.value.refusal is Refusal.WRONG_ROUND
    with pytest.raises(PackageError) as caught:
        other.decode(data, 0, "peer-3")
    assert caught.value.refusal is Refusal.WRONG_SENDER
    assert other._held.size == 0


def test_a_message_to_five_neighbours_is_coded_once(
    pair: tuple[PeerCodec, PeerCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    calls: list[Message] = []

    def counted(message: Message, *arguments: Any, **more: Any) -> writer.CodedMessage:
        calls.append(message)
        return writer.encode(message, *arguments, **more)

    monkeypatch.setattr(peer, "encode", counted)
    (_, package), (k, another) = packages(2)
    assert len({wire(one, package, 0, to) for to in NEIGHBOURS}) == 1
    assert len(calls) == 1
    wire(one, another, k)
    assert calls == [package, another]


def test_threads_that_share_a_codec_send_one_coding() -> None:
    terms = terms_for("deep-mlp", weights="int8", rounding="stochastic")
    codec, message = PeerCodec(terms, "peer-1", seed=0), Weights(vectors(terms.layout.size))
    with ThreadPoolExecutor(5) as pool:
        sent = list(pool.map(lambda to: wire(codec, message, 0, to), NEIGHBOURS))
    assert len(set(sent)) == 1


def test_inputs_are_coded_once_for_all_rounds(
    pair: tuple[PeerCodec, PeerCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    shapes: list[tuple[int, ...]] = []
    original = tensors.encode

    def counted(values: np.ndarray[Any, Any], *arguments: Any) -> tensors.Coded:
        shapes.append(values.shape)
        return original(values, *arguments)

    monkeypatch.setattr(tensors, "encode", counted)
    for k, package in packages(3):
        wire(one, package, k)
    assert shapes.count((40, 1, 36)) == 1
    assert shapes.count((40, 1, 7)) == 3


def test_inputs_that_were_written_to_are_another_factor() -> None:
    """Their digest is taken once for as long as their memory is the same and nobody writes to it."""
    codec, x = PeerCodec(terms_for("deep-mlp"), "peer-1", seed=0), torch.rand(40, 1, 36)
    first = codec._name(x)
    assert codec._name(x.view(40, 1, 36)) == first
    assert codec._name(x.clone()) == first
    x[3, 0, 5] += 1
    assert codec._name(x) != first
    with torch.inference_mode():
        untracked = x * 2
    written = codec._name(untracked)
    with torch.inference_mode():
        untracked.mul_(2)
    assert codec._name(untracked) != written


def sent_over(terms: Terms, w: Tensor, rounds: int, *, feedback: bool) -> Tensor:
    """The mean of what a neighbour decodes of the same weights in many rounds."""
    codec = PeerCodec(terms, "peer-1", seed=0)
    total = torch.zeros_like(w, dtype=torch.float64)
    for k in range(rounds):
        if not feedback:
            codec.feedback.clear()
        found = decode(wire(codec, Weights(w), k), terms).message
        assert isinstance(found, Weights)
        total += found.w
    return (total / rounds).float()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_int8_weights_lose_is_made_good_in_later_rounds(rounding: str) -> None:
    terms = terms_for("deep-mlp", weights="int8", rounding=rounding)
    w = vectors(terms.layout.size)
    step = float(w.abs().max()) / 127
    without = (sent_over(terms, w, 50, feedback=False) - w).abs().max()
    owed = (sent_over(terms, w, 50, feedback=True) - w).abs().max()
    assert float(owed) < 1.5 * step / 50
    assert float(owed) < 0.2 * float(without)


def test_velocity_has_a_debt_of_its_own() -> None:
    terms = terms_for("mlp", weights="int8")
    codec = PeerCodec(terms, "peer-1", seed=0)
    w, v = vectors(terms.layout.size), vectors(terms.layout.size, 1, scale=10.0)
    total = torch.zeros_like(v)
    for k in range(20):
        found = decode(wire(codec, Weights(w, v), k), terms).message
        assert isinstance(found, Weights)
        assert found.v is not None
        total += found.v
    step = float(v.abs().max()) / 127
    assert float((total / 20 - v).abs().max()) < 1.5 * step / 20
    assert float(codec.feedback["v"].abs().max()) > 10 * float(codec.feedback["w"].abs().max())


def test_a_request_is_sent_as_it_is_and_what_arrives_is_remembered() -> None:
    terms = terms_for("mlp", weights="int8")
    codec = PeerCodec(terms, "peer-1", seed=0)
    w = vectors(terms.layout.size)
    wire(codec, Weights(w), 0)
    owed = {name: debt.clone() for name, debt in codec.feedback.items()}
    data = wire(codec, Weights(w, request=True), 0)
    assert {name: torch.equal(codec.feedback[name], debt) for name, debt in owed.items()} == {"w": True}
    found = decode(data, terms).message
    assert isinstance(found, Weights)
    assert torch.equal(codec._asked[0], found.w)
    plain = PeerCodec(terms, "peer-1", seed=0)
    assert wire(plain, Weights(w, request=True), 0) == data


@pytest.mark.parametrize("weights", ["lossless", "bf16", "int8"])
def test_a_package_at_requested_weights_is_read_without_them(weights: str) -> None:
    made = case("deep-mlp", weights=weights)
    asker, asked = PeerCodec(made.terms, "peer-1", seed=0), PeerCodec(made.terms, "peer-2", seed=0)
    request = asked.decode(wire(asker, Weights(made.w, request=True), 4), 4, "peer-1")
    assert isinstance(request, Weights)
    data = wire(asked, replace(made.package, at=request.w), 4, "peer-1")
    assert not blocks_of(data, pb.ROLE_WEIGHT_ABOVE)
    found = asker.decode(data, 4, "peer-2")
    assert isinstance(found, Package)
    assert found.at is not None
    assert torch.equal(found.at, request.w)
    late = wire(asked, replace(made.package, at=request.w), 5, "peer-1")
    with pytest.raises(PackageError, match="neither sent nor known"):
        asker.decode(late, 5, "peer-2")


def test_requests_of_old_rounds_are_forgotten() -> None:
    terms = terms_for("mlp")
    codec = PeerCodec(terms, "peer-1", seed=0)
    for k in range(6):
        wire(codec, Weights(vectors(terms.layout.size, k), request=True), k)
    assert list(codec._asked) == [4, 5]


def test_stochastic_rounding_depends_on_seed_peer_and_round_alone() -> None:
    made = case("mlp", "sender", bits=3, rounding="stochastic")

    def coded(seed: int, name: str, k: int) -> tuple[bytes, ...]:
        found = PeerCodec(made.terms, name, seed)._encode_once(made.package, k)
        return tuple(stream for block in found.blocks for stream in block.streams)

    assert coded(0, "peer-1", 3) == coded(0, "peer-1", 3)
    others = [coded(1, "peer-1", 3), coded(0, "peer-2", 3), coded(0, "peer-1", 4)]
    assert len({coded(0, "peer-1", 3), *others}) == 4


def test_factors_sent_are_remembered_for_a_bounded_number_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_SENT", 3)
    codec = PeerCodec(case("mlp").terms, "peer-1", seed=0)
    (_, first), (k, second) = packages(2)
    for to in NEIGHBOURS:
        wire(codec, first, 0, to)
    assert len(codec._sent) == 3
    assert [bool(named(wire(codec, second, k, to))) for to in reversed(NEIGHBOURS)] == [True] * 3 + [False] * 2
