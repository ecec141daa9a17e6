"""Quantisation to b bits with a scale a row or a scale a block of entries.

symmetric:  x = step (level - L),    L = 2^(b-1) - 1,  step = max|x| / L       zero stays zero
affine:     x = low + step level,    step = (max - min) / (2^b - 1)            for one-sided numbers: inputs
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_node.package.bits import Codes, code_type

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Quantised:
    """Levels in the order of the entries, and the scales of their groups."""

    levels: Codes
    scales: Floats
    """[groups] (symmetric: step) or [groups, 2] (affine: low, step)."""


def group_lengths(rows: int, columns: int, group: int) -> NDArray[np.int64]:
    """Entries of each group of a [rows, columns] array: the rows (group 0), or blocks of `group` entries."""
    if group == 0:
        return np.full(rows, columns, np.int64)
    total = rows * columns
    lengths = np.full(-(-total // group), group, np.int64)
    if total % group:
        lengths[-1] = total % group
    return lengths


def quantise(
    values: Floats,
    lengths: NDArray[np.int64],
    bits: int,
    *,
    affine: bool,
    random: np.random.Generator | None = None,
    positive: bool = False,
) -> Quantised:
    """Levels of finite values that lie group after group; stochastic rounding where `random` is given.

    `positive`: a value above zero is not rounded to zero where zero is the lowest level.
    """
    if values.size == 0:
        width = (len(lengths), 2) if affine else (len(lengths),)
        return Quantised(np.zeros(0, code_type(bits)), np.zeros(width, np.float32))
    if affine:
        low, high = _by_group(np.minimum, values, lengths), _by_group(np.maximum, values, lengths)
        top = 2**bits - 1
        step = ((high.astype(np.float64) - low) / top).astype(np.float32)
        scaled = (values - _spread(low, lengths, values)) * _spread(_inverse(step), lengths, values)
        scales: Floats = np.stack([low, step], 1)
    else:
        half = 2 ** (bits - 1) - 1
        top = 2 * half
        step = (_by_group(np.maximum, np.abs(values), lengths).astype(np.float64) / half).astype(np.float32)
        scaled = values * _spread(_inverse(step), lengths, values)
        scaled += half
        scales = step
    if random is None:
        np.rint(scaled, out=scaled)
    else:
        whole = np.floor(scaled)
        scaled -= whole  # exact, where scaled + random would round: what lies on a level stays there
        whole += random.random(scaled.shape, np.float32) < scaled
        scaled = whole
    np.clip(scaled, 0, top, out=scaled)
    if positive and affine:
        scaled[(scaled == 0) & (values > 0) & np.repeat(low == 0, lengths)] = 1
    return Quantised(scaled.astype(code_type(bits)), scales)


def dequantise(levels: Codes, scales: Floats, lengths: NDArray[np.int64], bits: int, *, affine: bool) -> Floats:
    """The inverse of `quantise`, up to rounding."""
    values = levels.astype(np.float32)
    if affine:
        values *= _spread(scales[:, 1], lengths, values)
        values += _spread(scales[:, 0], lengths, values)
    else:
        values -= np.float32(2 ** (bits - 1) - 1)
        values *= _spread(scales, lengths, values)
    return values


def bits_for(values: Floats, lengths: NDArray[np.int64], error: float, *, affine: bool) -> int:
    """The fewest bits (2 to 16) whose rounding error, relative to the values' norm, is expected within `error`.

    Rounding to a step is off by step / sqrt(12) in the mean square. 0 where even 16 bits do not suffice.
    """
    norm = float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0
    if norm == 0.0:
        return 2
    if affine:
        span = _by_group(np.maximum, values, lengths).astype(np.float64) - _by_group(np.minimum, values, lengths)
    else:
        span = 2 * _by_group(np.maximum, np.abs(values), lengths).astype(np.float64)
    spread = math.sqrt(float((np.square(span) * lengths).sum()) / values.size / 12) / norm
    for bits in range(2, 17):
        if spread / (2**bits - (1 if affine else 2)) <= error:
            return bits
    return 0


def _by_group(reduce: np.ufunc, values: Floats, lengths: NDArray[np.int64]) -> Floats:
    """min or max of each group; 0 for an empty one."""
    if len(lengths) and values.size == len(lengths) * int(lengths[0]) and (lengths == lengths[0]).all():
        found: Floats = reduce.reduce(values.reshape(len(lengths), -1), axis=1)
        return found
    out = np.zeros(len(lengths), np.float32)
    full = lengths > 0
    starts = np.cumsum(lengths) - lengths
    out[full] = reduce.reduceat(values, starts[full])
    return out


def _spread(per_group: Floats, lengths: NDArray[np.int64], values: Floats) -> Floats:
    """A number a group as a number an entry."""
    return np.repeat(per_group, lengths)


def _inverse(step: Floats) -> Floats:
    out = np.zeros_like(step)
    return np.divide(1, step, out=out, where=step > np.finfo(np.float32).tiny)
