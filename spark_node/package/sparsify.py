"""The largest fraction rho of the entries, and where they stand."""

import numpy as np
from numpy.typing import NDArray

from spark_node.package.quantize import Floats

Mask = NDArray[np.bool_]


def largest(values: Floats, keep: float) -> Mask:
    """The ceil(keep n) largest entries by magnitude, fewer where the rest is zero; ties go to the first."""
    count = int(np.ceil(keep * values.size))
    magnitudes = np.abs(values)
    if count >= values.size:
        mask: Mask = magnitudes > 0
        return mask
    threshold = np.partition(magnitudes, values.size - count)[values.size - count]
    mask = magnitudes > threshold
    if threshold > 0:
        ties = np.flatnonzero(magnitudes == threshold)
        mask[ties[: count - int(mask.sum())]] = True
    return mask


def bitmap(mask: Mask) -> bytes:
    """A bit an entry."""
    return np.packbits(mask, bitorder="little").tobytes()


def from_bitmap(data: bytes, count: int) -> Mask | None:
    """The pattern, or None where bits are set behind its end."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").view(np.bool_)
    return None if bits[count:].any() else bits[:count]


def gaps(mask: Mask) -> NDArray[np.uint32]:
    """The distance of each kept entry from the one before; the first counts from -1, so that no gap is zero."""
    places = np.flatnonzero(mask)
    return np.diff(places, prepend=-1).astype("<u4")


def from_gaps(found: NDArray[np.uint32], count: int) -> Mask | None:
    """The pattern, or None where a gap is zero or the last entry lies behind the end."""
    if found.size and not found.all():
        return None
    places = np.cumsum(found, dtype=np.uint64) - np.uint64(1)
    if found.size and places[-1] >= count:
        return None
    mask = np.zeros(count, np.bool_)
    mask[places.astype(np.int64)] = True
    return mask
