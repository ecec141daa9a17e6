"""One tensor as a block: the coding that its kind and the specification call for, and back.

Shapes are known to the receiver before a block is read (from the model and the number of samples), so every length
is checked before anything is allocated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.package import sparsify, streams
from spark_node.package.bits import Codes
from spark_node.package.errors import PackageError, Refusal, malformed
from spark_node.package.quantize import Floats, bits_for, dequantise, group_lengths, quantise

PALETTE = 256
"""The most distinct values of a palette: 8-bit pixels, standardised or not."""


@dataclass(frozen=True)
class Coding:
    """How numbers are written. `bits` 0 is lossless, and so is everything else at its default."""

    bits: int = 0
    keep: float = 1.0
    affine: bool = False
    group: int = 0
    """Entries that share a scale; 0: a row."""
    max_error: float = 0.0
    """With bits 0: as few bits as keep the relative error of the block within this."""
    bfloat16: bool = False
    positive: bool = False
    """What is above zero stays above zero, however small: masks can be read off it."""


@dataclass(frozen=True)
class Coded:
    """A block without its role, and its streams."""

    block: pb.Block
    parts: tuple[streams.Part, ...]


def encode(values: Floats, coding: Coding, rows: int, level: int, random: np.random.Generator | None = None) -> Coded:
    """Finite float32 numbers; `rows` is how many rows with a scale of their own the tensor has."""
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if not np.isfinite(flat).all():
        raise PackageError(Refusal.NOT_FINITE, "numbers to be sent are not finite: the training has diverged")
    if coding.bfloat16:
        return _block(values.shape, pb.CODING_BFLOAT16, [streams.store_words(_to_bfloat16(flat), level)])
    bits = (coding.bits or _bits_within(flat, coding, rows)) if _has_steps(flat) else 0
    if coding.keep < 1:
        return _encode_sparse(
            values.shape, flat, sparsify.largest(flat, coding.keep), bits, coding, rows, level, random
        )
    if bits == 0:
        return _encode_lossless(values.shape, flat, rows, level)
    lengths = group_lengths(rows, flat.size // max(rows, 1), coding.group)
    made = quantise(flat, lengths, bits, affine=coding.affine, random=random, positive=coding.positive)
    parts = [streams.store_floats(made.scales.reshape(-1), level), streams.store_codes(made.levels, bits, level)]
    return _block(
        values.shape, pb.CODING_QUANTISED, parts, bits=bits, levels=_levels(coding.affine), group=coding.group
    )


def decode(block: pb.Block, data: Sequence[streams.Bytes], shape: tuple[int, ...], rows: int) -> Floats:
    """The numbers of a block that is due to have this shape."""
    _expect(tuple(block.shape) == shape, f"a block of shape {list(block.shape)} where {list(shape)} is due")
    count = math.prod(shape)
    reader = _READERS.get(block.coding)
    _expect(reader is not None and len(data) == len(block.streams), "a block of a coding that numbers do not have")
    assert reader is not None
    with np.errstate(over="ignore", invalid="ignore"):
        values = reader(block, data, count, rows)
    if not np.isfinite(values).all():
        raise PackageError(Refusal.NOT_FINITE, "numbers that are not finite")
    return values.reshape(shape)


def encode_mask(mask: NDArray[np.bool_], level: int) -> Coded:
    """Booleans, a bit each."""
    return _block(
        mask.shape, pb.CODING_MASK, [streams.store(sparsify.bitmap(mask.reshape(-1)), pb.LAYOUT_PLAIN, level)]
    )


def decode_mask(block: pb.Block, data: Sequence[streams.Bytes], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    _expect(tuple(block.shape) == shape and len(data) == 1, "a mask of another shape")
    found = _read_bitmap(block.streams[0], data[0], math.prod(shape))
    return found.reshape(shape)


def encode_integers(values: NDArray[np.int64], bits: int, level: int) -> Coded:
    """Numbers from 0 to 2^bits - 1: labels."""
    words = values.astype({8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])
    return _block(values.shape, pb.CODING_INTEGER, [streams.store_words(words, level)], bits=bits)


def decode_integers(
    block: pb.Block, data: Sequence[streams.Bytes], shape: tuple[int, ...], below: int
) -> NDArray[np.int64]:
    _expect(block.coding == pb.CODING_INTEGER and block.bits in (8, 16, 32), "labels of another coding")
    _expect(tuple(block.shape) == shape and len(data) == 1, "labels of another shape")
    count, width = math.prod(shape), block.bits // 8
    words = streams.load_words(block.streams[0], data[0], count, width).view(f"<u{width}")
    _expect(not words.size or int(words.max()) < below, f"labels that are no class: {below} classes")
    return words.astype(np.int64).reshape(shape)


def _block(shape: tuple[int, ...], coding: pb.Coding, parts: list[streams.Part], **fields: int) -> Coded:
    described = [part.describe() for part in parts]
    return Coded(pb.Block(shape=shape, coding=coding, streams=described, **fields), tuple(parts))  # type: ignore[arg-type]


def _has_steps(flat: Floats) -> bool:
    """Whether the numbers' range and the steps within it are float32 numbers too."""
    largest = max(float(flat.max()), -float(flat.min())) if flat.size else 0.0
    return largest == 0 or 1e-30 < largest < 1e38


def _levels(affine: bool) -> pb.Levels:
    return pb.LEVELS_AFFINE if affine else pb.LEVELS_SYMMETRIC


def _bits_within(flat: Floats, coding: Coding, rows: int) -> int:
    """Bits that keep to max_error; 0 (lossless) where none is asked for or none do."""
    if coding.max_error == 0:
        return 0
    lengths = group_lengths(rows, flat.size // max(rows, 1), coding.group)
    return bits_for(flat, lengths, coding.max_error, affine=coding.affine)


def _encode_lossless(shape: tuple[int, ...], flat: Floats, rows: int, level: int) -> Coded:
    """A palette where few values occur, the pattern of zeros where they are many, else the numbers as they are."""
    found = _palette(flat)
    if found is not None:
        table, positions = found
        bits = max(1, (len(table) - 1).bit_length())
        parts = [streams.store_floats(table, level), streams.store_codes(positions, bits, level)]
        return _block(shape, pb.CODING_PALETTE, parts, bits=bits, kept=len(table))
    occupied = flat.view(np.uint32) != 0  # minus zero is kept: every bit comes back
    if level and np.count_nonzero(occupied) < 0.9 * flat.size:
        return _encode_sparse(shape, flat, occupied, 0, Coding(), rows, level, None)
    return _block(shape, pb.CODING_FLOAT32, [streams.store_floats(flat, level)])


def _palette(flat: Floats) -> tuple[Floats, Codes] | None:
    """The distinct values and where each entry stands among them, or None where they are too many.

    Values are told apart by their bits, so that minus zero survives.
    """
    if flat.size < 4 * PALETTE:
        return None
    words = flat.view(np.int32)
    for some in (4 * PALETTE, 8192):  # a few are enough to tell that numbers are all different
        table = np.unique(words[:: max(1, flat.size // some)])
        if len(table) > PALETTE:
            return None
    for _ in range(4):  # each time the values that the table lacks join it
        if len(table) > PALETTE:
            return None
        ordered = np.sort(table.view(np.float32))
        positions = _positions(ordered, flat)
        lost = ordered.view(np.int32)[positions] != words
        if not lost.any():
            return ordered, positions
        table = np.union1d(ordered.view(np.int32), words[lost])
    return None


def _positions(table: Floats, flat: Floats) -> Codes:
    """Position of the nearest value of a rising table; by division where its values are evenly spaced."""
    if len(table) == 1:
        return np.zeros(flat.size, np.uint8)
    step = (table[-1].astype(np.float64) - table[0]) / (len(table) - 1)
    if 1e-30 < step < 1e35 and np.abs(np.diff(table) / step - 1).max() < 0.01:
        scaled: Floats = (flat - table[0]) * np.float32(1 / step)
        np.rint(scaled, out=scaled)
        np.clip(scaled, 0, len(table) - 1, out=scaled)
        return scaled.astype(np.uint8)
    nearest: Codes = np.minimum(np.searchsorted(table, flat), len(table) - 1).astype(np.uint8)
    return nearest


def _encode_sparse(
    shape: tuple[int, ...],
    flat: Floats,
    mask: sparsify.Mask,
    bits: int,
    coding: Coding,
    rows: int,
    level: int,
    random: np.random.Generator | None,
) -> Coded:
    kept = flat[mask]
    pattern, pattern_part = _store_pattern(mask, kept.size, level)
    if bits == 0:
        parts = [pattern_part, streams.store_floats(kept, level)]
    else:
        lengths = _kept_lengths(mask, rows, coding.group)
        made = quantise(kept, lengths, bits, affine=False, random=random)
        parts = [pattern_part, streams.store_floats(made.scales, level), streams.store_codes(made.levels, bits, level)]
    fields = {"bits": bits, "group": coding.group, "pattern": pattern, "kept": kept.size}
    return _block(shape, pb.CODING_SPARSE, parts, levels=pb.LEVELS_SYMMETRIC, **fields)


def _store_pattern(mask: sparsify.Mask, kept: int, level: int) -> tuple[pb.Pattern, streams.Part]:
    best = (pb.PATTERN_BITMAP, streams.store(sparsify.bitmap(mask), pb.LAYOUT_PLAIN, level))
    if kept < mask.size // 16:
        other = (pb.PATTERN_GAPS, streams.store_words(sparsify.gaps(mask), level))
        best = min(best, other, key=lambda choice: len(choice[1].data))
    return best


def _kept_lengths(mask: sparsify.Mask, rows: int, group: int) -> NDArray[np.int64]:
    """Kept entries of each group with a scale."""
    if group == 0:
        return np.count_nonzero(mask.reshape(rows, -1), axis=1) if mask.size else np.zeros(rows, np.int64)
    return group_lengths(1, int(np.count_nonzero(mask)), group)


def _to_bfloat16(flat: Floats) -> NDArray[np.uint16]:
    """The upper half of a float32, rounded to nearest, ties to even."""
    words = flat.view(np.uint32)
    rounded = words + (0x7FFF + ((words >> 16) & 1))
    return (rounded >> 16).astype(np.uint16)


def _expect(condition: bool, detail: str) -> None:
    if not condition:
        raise malformed(detail)


def _read_float32(block: pb.Block, data: Sequence[streams.Bytes], count: int, rows: int) -> Floats:
    _expect(len(data) == 1, "a block with a stream too many")
    return streams.load_floats(block.streams[0], data[0], count)


def _read_bfloat16(block: pb.Block, data: Sequence[streams.Bytes], count: int, rows: int) -> Floats:
    _expect(len(data) == 1, "a block with a stream too many")
    words = streams.load_words(block.streams[0], data[0], count, 2).view("<u2").astype(np.uint32)
    return (words << 16).view(np.float32)


def _read_palette(block: pb.Block, data: Sequence[streams.Bytes], count: int, rows: int) -> Floats:
    _expect(len(data) == 2 and 1 <= block.kept <= PALETTE and 1 <= block.bits <= 8, "a palette of impossible size")
    table = streams.load_floats(block.streams[0], data[0], block.kept)
    positions = streams.load_codes(block.streams[1], data[1], count, block.bits, int(block.kept) - 1)
    return table[positions]


def _read_quantised(block: pb.Block, data: Sequence[streams.Bytes], count: int, rows: int) -> Floats:
    affine = _affine(block)
    _expect(block.group < 2**40, "a group of impossible size")
    lengths = group_lengths(rows, count // max(rows, 1), block.group)
    return _read_levels(block, data, 0, lengths, count, affine=affine)


def _read_sparse(block: pb.Block, data: Sequence[streams.Bytes], count: int, rows: int) -> Floats:
    _expect(len(data) == (2 if block.bits == 0 else 3) and block.kept <= count, "a sparse block of impossible size")
    _expect(not _affine(block) and block.group < 2**40, "a sparse block with affine levels")
    if block.pattern == pb.PATTERN_BITMAP:
        mask: sparsify.Mask | None = _read_bitmap(block.streams[0], data[0], count)
    else:
        _expect(block.pattern == pb.PATTERN_GAPS, "a pattern of an unknown kind")
        found = streams.load_words(block.streams[0], data[0], block.kept, 4).view("<u4")
        mask = sparsify.from_gaps(found, count)
    if mask is None or int(np.count_nonzero(mask)) != block.kept:
        raise malformed("a pattern that disagrees with the count of entries")
    if block.bits == 0:
        kept = streams.load_floats(block.streams[1], data[1], block.kept)
    else:
        kept = _read_levels(block, data, 1, _kept_lengths(mask, rows, block.group), block.kept, affine=False)
    values = np.zeros(count, np.float32)
    values[mask] = kept
    return values


def _read_levels(
    block: pb.Block, data: Sequence[streams.Bytes], first: int, lengths: NDArray[np.int64], count: int, *, affine: bool
) -> Floats:
    """Scales and levels from the streams first and first + 1."""
    _expect(len(data) == first + 2 and 2 <= block.bits <= 16, "quantised numbers of impossible width")
    groups = len(lengths)
    scales = streams.load_floats(block.streams[first], data[first], groups * (2 if affine else 1))
    top = 2**block.bits - (1 if affine else 2)
    levels = streams.load_codes(block.streams[first + 1], data[first + 1], count, block.bits, top)
    return dequantise(levels, scales.reshape(groups, 2) if affine else scales, lengths, block.bits, affine=affine)


def _affine(block: pb.Block) -> bool:
    _expect(block.levels in (pb.LEVELS_AFFINE, pb.LEVELS_SYMMETRIC), "levels of an unknown kind")
    return block.levels == pb.LEVELS_AFFINE


def _read_bitmap(stream: pb.Stream, data: streams.Bytes, count: int) -> sparsify.Mask:
    _expect(stream.layout == pb.LAYOUT_PLAIN, "a pattern in an order of bytes that it does not have")
    found = sparsify.from_bitmap(bytes(streams.load(stream, data, (count + 7) // 8)), count)
    if found is None:
        raise malformed("a pattern with bits behind its end")
    return found


_READERS = {
    pb.CODING_FLOAT32: _read_float32,
    pb.CODING_BFLOAT16: _read_bfloat16,
    pb.CODING_PALETTE: _read_palette,
    pb.CODING_QUANTISED: _read_quantised,
    pb.CODING_SPARSE: _read_sparse,
}
