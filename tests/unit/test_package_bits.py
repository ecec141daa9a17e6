"""Packed numbers, quantisation and sparsity, each against a second implementation in plain numpy."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spark_node.package.bits import code_type, pack, packed_bytes, unpack
from spark_node.package.quantize import Floats, bits_for, dequantise, group_lengths, quantise
from spark_node.package.sparsify import bitmap, from_bitmap, from_gaps, gaps, largest

WIDTHS = range(1, 17)
EPSILON = float(np.finfo(np.float32).eps)


def random_codes(count: int, bits: int, seed: int = 0) -> NDArray[np.uint16]:
    return np.random.default_rng(seed).integers(0, 2**bits, count, dtype=np.uint16)


def packed_bit_by_bit(codes: NDArray[Any], bits: int) -> bytes:
    """A plane of low bytes where there are more than 8 bits, then every number's remaining bits, lowest first."""
    if bits > 8:
        return (codes & 255).astype(np.uint8).tobytes() + packed_bit_by_bit(codes >> 8, bits - 8)
    table = np.unpackbits(codes.astype(np.uint8)[:, None], axis=1, bitorder="little")[:, :bits]
    return np.packbits(table.reshape(-1), bitorder="little").tobytes()


@pytest.mark.parametrize("bits", WIDTHS)
@given(count=st.integers(0, 70), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_packed_numbers_come_back(bits: int, count: int, seed: int) -> None:
    codes = random_codes(count, bits, seed)
    data = pack(codes.astype(code_type(bits)), bits)
    assert data == packed_bit_by_bit(codes, bits)
    assert len(data) == packed_bytes(count, bits) == (count if bits > 8 else 0) + math.ceil(count * (bits % 8 or 8) / 8)
    found = unpack(data, count, bits)
    assert found.dtype == code_type(bits)
    np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_many_numbers_are_packed_as_bit_by_bit(bits: int) -> None:
    codes = random_codes(10_007, bits)
    data = pack(codes.astype(code_type(bits)), bits)
    assert data == packed_bit_by_bit(codes, bits)
    np.testing.assert_array_equal(unpack(memoryview(data), len(codes), bits), codes)


def rows_of_numbers(kind: str, rows: int, columns: int, seed: int = 0) -> Floats:
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, columns))
    made = {
        "normal": lambda: values,
        "relu": lambda: np.maximum(values, 0),
        "heavy": lambda: random.standard_t(2.5, (rows, columns)),
        "shifted": lambda: 5 + values,
        "scales": lambda: values * 10.0 ** random.integers(-6, 6, (rows, 1)),
        "huge": lambda: 1e38 * np.tanh(values),
        "small": lambda: 1e-25 * values,
        "constant": lambda: np.full((rows, columns), 0.7) * random.choice([-1, 0, 1], (rows, 1)),
    }[kind]()
    flat: Floats = made.astype(np.float32).reshape(-1)
    return flat


KINDS = ["normal", "relu", "heavy", "shifted", "scales", "huge", "small", "constant"]


def steps(scales: Floats, lengths: NDArray[np.int64], affine: bool) -> NDArray[np.float64]:
    """The step of every entry."""
    each: NDArray[np.float64] = np.repeat(scales[:, 1] if affine else scales, lengths).astype(np.float64)
    return each


def slack(values: Floats, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """What float32 arithmetic adds to the error: a few units in the last place of the group's largest number."""
    ends = np.cumsum(lengths)
    groups = [np.abs(values[end - length : end].astype(np.float64)) for end, length in zip(ends, lengths, strict=True)]
    return np.concatenate([np.full(len(group), 8 * EPSILON * group.max(initial=0)) for group in groups])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("group", [0, 17, 1000])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bits", [2, 6, 9, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_off_by_half_a_step_at_most(kind: str, bits: int, affine: bool, group: int, rounding: str) -> None:
    values, lengths = rows_of_numbers(kind, 12, 41), group_lengths(12, 41, group)
    random = np.random.default_rng(1) if rounding == "stochastic" else None
    made = quantise(values, lengths, bits, affine=affine, random=random)
    assert made.levels.dtype == code_type(bits)
    assert int(made.levels.max()) <= 2**bits - (1 if affine else 2)
    found = dequantise(made.levels, made.scales, lengths, bits, affine=affine)
    step = steps(made.scales, lengths, affine)
    error = np.abs(found.astype(np.float64) - values)
    bound = step * (0.5 if random is None else 1.0)
    assert (error <= bound + slack(values, lengths)).all()
    if not affine:
        assert (found[values == 0] == 0).all()


def quantised_one_by_one(
    values: Floats, lengths: NDArray[np.int64], bits: int, affine: bool
) -> tuple[list[float], list[list[float]]]:
    """Places on the scale of levels before rounding, and scales, in float64."""
    places: list[float] = []
    scales: list[list[float]] = []
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        group = values[end - length : end].astype(np.float64)
        if affine:
            low, top = group.min(), 2**bits - 1
            step = (group.max() - low) / top
            places += list((group - low) / step if step else np.zeros(length))
            scales.append([low, step])
        else:
            half = 2 ** (bits - 1) - 1
            step = np.abs(group).max() / half
            places += list(group / step + half if step else np.full(length, float(half)))
            scales.append([step])
    return places, scales


@pytest.mark.parametrize("group", [0, 17])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bits", [2, 5, 8, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_levels_are_those_of_a_loop_over_the_groups(kind: str, bits: int, affine: bool, group: int) -> None:
    values, lengths = rows_of_numbers(kind, 12, 41, seed=4), group_lengths(12, 41, group)
    made = quantise(values, lengths, bits, affine=affine)
    places, scales = quantised_one_by_one(values, lengths, bits, affine)
    np.testing.assert_allclose(made.scales.reshape(len(lengths), -1), scales, rtol=1e-6, atol=0)
    clear = np.abs(np.modf(places)[0] - 0.5) > 0.01  # float32 may round the others either way
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(made.levels[clear], np.rint(places)[clear])


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8, 12])
def test_stochastic_rounding_is_right_on_average(bits: int, affine: bool) -> None:
    repeats, row = 4000, rows_of_numbers("normal", 1, 24, seed=2)
    values, lengths = np.tile(row, repeats), np.full(repeats, 24)
    made = quantise(values, lengths, bits, affine=affine, random=np.random.default_rng(3))
    found = dequantise(made.levels, made.scales, lengths, bits, affine=affine).reshape(repeats, 24)
    step = float(steps(made.scales, lengths, affine)[0])
    off = found.mean(0, dtype=np.float64) - row
    assert (np.abs(off) < 5 * step / 2 / math.sqrt(repeats) + 4 * EPSILON * np.abs(row).max()).all()
    assert found.std(0).max() > 0.4 * step  # some entries lie near the middle between two levels


@pytest.mark.parametrize("bits", [8, 16])
def test_zero_stays_zero_under_stochastic_rounding(bits: int) -> None:
    values = rows_of_numbers("normal", 40, 5000, seed=5)
    values[values < 0.5] = 0
    lengths = group_lengths(40, 5000, 0)
    made = quantise(values, lengths, bits, affine=False, random=np.random.default_rng(6))
    assert (dequantise(made.levels, made.scales, lengths, bits, affine=False)[values == 0] == 0).all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_positive_numbers_stay_positive(bits: int, rounding: str) -> None:
    values = rows_of_numbers("relu", 20, 50, seed=7)
    values[::7] *= 1e-6
    lengths = group_lengths(20, 50, 0)
    random = np.random.default_rng(8) if rounding == "stochastic" else None
    made = quantise(values, lengths, bits, affine=True, random=random, positive=True)
    found = dequantise(made.levels, made.scales, lengths, bits, affine=True)
    np.testing.assert_array_equal(found > 0, values > 0)
    error = np.abs(found.astype(np.float64) - values)
    assert (error <= steps(made.scales, lengths, True) + slack(values, lengths)).all()


def test_positive_numbers_far_from_zero_are_rounded_as_ever() -> None:
    values, lengths = rows_of_numbers("shifted", 20, 50, seed=7), group_lengths(20, 50, 0)
    assert values.min() > 0
    kept = quantise(values, lengths, 4, affine=True, positive=True)
    np.testing.assert_array_equal(kept.levels, quantise(values, lengths, 4, affine=True).levels)


@pytest.mark.parametrize("affine", [False, True])
def test_the_smallest_numbers_there_are_stay_small(affine: bool) -> None:
    values = np.array([0, 1e-45, -1e-40, 1e-38, 3e-39], np.float32)
    lengths = np.array([5])
    made = quantise(values, lengths, 4, affine=affine)
    found = dequantise(made.levels, made.scales, lengths, 4, affine=affine)
    assert np.isfinite(found).all()
    assert np.abs(found - values).max() <= 2.1e-38


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("rows", "columns", "group"), [(0, 5, 0), (4, 0, 0), (0, 0, 8)])
def test_nothing_is_quantised_to_nothing(rows: int, columns: int, group: int, affine: bool) -> None:
    lengths = group_lengths(rows, columns, group)
    made = quantise(np.zeros(0, np.float32), lengths, 6, affine=affine)
    assert made.levels.shape == (0,)
    assert made.scales.shape == ((len(lengths), 2) if affine else (len(lengths),))
    assert dequantise(made.levels, made.scales, lengths, 6, affine=affine).shape == (0,)


def test_groups_of_unequal_and_no_length_have_their_own_scales() -> None:
    values = np.array([1, 2, 4, -8], np.float32)
    made = quantise(values, np.array([2, 0, 1, 1]), 8, affine=False)
    np.testing.assert_allclose(made.scales, np.array([2, 0, 4, 8]) / 127, rtol=1e-6)


@given(rows=st.integers(0, 9), columns=st.integers(0, 9), group=st.integers(0, 20))
@settings(deadline=None)
def test_groups_share_all_entries_between_them(rows: int, columns: int, group: int) -> None:
    lengths = group_lengths(rows, columns, group)
    assert int(lengths.sum()) == rows * columns
    assert not len(lengths) or int(lengths.max()) <= (group or columns)


@pytest.mark.parametrize("error", [0.1, 0.02, 0.003, 0.0005])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("kind", ["normal", "heavy", "shifted", "scales"])
def test_the_fewest_bits_that_keep_to_an_error_are_found(kind: str, affine: bool, error: float) -> None:
    values, lengths = rows_of_numbers(kind, 60, 200, seed=9), group_lengths(60, 200, 0)

    def measured(bits: int) -> float:
        made = quantise(values, lengths, bits, affine=affine)
        found = dequantise(made.levels, made.scales, lengths, bits, affine=affine)
        return float(np.linalg.norm(found - values) / np.linalg.norm(values))

    bits = bits_for(values, lengths, error, affine=affine)
    assert measured(bits) < 1.1 * error
    assert bits == 2 or measured(bits - 1) > 0.9 * error


def test_an_error_that_no_width_keeps_to_is_said_so() -> None:
    values = rows_of_numbers("normal", 4, 50)
    assert bits_for(values, group_lengths(4, 50, 0), 1e-7, affine=False) == 0
    assert bits_for(np.zeros(10, np.float32), group_lengths(1, 10, 0), 1e-7, affine=False) == 2


def largest_by_sorting(values: Floats, keep: float) -> NDArray[np.bool_]:
    order = np.argsort(-np.abs(values), kind="stable")[: math.ceil(keep * values.size)]
    mask = np.zeros(values.size, np.bool_)
    mask[order] = True
    mask &= values != 0
    return mask


@pytest.mark.parametrize("keep", [1e-6, 0.01, 0.3, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("kind", ["normal", "relu", "heavy", "constant"])
def test_the_largest_entries_are_kept(kind: str, keep: float) -> None:
    values = rows_of_numbers(kind, 13, 77)
    mask = largest(values, keep)
    np.testing.assert_array_equal(mask, largest_by_sorting(values, keep))
    assert kind != "normal" or int(mask.sum()) == math.ceil(keep * values.size)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5]), max_size=40), st.floats(1e-6, 1))
@settings(deadline=None)
def test_of_equal_entries_the_first_are_kept(entries: list[float], keep: float) -> None:
    values = np.array(entries, np.float32)
    np.testing.assert_array_equal(largest(values, keep), largest_by_sorting(values, keep))


@given(st.lists(st.booleans(), max_size=200))
@settings(deadline=None)
def test_patterns_come_back(entries: list[bool]) -> None:
    mask = np.array(entries, np.bool_)
    assert len(bitmap(mask)) == (len(mask) + 7) // 8
    for found in (from_bitmap(bitmap(mask), len(mask)), from_gaps(gaps(mask), len(mask))):
        assert found is not None
        np.testing.assert_array_equal(found, mask)


def test_patterns_that_leave_their_bounds_are_none() -> None:
    assert from_bitmap(b"\x20", 5) is None
    assert from_gaps(np.array([3, 3], np.uint32), 5) is None
    assert from_gaps(np.array([3, 0], np.uint32), 5) is None
    assert from_gaps(np.array([2**32 - 1] * 3, np.uint32), 5) is None
