"""Reading is total: whatever the bytes, a message or the right refusal comes out, and little memory is taken."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.package_fuzz import (
    BOUND,
    BYTES,
    LIMIT,
    MEANINGS,
    Example,
    Opened,
    Tally,
    examples,
    frame,
    mutate,
    plain_bytes,
    read,
    rebuild,
    use,
)
from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.learning.messages import Package, Weights
from spark_node.package.chunks import Assembly, split
from spark_node.package.errors import MissingFactor, PackageError, Refusal
from spark_node.package.format import MAGIC, PREFIX, digest
from tests.unit.packages import grows_by_less_than

KNOWN = {example.name: example for example in examples()}
ALL = list(KNOWN.values())
PACKAGES = [name for name, example in KNOWN.items() if example.own is not None]
FLOATS = {  # the stream of numbers as they are, by coding
    pb.CODING_FLOAT32: 0,
    pb.CODING_PALETTE: 0,
    pb.CODING_QUANTISED: 0,
    pb.CODING_SPARSE: 1,
}


def opened(name: str) -> Opened:
    found = Opened.of(KNOWN[name].data)
    assert found is not None
    return found


def refusal(example: Example, data: bytes) -> Refusal:
    with pytest.raises(PackageError) as caught:
        read(example, data)
    return caught.value.refusal


def peak(example: Example, data: bytes) -> int:
    """Bytes allocated at once while a message is read, whatever comes out."""
    tracemalloc.start()
    try:
        read(example, data)
    except PackageError:
        pass
    finally:
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_the_examples_are_messages_and_survive_being_opened(name: str) -> None:
    use(KNOWN[name], read(KNOWN[name], KNOWN[name].data))
    assert opened(name).sealed() == KNOWN[name].data


@given(st.integers(0, 2**64), st.sampled_from(ALL))
@settings(max_examples=160, deadline=None)
def test_mutated_messages_end_in_a_usable_message_or_a_refusal(seed: int, example: Example) -> None:
    rng, tally, data = Random(seed), Tally(traced=False), example.data
    for i in range(12):
        mutated = mutate(data, rng, example, ALL)
        tally.judge(example, mutated)
        data = example.data if i % 3 == 2 else mutated  # mutations pile up three deep
    assert not tally.crashes


@pytest.mark.parametrize("way", [*BYTES, *dict.fromkeys(MEANINGS)], ids=lambda way: way.__name__)
def test_each_mutation_is_survived_by_every_example(way: Callable[..., Any]) -> None:
    rng, tally = Random(1), Tally(traced=False)
    for example in 4 * ALL:
        found = Opened.of(example.data)
        assert found is not None
        if way in BYTES:
            tally.judge(example, way(example.data, rng, ALL))
        else:
            way(found, rng, example, ALL)
            tally.judge(example, found.sealed())
    assert not tally.crashes
    assert tally.outcomes.total() - tally.outcomes["message"] > len(ALL)


@given(data=st.binary(max_size=300), example=st.sampled_from(ALL))
@settings(deadline=None)
def test_arbitrary_bytes_are_malformed(data: bytes, example: Example) -> None:
    assert refusal(example, data) is Refusal.MALFORMED


@given(text=st.binary(max_size=200), payload=st.binary(max_size=50), example=st.sampled_from(ALL))
@settings(deadline=None)
def test_an_arbitrary_header_with_the_right_digest_is_refused(text: bytes, payload: bytes, example: Example) -> None:
    data = PREFIX.pack(MAGIC, len(text)) + text + digest(text) + payload
    assert refusal(example, data) in (Refusal.MALFORMED, Refusal.UNSUPPORTED_FORMAT)


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), example=st.sampled_from(ALL))
@settings(max_examples=200, deadline=None)
def test_a_message_with_one_wrong_bit_is_refused(place: int, bit: int, example: Example) -> None:
    data = bytearray(example.data)
    place %= len(data)
    data[place] ^= 1 << bit
    expected = {Refusal.MALFORMED} if place < PREFIX.size else {Refusal.CHECKSUM}
    if 4 <= place < PREFIX.size:  # the header's length
        expected.add(Refusal.CHECKSUM)
    assert refusal(example, bytes(data)) in expected


@pytest.mark.parametrize("name", KNOWN)
def test_every_part_of_a_message_is_refused(name: str) -> None:
    data = KNOWN[name].data
    for size in range(0, len(data), 13):
        assert refusal(KNOWN[name], data[:size]) in (Refusal.MALFORMED, Refusal.CHECKSUM)
    assert refusal(KNOWN[name], data + b"\0") is Refusal.MALFORMED


HEADERS: dict[str, tuple[dict[str, Any], Refusal]] = {
    "format": ({"format": 2}, Refusal.UNSUPPORTED_FORMAT),
    "format-0": ({"format": 0}, Refusal.UNSUPPORTED_FORMAT),
    "run": ({"run": "another"}, Refusal.WRONG_RUN),
    "round": ({"round": 4}, Refusal.WRONG_ROUND),
    "round-2^63": ({"round": 2**63}, Refusal.WRONG_ROUND),
    "sender": ({"sender": "peer-2"}, Refusal.WRONG_SENDER),
    "kind": ({"kind": 0}, Refusal.WRONG_KIND),
    "kind-99": ({"kind": 99}, Refusal.WRONG_KIND),
    "weights": ({"kind": pb.KIND_WEIGHTS}, Refusal.MALFORMED),
    "signature": ({"signature": "0" * 32}, Refusal.WRONG_SIGNATURE),
    "classes": ({"classes": 4}, Refusal.WRONG_SIGNATURE),
    "classes-2^40": ({"classes": 2**40}, Refusal.WRONG_SIGNATURE),
    "no-samples": ({"samples": 0}, Refusal.MALFORMED),
    "samples": ({"samples": 6}, Refusal.MALFORMED),
    "samples-2^18": ({"samples": 2**18 + 1}, Refusal.TOO_LARGE),
    "samples-2^63": ({"samples": 2**63}, Refusal.MALFORMED),
}


@pytest.mark.parametrize("change", HEADERS)
def test_a_header_that_disagrees_is_refused_for_what_it_says(change: str) -> None:
    values, expected = HEADERS[change]
    found = opened("receiver")
    for field, value in values.items():
        setattr(found.header, field, value)
    assert refusal(KNOWN["receiver"], found.sealed()) is expected


@pytest.mark.parametrize(
    ("field", "value"), [("projection", "flat"), ("sketch", "hadamard"), ("sketch_size", 5), ("fresh_sketch", True)]
)
def test_a_package_of_another_projection_is_refused(field: str, value: Any) -> None:
    found = opened("axis")
    setattr(found.header.specification, field, value)
    assert refusal(KNOWN["axis"], found.sealed()) is Refusal.WRONG_SPECIFICATION
    found.header.ClearField("specification")
    assert refusal(KNOWN["axis"], found.sealed()) is Refusal.WRONG_SPECIFICATION


def test_a_package_that_another_peer_compressed_more_is_read() -> None:
    found = opened("receiver")
    found.header.specification.bits, found.header.specification.keep = 3, 0.1
    assert isinstance(read(KNOWN["receiver"], found.sealed()), Package)


@pytest.mark.parametrize("name", ["request", "receiver", "dense-sparse"])
def test_damage_that_the_digests_show_is_a_wrong_checksum(name: str) -> None:
    data = bytearray(KNOWN[name].data)
    data[-1] ^= 1
    assert refusal(KNOWN[name], bytes(data)) is Refusal.CHECKSUM
    data = bytearray(KNOWN[name].data)
    data[PREFIX.size + 1] ^= 1
    assert refusal(KNOWN[name], bytes(data)) is Refusal.CHECKSUM


def test_a_message_above_the_limit_of_bytes_is_too_large() -> None:
    example = KNOWN["convolution"]
    tight = replace(example.terms, settings=replace(example.terms.settings, max_message_bytes=len(example.data) - 1))
    assert refusal(replace(example, terms=tight), example.data) is Refusal.TOO_LARGE


@pytest.mark.parametrize("named", [b"", b"x", b"\0" * 16], ids=["empty", "short", "zeros"])
def test_a_block_that_is_named_and_not_held_is_missing(named: bytes) -> None:
    found = opened("receiver")
    block = next(block for block in found.header.blocks if block.role == pb.ROLE_INPUTS)
    block.named, block.digest = True, named
    with pytest.raises(MissingFactor) as caught:
        read(KNOWN["receiver"], found.sealed())
    assert caught.value.refusal is Refusal.MISSING_FACTOR
    assert caught.value.digests == (named,)


def test_a_named_block_of_another_description_is_refused() -> None:
    found = opened("named")
    block = next(block for block in found.header.blocks if block.named)
    block.shape[0], block.shape[2] = block.shape[2], block.shape[0]
    assert refusal(KNOWN["named"], found.sealed()) is Refusal.CHECKSUM
    block.streams[0].bytes += 1
    assert refusal(KNOWN["named"], found.sealed()) is Refusal.MALFORMED


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [name for name in KNOWN if name not in ("weights-bf16", "named")])
def test_numbers_that_are_not_finite_are_refused_wherever_they_stand(name: str, bad: float) -> None:
    tried = 0
    for i, block in enumerate(opened(name).header.blocks):
        if block.coding in FLOATS:
            found, place = opened(name), (i, FLOATS[block.coding])
            count = plain_bytes(block.streams[place[1]], found.streams[i][place[1]]) // 4
            values = np.zeros(count, "<f4")
            values[count // 2 :] = bad
            found.replace(place, values.tobytes(), layout=pb.LAYOUT_PLAIN, zstd=False)
            found_nothing = block.coding in (pb.CODING_QUANTISED, pb.CODING_SPARSE) and count == 0
            assert found_nothing or refusal(KNOWN[name], found.sealed()) is Refusal.NOT_FINITE
            tried += 1
    assert tried


def test_scales_that_overflow_are_not_finite() -> None:
    found = opened("weights-int8")
    found.replace((0, 0), np.float32(3e38).tobytes(), layout=pb.LAYOUT_PLAIN, zstd=False)
    assert refusal(KNOWN["weights-int8"], found.sealed()) is Refusal.NOT_FINITE


@pytest.mark.parametrize("label", [3, 255])
def test_labels_beyond_the_classes_are_refused(label: int) -> None:
    found = opened("receiver")
    found.replace((0, 0), bytes([0, 1, 2, label, 0]), layout=pb.LAYOUT_PLAIN, zstd=False)
    assert refusal(KNOWN["receiver"], found.sealed()) is Refusal.MALFORMED


def test_a_pattern_that_disagrees_with_its_count_is_refused() -> None:
    found = opened("dense-sparse")
    assert found.header.blocks[2].pattern == pb.PATTERN_BITMAP
    size = (int(np.prod(found.header.blocks[2].shape)) + 7) // 8
    for pattern in (bytes(size), b"\xff" * size, b"\x01" * size):
        found.replace((2, 0), pattern, layout=pb.LAYOUT_PLAIN, zstd=False)
        assert refusal(KNOWN["dense-sparse"], found.sealed()) is Refusal.MALFORMED


SHAPES = [[], [0], [1], [2**40], [2**63, 2], [5, 2**40], [2**64 - 1] * 3]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["weights", "receiver", "convolution", "axis", "dense-sparse", "masks"])
def test_blocks_of_other_shapes_are_malformed(name: str, shape: list[int]) -> None:
    for i in range(len(opened(name).header.blocks)):
        found = opened(name)
        del found.header.blocks[i].shape[:]
        found.header.blocks[i].shape.extend(shape)
        assert refusal(KNOWN[name], found.sealed()) is Refusal.MALFORMED


@pytest.mark.parametrize("value", [0, 1, 17, 255, 2**32 - 1])
@pytest.mark.parametrize("name", ["weights-int8", "pixels", "normed", "dense-sparse"])
def test_another_number_of_bits_is_malformed(name: str, value: int) -> None:
    for i, block in enumerate(opened(name).header.blocks):
        if block.bits:
            found = opened(name)
            found.header.blocks[i].bits = value
            assert refusal(KNOWN[name], found.sealed()) is Refusal.MALFORMED


@pytest.mark.parametrize("value", [2**20, 2**40, 2**64 - 1])
@pytest.mark.parametrize("field", ["kept", "group"])
@pytest.mark.parametrize("name", ["pixels", "dense-sparse", "dense-rare"])
def test_counts_beyond_the_block_are_never_believed(name: str, field: str, value: int) -> None:
    for i, block in enumerate(opened(name).header.blocks):
        found = opened(name)
        setattr(found.header.blocks[i], field, value)
        assert peak(KNOWN[name], found.sealed()) < 2**19
        if field == "kept" and block.coding in (pb.CODING_PALETTE, pb.CODING_SPARSE):
            assert refusal(KNOWN[name], found.sealed()) is Refusal.MALFORMED


@pytest.mark.parametrize("name", ["weights", "chain", "convolution-5-bit", "normed"])
def test_planes_that_do_not_add_up_are_malformed(name: str) -> None:
    tried = 0
    for i, block in enumerate(opened(name).header.blocks):
        for j, stream in enumerate(block.streams):
            for planes in ([], [2**40] * len(stream.planes), list(stream.planes)[:-1], [0, *stream.planes]):
                if stream.planes:
                    found = opened(name)
                    del found.header.blocks[i].streams[j].planes[:]
                    found.header.blocks[i].streams[j].planes.extend(planes)
                    assert refusal(KNOWN[name], found.sealed()) is Refusal.MALFORMED
                    tried += 1
    assert tried


def test_streams_that_claim_more_than_there_is_are_malformed() -> None:
    for claim in (2**40, 2**64 - 1):
        found = opened("receiver")
        found.header.blocks[1].streams[0].bytes = claim
        assert refusal(KNOWN["receiver"], found.sealed(sizes=False)) is Refusal.MALFORMED


def reordered_layers(found: Opened, way: str) -> None:
    """Layers of the model merged, split, exchanged, renamed or of another form."""
    first, second = found.header.layers
    if way == "merged":
        first.parameters.extend(second.parameters)
        first.form = pb.FORM_DENSE
        del found.header.layers[1]
    elif way == "split":
        found.header.layers.add(name=second.name, form=pb.FORM_DENSE, parameters=second.parameters[1:])
        del second.parameters[1:]
        second.form = pb.FORM_DENSE
    elif way == "swapped":
        kept = pb.Layer.FromString(first.SerializeToString())
        first.CopyFrom(second)
        second.CopyFrom(kept)
    elif way == "renamed":
        first.name = "other"
    elif way == "doubled":
        found.header.layers.add().CopyFrom(second)
    elif way == "missing":
        del found.header.layers[0]
    elif way == "none":
        del found.header.layers[:]
    elif way == "parameters":
        del first.parameters[:]
    elif way == "form":
        first.form = pb.FORM_UNSPECIFIED
    elif way == "chain through positions":
        first.positions = 4
    elif way == "positions of the layer above":
        second.signals, second.positions = pb.SIGNALS_EXPLICIT, 2
    elif way == "no positions":
        first.positions = 0
    elif way == "identity below":
        first.signals = pb.SIGNALS_IDENTITY
    elif way == "chain without end":
        second.signals = pb.SIGNALS_CHAINED
    elif way == "signals":
        second.signals = pb.SIGNALS_UNSPECIFIED


LAYERS = [
    "merged", "split", "swapped", "renamed", "doubled", "missing", "none", "parameters", "form",
    "chain through positions", "positions of the layer above", "no positions", "identity below", "chain without end",
    "signals",
]  # fmt: skip


@pytest.mark.parametrize("way", LAYERS)
@pytest.mark.parametrize("name", ["receiver", "sender", "masks"])
def test_layers_that_are_not_the_models_are_malformed_even_with_blocks_to_match(name: str, way: str) -> None:
    for seed in range(5):
        found = opened(name)
        rebuild(found, Random(seed), KNOWN[name])
        assert isinstance(read(KNOWN[name], found.sealed()), Package)
        reordered_layers(found, way)
        rebuild(found, Random(seed), KNOWN[name])
        assert refusal(KNOWN[name], found.sealed()) is Refusal.MALFORMED


@pytest.mark.parametrize("name", PACKAGES)
def test_blocks_that_are_missing_doubled_or_exchanged_are_malformed(name: str) -> None:
    count = len(opened(name).header.blocks)
    for i in range(count):
        missing, doubled, exchanged = opened(name), opened(name), opened(name)
        del missing.header.blocks[i], missing.streams[i]
        doubled.header.blocks.add().CopyFrom(doubled.header.blocks[i])
        doubled.streams.append(list(doubled.streams[i]))
        j = (i + 1) % count
        kept = pb.Block.FromString(exchanged.header.blocks[i].SerializeToString())
        exchanged.header.blocks[i].CopyFrom(exchanged.header.blocks[j])
        exchanged.header.blocks[j].CopyFrom(kept)
        exchanged.streams[i], exchanged.streams[j] = exchanged.streams[j], exchanged.streams[i]
        for found in (missing, doubled, exchanged):
            assert refusal(KNOWN[name], found.sealed()) is Refusal.MALFORMED


BOMBS: dict[str, Callable[[int], bytes]] = {
    "declares-1-GB": lambda plain: frame(2**30, 2**30),
    "declares-nothing": lambda plain: frame(None, 2**30),
    "declares-what-is-due": lambda plain: frame(plain, 2**30),
    "window-of-128-MB": lambda plain: frame(plain, plain + 1, 27),
    "window-of-2-GB": lambda plain: frame(plain, plain + 1, 31),
    "ends-early": lambda plain: frame(plain, plain - 1),
    "skippable": lambda plain: b"\x50\x2a\x4d\x18" + (2**30).to_bytes(4, "little"),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", ["weights", "pixels", "convolution-5-bit", "dense-sparse", "masks"])
def test_compressed_streams_that_expand_beyond_what_is_due_are_malformed(name: str, bomb: str) -> None:
    places = [(i, j) for i, streams in enumerate(opened(name).streams) for j in range(len(streams))]
    with grows_by_less_than(2**26):
        for i, j in places:
            found = opened(name)
            described = found.header.blocks[i].streams[j]
            plain = plain_bytes(described, found.streams[i][j])
            if described.layout == pb.LAYOUT_PLANES:
                described.layout = pb.LAYOUT_PLAIN
            found.replace((i, j), BOMBS[bomb](plain), layout=described.layout, zstd=True)
            sealed = found.sealed()
            assert refusal(KNOWN[name], sealed) is Refusal.MALFORMED
            assert peak(KNOWN[name], sealed) < 2**19


@pytest.mark.parametrize("many", [2**18, 2**20 + 1, 2**31, 2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "named"])
def test_samples_that_would_pass_the_limit_are_refused_before_memory_is_taken(name: str, many: int) -> None:
    found = opened(name)
    for block in found.header.blocks:
        if block.shape[0] == found.header.samples:
            block.shape[0] = many
    found.header.samples = many
    sealed = found.sealed()
    assert refusal(KNOWN[name], sealed) in (Refusal.TOO_LARGE, Refusal.MALFORMED)
    assert peak(KNOWN[name], sealed) < LIMIT


@pytest.mark.parametrize("many", [2**18, 2**40, 2**63])
@pytest.mark.parametrize("name", ["convolution", "normed"])
def test_positions_that_would_pass_the_limit_are_too_large(name: str, many: int) -> None:
    found = opened(name)
    found.header.layers[0].positions = many
    found.header.blocks[2].shape[1] = many
    sealed = found.sealed()
    assert refusal(KNOWN[name], sealed) is Refusal.TOO_LARGE
    assert peak(KNOWN[name], sealed) < LIMIT


@pytest.mark.parametrize("name", ["sender", "axis", "flat", "dense-sparse", "convolution-5-bit"])
def test_a_message_just_below_the_limit_takes_a_small_multiple_of_it(name: str) -> None:
    example = KNOWN[name]
    for seed in range(12):
        found = opened(name)
        each = sum(int(np.prod(b.shape[1:])) for b in found.header.blocks if b.shape[0] == found.header.samples)
        found.header.samples = LIMIT // (4 * each) - 8
        rebuild(found, Random(seed), example)
        sealed = found.sealed()
        assert peak(example, sealed) < BOUND
        assert isinstance(read(example, sealed), Package)


def test_headers_of_nothing_but_blocks_or_streams_take_little() -> None:
    crowded, wide = pb.Header(), opened("receiver").header
    crowded.CopyFrom(wide)
    crowded.blocks.extend(pb.Block(named=True) for _ in range(12_000))
    wide.blocks[0].streams.extend(pb.Stream() for _ in range(20_000))
    for header in (crowded, wide):
        text = header.SerializeToString()
        data = PREFIX.pack(MAGIC, len(text)) + text + digest(text)
        assert peak(KNOWN["receiver"], data) < 8 * LIMIT
        assert refusal(KNOWN["receiver"], data) in (Refusal.MISSING_FACTOR, Refusal.CHECKSUM, Refusal.MALFORMED)
    crowded.blocks.extend(pb.Block(named=True) for _ in range(12_000))
    text = crowded.SerializeToString()
    assert refusal(KNOWN["receiver"], PREFIX.pack(MAGIC, len(text)) + text + digest(text)) is Refusal.MALFORMED


@given(st.data(), st.sampled_from(ALL), st.integers(100, 900))
@settings(max_examples=60, deadline=None)
def test_chunks_in_any_order_give_the_message_or_a_refusal(data: st.DataObject, example: Example, size: int) -> None:
    chunks = list(split([example.data], size))
    order = data.draw(st.permutations(range(len(chunks)))) if data.draw(st.booleans()) else range(len(chunks))
    chosen = [chunks[i] for i in order][: data.draw(st.integers(0, len(chunks)))]
    assembly = Assembly(2**20)

    def assembled() -> bytes:
        for chunk in chosen:
            assembly.add(chunk)
        return bytes(assembly.finish())

    if chosen == chunks:
        assert assembled() == example.data
    else:
        with pytest.raises(PackageError) as caught:
            assembled()
        assert caught.value.refusal is Refusal.MALFORMED


def test_weights_with_a_block_too_many_or_of_another_size_are_malformed() -> None:
    assert isinstance(read(KNOWN["weights"], KNOWN["weights"].data), Weights)
    found = opened("weights")
    found.header.blocks.add().CopyFrom(found.header.blocks[1])
    found.streams.append(list(found.streams[1]))
    assert refusal(KNOWN["weights"], found.sealed()) is Refusal.MALFORMED
    assert refusal(replace(KNOWN["chain"], data=b""), KNOWN["weights"].data) is Refusal.WRONG_SIGNATURE
