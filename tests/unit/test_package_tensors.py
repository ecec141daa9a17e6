"""Single tensors: lossless codings give back every bit, the others keep to their error, and damage is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.package import streams, tensors
from spark_node.package.errors import PackageError, Refusal
from spark_node.package.quantize import Floats
from spark_node.package.tensors import Coded, Coding

LEVELS = [0, 1, 6]


def through(values: Floats, coding: Coding, rows: int = 1, level: int = 1, seed: int | None = None) -> Floats:
    """Encoded and decoded."""
    random = None if seed is None else np.random.default_rng(seed)
    return decoded(tensors.encode(values, coding, rows, level, random), values.shape, rows)


def decoded(coded: Coded, shape: tuple[int, ...], rows: int = 1) -> Floats:
    return tensors.decode(coded.block, [part.data for part in coded.parts], shape, rows)


def size(coded: Coded) -> int:
    return sum(len(part.data) for part in coded.parts)


def assert_same_bits(found: Floats, expected: Floats) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
special = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, -3.4028235e38, 1.0])


@given(st.lists(finite | special, max_size=60), st.sampled_from(LEVELS))
@settings(deadline=None)
def test_lossless_numbers_come_back_bit_for_bit(entries: list[float], level: int) -> None:
    values = np.array(entries, np.float32)
    assert_same_bits(through(values, Coding(), level=level), values)


@pytest.mark.filterwarnings("error")
@given(
    distinct=st.lists(finite | special, min_size=1, max_size=300),
    count=st.integers(1000, 6000),
    zeros=st.floats(0, 1),
    level=st.sampled_from(LEVELS),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_many_numbers_of_few_values_or_many_zeros_come_back_bit_for_bit(
    distinct: list[float], count: int, zeros: float, level: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    values = random.choice(np.array(distinct, np.float32), count)
    values[random.random(count) < zeros] = 0
    assert_same_bits(through(values, Coding(), level=level), values)


def test_every_lossless_coding_is_used_where_it_is_the_smallest() -> None:
    random = np.random.default_rng(0)
    noise = random.standard_normal(50_000, np.float32)
    half = np.where(random.random(50_000) < 0.5, noise, 0).astype(np.float32)
    rare = np.where(random.random(50_000) < 0.01, noise, 0).astype(np.float32)
    few = random.choice(noise[:100], 50_000)
    chosen = [tensors.encode(v, Coding(), 1, 1).block for v in (noise, half, rare, few)]
    assert [b.coding for b in chosen] == [pb.CODING_FLOAT32, pb.CODING_SPARSE, pb.CODING_SPARSE, pb.CODING_PALETTE]
    assert [b.pattern for b in chosen[1:3]] == [pb.PATTERN_BITMAP, pb.PATTERN_GAPS]
    for values in (noise, half, rare, few):
        coded = tensors.encode(values, Coding(), 1, 1)
        assert_same_bits(decoded(coded, values.shape), values)
        assert size(coded) < values.nbytes


def test_the_rows_of_a_large_tensor_come_back_in_their_shape() -> None:
    values = np.random.default_rng(1).standard_normal((50, 3, 700), np.float32)
    found = through(values, Coding(), rows=150)
    assert found.shape == values.shape
    assert_same_bits(found, values)


def standardised(pixels: NDArray[np.uint8], mean: float, deviation: float) -> Floats:
    return (pixels.astype(np.float32) / np.float32(255) - np.float32(mean)) / np.float32(deviation)


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (0.2860, 0.3530), (0.1307, 0.3081), (0.5, 1e-3)])
def test_standardised_pixels_are_found_to_be_bytes(mean: float, deviation: float) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (40, 784), dtype=np.uint8)
    values = standardised(pixels, mean, deviation)
    coded = tensors.encode(values, Coding(), 40, 1)
    assert coded.block.coding == pb.CODING_PALETTE
    assert size(coded) < pixels.nbytes + 4 * 256 + 100
    assert_same_bits(decoded(coded, values.shape, 40), values)


@pytest.mark.parametrize("spacing", ["gamma", "two scales", "random", "one value"])
def test_palettes_need_not_be_evenly_spaced(spacing: str) -> None:
    random = np.random.default_rng(3)
    grid = np.arange(256) / 255
    table = {
        "gamma": grid**2.2,
        "two scales": np.concatenate([grid[:128], 1e6 * grid[128:]]),
        "random": random.standard_normal(200),
        "one value": np.array([0.3]),
    }[spacing].astype(np.float32)
    values = random.choice(table, (30, 100))
    coded = tensors.encode(values, Coding(), 30, 1)
    assert coded.block.coding == pb.CODING_PALETTE
    assert_same_bits(decoded(coded, values.shape, 30), values)


def test_a_value_that_a_sample_of_the_tensor_lacks_joins_the_palette() -> None:
    values = np.zeros(100_000, np.float32) + np.random.default_rng(4).choice([0, 1, 2], 100_000).astype(np.float32)
    values[[7, 50_001]] = [0.25, -9.5]
    coded = tensors.encode(values, Coding(), 1, 1)
    assert coded.block.coding == pb.CODING_PALETTE
    assert coded.block.kept == 5
    assert_same_bits(decoded(coded, values.shape), values)


def test_bfloat16_is_what_torch_makes_of_a_number() -> None:
    random = np.random.default_rng(5)
    words = random.integers(0, 2**32, 20_000, dtype=np.uint32)
    ties = (words[:2000] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    values = np.concatenate([words, ties, np.array([0, 0x80000000, 1, 0x7FFF], np.uint32)]).view(np.float32)
    values = values[np.abs(values) < 3.3e38]
    found = through(values, Coding(bfloat16=True))
    assert_same_bits(found, torch.from_numpy(values).to(torch.bfloat16).float().numpy())


@pytest.mark.parametrize("group", [0, 50])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [2, 5, 8, 11, 16])
def test_quantised_numbers_keep_to_half_a_step(bits: int, level: int, affine: bool, group: int) -> None:
    values = np.random.default_rng(6).standard_normal((30, 70), np.float32)
    found = through(values, Coding(bits=bits, affine=affine, group=group), rows=30, level=level)
    step = (values.max() - values.min() if affine else 2 * np.abs(values).max()) / (2**bits - (1 if affine else 2))
    assert np.abs(found - values).max() < 0.51 * step + 1e-6
    assert group or len(np.unique(found[0])) <= 2**bits


@pytest.mark.parametrize("error", [0.1, 0.01, 0.001])
def test_the_data_choose_the_bits_where_an_error_is_asked_for(error: float) -> None:
    values = np.random.default_rng(7).standard_normal((30, 70), np.float32)
    coded = tensors.encode(values, Coding(max_error=error), 30, 1)
    found = decoded(coded, values.shape, 30)
    assert coded.block.coding == pb.CODING_QUANTISED
    assert 0.2 * error < np.linalg.norm(found - values) / np.linalg.norm(values) < 1.1 * error


def test_an_error_that_no_width_keeps_to_makes_the_tensor_lossless() -> None:
    values = np.random.default_rng(7).standard_normal((30, 70), np.float32)
    assert_same_bits(through(values, Coding(max_error=1e-8), rows=30), values)


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("bits", [0, 6, 12])
@pytest.mark.parametrize("keep", [0.005, 0.2, 0.5, 0.99])
def test_sparse_numbers_keep_the_largest_and_zero_elsewhere(keep: float, bits: int, group: int) -> None:
    values = np.random.default_rng(8).standard_normal((40, 100), np.float32)
    coded = tensors.encode(values, Coding(bits=bits, keep=keep, group=group), 40, 1)
    found = decoded(coded, values.shape, 40)
    kept = np.abs(values) >= np.sort(np.abs(values), axis=None)[-math.ceil(keep * values.size)]
    assert coded.block.coding == pb.CODING_SPARSE
    assert coded.block.kept == kept.sum()
    assert (found[~kept] == 0).all()
    if bits == 0:
        assert_same_bits(found[kept], values[kept])
    else:
        step = np.abs(values).max() / (2 ** (bits - 1) - 1)
        assert np.abs(found - values)[kept].max() < 0.51 * step


def test_few_entries_are_found_by_their_distances_and_many_by_a_bit_each() -> None:
    values = np.random.default_rng(9).standard_normal((40, 1000), np.float32)
    rare, common = (tensors.encode(values, Coding(bits=6, keep=keep), 40, 1).block for keep in (0.002, 0.3))
    assert rare.pattern == pb.PATTERN_GAPS
    assert common.pattern == pb.PATTERN_BITMAP
    assert rare.streams[0].bytes < values.size // 8 // 4


@pytest.mark.parametrize("coding", [Coding(), Coding(bits=6), Coding(bits=6, keep=0.99), Coding(bfloat16=True)])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (1,), (2, 1)])
def test_tensors_of_hardly_any_numbers_come_back(shape: tuple[int, ...], coding: Coding) -> None:
    values = np.ones(shape, np.float32)
    np.testing.assert_allclose(through(values, coding, rows=shape[0]), values, atol=1e-6)


@pytest.mark.parametrize("coding", [Coding(bits=6), Coding(bits=8, affine=True), Coding(bits=4, keep=0.5)])
@pytest.mark.parametrize("scale", [3.4e38, 1e38, 1e-38, 1e-44])
def test_what_a_peer_sends_is_finite_and_close_at_either_end_of_float32(scale: float, coding: Coding) -> None:
    values = np.tile(np.linspace(-1, 1, 20) * scale, (3, 1)).astype(np.float32)
    found = through(values, coding, rows=3)
    kept = found != 0 if coding.keep < 1 else np.ones_like(found, np.bool_)
    error = np.abs(found.astype(np.float64) - values)[kept]
    assert error.max() <= 0.15 * scale


@pytest.mark.parametrize("scale", [1e-44, 1e-40, 1e-20, 1.0, 1e38])
def test_an_asked_for_error_is_kept_to_at_every_size_of_number(scale: float) -> None:
    values = (np.random.default_rng(10).uniform(-1, 1, (5, 40)) * scale).astype(np.float32)
    found = through(values, Coding(max_error=0.05), rows=5).astype(np.float64)
    assert np.linalg.norm(found - values) <= 0.06 * np.linalg.norm(values.astype(np.float64))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("coding", [Coding(), Coding(bits=6), Coding(bfloat16=True), Coding(keep=0.5)])
def test_numbers_that_are_not_finite_are_not_sent(coding: Coding, bad: float) -> None:
    with pytest.raises(PackageError) as caught:
        tensors.encode(np.array([1, bad], np.float32), coding, 1, 1)
    assert caught.value.refusal is Refusal.NOT_FINITE


@given(st.lists(st.booleans(), max_size=100), st.sampled_from(LEVELS))
@settings(deadline=None)
def test_masks_come_back(entries: list[bool], level: int) -> None:
    mask = np.array(entries, np.bool_).reshape(-1, 1)
    coded = tensors.encode_mask(mask, level)
    np.testing.assert_array_equal(tensors.decode_mask(coded.block, [coded.parts[0].data], mask.shape), mask)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_labels_come_back_and_none_is_beyond_the_classes(bits: int) -> None:
    labels = np.random.default_rng(11).integers(0, 2**bits, 500)
    coded = tensors.encode_integers(labels, bits, 1)
    data = [coded.parts[0].data]
    np.testing.assert_array_equal(tensors.decode_integers(coded.block, data, labels.shape, 2**bits), labels)
    with pytest.raises(PackageError, match="no class"):
        tensors.decode_integers(coded.block, data, labels.shape, int(labels.max()))


def some_block(**changes: int) -> tuple[pb.Block, list[bytes]]:
    """A sparse block of 60 numbers, a third of them kept, with some of its fields changed."""
    values = np.random.default_rng(12).standard_normal((6, 10), np.float32)
    coded = tensors.encode(values, Coding(bits=6, keep=1 / 3), 6, 0)
    for name, value in changes.items():
        setattr(coded.block, name, value)
    return coded.block, [part.data for part in coded.parts]


@pytest.mark.parametrize(
    "changes",
    [
        {"pattern": pb.PATTERN_GAPS},
        {"levels": pb.LEVELS_UNSPECIFIED},
        {"levels": pb.LEVELS_AFFINE},
        {"kept": 19},
        {"kept": 2**40},
        {"bits": 0},
        {"bits": 1},
        {"bits": 17},
        {"bits": 2**31},
        {"group": 1},
        {"group": 2**63},
        {"coding": pb.CODING_QUANTISED},
        {"coding": pb.CODING_INTEGER},
        {"coding": pb.CODING_MASK},
        {"coding": pb.CODING_ABOVE_ZERO},
        {"coding": 99},
    ],
    ids=lambda changes: "-".join(f"{k}-{v}" for k, v in changes.items()),
)
def test_a_description_that_does_not_fit_its_streams_is_refused(changes: dict[str, int]) -> None:
    block, data = some_block()
    assert tensors.decode(block, data, (6, 10), 6).shape == (6, 10)
    block, data = some_block(**changes)
    with pytest.raises(PackageError) as caught:
        tensors.decode(block, data, (6, 10), 6)
    assert caught.value.refusal is Refusal.MALFORMED


@pytest.mark.parametrize("keep", [0.01, 0.5])
@pytest.mark.parametrize("pattern", [pb.PATTERN_UNSPECIFIED, 77])
def test_a_pattern_of_an_unknown_kind_is_refused(pattern: pb.Pattern, keep: float) -> None:
    values = np.random.default_rng(12).standard_normal((1, 1000), np.float32)
    coded = tensors.encode(values, Coding(keep=keep), 1, 1)
    assert coded.block.pattern == (pb.PATTERN_GAPS if keep < 0.1 else pb.PATTERN_BITMAP)
    coded.block.pattern = pattern
    with pytest.raises(PackageError, match="unknown kind"):
        decoded(coded, values.shape)


def test_labels_and_patterns_of_another_coding_are_refused() -> None:
    labels = tensors.encode_integers(np.arange(4), 8, 1)
    labels.block.coding = pb.CODING_FLOAT32
    with pytest.raises(PackageError, match="labels"):
        tensors.decode_integers(labels.block, [labels.parts[0].data], (4,), 8)
    mask = tensors.encode_mask(np.ones((4, 2), np.bool_), 0)
    mask.block.streams[0].layout = pb.LAYOUT_PLANES
    with pytest.raises(PackageError):
        tensors.decode_mask(mask.block, [mask.parts[0].data], (4, 2))


@pytest.mark.parametrize("bits", [3, 6, 8, 10, 16])
@pytest.mark.parametrize("count", [0, 1, 1000, 300_000])
def test_streams_of_any_length_come_back_in_the_order_that_was_smallest(count: int, bits: int) -> None:
    random = np.random.default_rng(13)
    top = 2**bits - 1
    for codes in (random.integers(0, top + 1, count), np.minimum(random.geometric(0.6, count), top)):
        stored = codes.astype(np.uint16)
        part = streams.store_codes(stored.astype(np.uint8) if bits <= 8 else stored, bits, 1)
        assert len(part.data) <= math.ceil(count * bits / 8) + 2
        np.testing.assert_array_equal(streams.load_codes(part.describe(), part.data, count, bits, top), stored)
        if count:
            with pytest.raises(PackageError, match="above"):
                streams.load_codes(part.describe(), part.data, count, bits, int(codes.max()) - 1)


@pytest.mark.parametrize("count", [0, 1, 1000, 200_000])
def test_words_of_any_number_come_back(count: int) -> None:
    random = np.random.default_rng(14)
    for values in (random.standard_normal(count, np.float32), np.ones(count, np.float32)):
        part = streams.store_floats(values, 1)
        assert_same_bits(streams.load_floats(part.describe(), part.data, count), values)
        assert len(part.data) <= values.nbytes
