"""Whole numbers of b bits, packed: eight of them in b bytes.

Above 8 bits the low bytes form a plane of their own and the rest is packed behind it. Groups of eight are one
64-bit word, so packing is a few shifts over whole arrays.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[Any]
"""uint8 up to 8 bits, else uint16."""


def code_type(bits: int) -> type[np.uint8] | type[np.uint16]:
    """The array type of numbers of that many bits."""
    return np.uint8 if bits <= 8 else np.uint16


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` packed numbers."""
    if bits > 8:
        return count + packed_bytes(count, bits - 8)
    return (count * bits + 7) // 8


def pack(codes: Codes, bits: int) -> bytes:
    """Numbers below 2^bits, packed; 1 <= bits <= 16."""
    if bits > 8:
        low, high = codes.astype(np.uint8), (codes >> 8).astype(np.uint8)
        return low.tobytes() + pack(high, bits - 8)
    if bits == 8:
        return codes.astype(np.uint8).tobytes()
    padded = np.zeros(-(-codes.size // 8) * 8, np.uint8)
    padded[: codes.size] = codes
    columns = padded.reshape(-1, 8)
    words = np.zeros(len(columns), "<u8")
    for i in range(8):
        words |= columns[:, i].astype("<u8") << np.uint64(bits * i)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].tobytes()[: packed_bytes(codes.size, bits)]


def unpack(data: bytes | memoryview, count: int, bits: int) -> Codes:
    """The inverse of `pack`; `data` has exactly packed_bytes(count, bits) bytes."""
    if bits > 8:
        high = unpack(memoryview(data)[count:], count, bits - 8).astype(np.uint16)
        return np.frombuffer(data, np.uint8, count).astype(np.uint16) | (high << 8)
    if bits == 8:
        return np.frombuffer(data, np.uint8, count)
    groups = -(-count // 8)
    stored = np.zeros(groups * bits, np.uint8)
    stored[: len(data)] = np.frombuffer(data, np.uint8)
    padded = np.zeros((groups, 8), np.uint8)
    padded[:, :bits] = stored.reshape(groups, bits)
    words = padded.view("<u8")[:, 0]
    out = np.empty((groups, 8), np.uint8)
    mask = np.uint64(2**bits - 1)
    for i in range(8):
        out[:, i] = (words >> np.uint64(bits * i)) & mask
    return out.reshape(-1)[:count]
