"""Streams: runs of numbers as bytes, in whichever order zstandard makes smallest."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.package.bits import Codes, code_type, pack, packed_bytes, unpack
from spark_node.package.errors import malformed
from spark_node.package.quantize import Floats

_SAMPLE = 2**16
"""Longer streams are tried in every order on so many bytes, and then coded in the best one."""

Bytes = bytes | memoryview


@dataclass(frozen=True)
class Part:
    """A stream and its description."""

    layout: pb.Layout
    zstd: bool
    data: bytes
    planes: tuple[int, ...] = ()

    def describe(self) -> pb.Stream:
        return pb.Stream(layout=self.layout, zstd=self.zstd, bytes=len(self.data), planes=self.planes)


def store(data: bytes, layout: pb.Layout, level: int) -> Part:
    """Bytes as they are, or compressed where that is smaller (level 0: never)."""
    small = _compress(data, level)
    return Part(layout, small is not None, data if small is None else small)


def _compress(data: bytes, level: int) -> bytes | None:
    """The compressed bytes, or None where they are no fewer; noise is recognised from a part of it."""
    if level == 0 or not data:
        return None
    if len(data) > 4 * _SAMPLE:
        middle = len(data) // 2
        if len(_compressor(level).compress(data[middle : middle + _SAMPLE])) >= 0.99 * _SAMPLE:
            return None
    small = _compressor(level).compress(data)
    return small if len(small) < len(data) else None


def _store_planes(planes: Sequence[bytes], level: int) -> Part:
    coded = [_compress(plane, level) or plane for plane in planes]
    return Part(pb.LAYOUT_PLANES, False, b"".join(coded), tuple(map(len, coded)))


def _planes(words: Codes) -> list[bytes]:
    """First bytes of all words, second bytes, ..."""
    columns = words.view(np.uint8).reshape(-1, words.dtype.itemsize).T
    return [column.tobytes() for column in columns]


def _best(choices: Sequence[Callable[[slice], Part]], size: int, count: int) -> Part:
    """The smallest of several orders of the same `size` bytes; long ones are compared by a part of them."""
    whole = slice(0, count)
    if size <= 4 * _SAMPLE:
        return min((make(whole) for make in choices), key=lambda part: len(part.data))
    some = slice(count // 2, count // 2 + count * _SAMPLE // size)
    return min(choices, key=lambda make: len(make(some).data))(whole)


def load(stream: pb.Stream, data: Bytes, plain: int) -> Bytes:
    """The stream's bytes before entropy coding, which are due to be `plain` many."""
    if stream.zstd:
        return _decompress(data, plain)
    if len(data) != plain:
        raise malformed(f"a stream of {len(data)} bytes where {plain} are due")
    return data


def _decompress(data: Bytes, plain: int) -> bytes:
    """Nothing is allocated before the frame is known to declare exactly `plain` bytes."""
    try:
        declared = zstandard.get_frame_parameters(data)
        if declared.content_size != plain or declared.dict_id:
            raise malformed(f"a compressed stream of {declared.content_size} bytes where {plain} are due")
        found = _decompressor().decompress(data, max_output_size=plain, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise malformed(f"a stream that zstandard refuses ({error})") from None
    if len(found) != plain:
        raise malformed("a compressed stream of another length than it declares")
    return found


def store_floats(values: Floats, level: int) -> Part:
    """float32 values."""
    return store_words(values.astype("<f4", copy=False), level)


def load_floats(stream: pb.Stream, data: Bytes, count: int) -> Floats:
    """The inverse; a fresh array."""
    return load_words(stream, data, count, 4).view("<f4").astype(np.float32, copy=False)


def store_words(words: Codes, level: int) -> Part:
    """Words of 1, 2 or 4 bytes: one after the other, or in planes of their bytes."""
    words = np.ascontiguousarray(words, words.dtype.newbyteorder("<"))
    if words.dtype.itemsize == 1 or level == 0:
        return store(words.tobytes(), pb.LAYOUT_PLAIN, level)
    orders = [
        lambda part: _store_planes(_planes(words[part]), level),
        lambda part: store(words[part].tobytes(), pb.LAYOUT_PLAIN, level),
    ]
    return _best(orders, words.nbytes, len(words))


def load_words(stream: pb.Stream, data: Bytes, count: int, width: int) -> Codes:
    """The inverse: `count` little-endian words of `width` bytes, as one fresh array of bytes."""
    if stream.layout == pb.LAYOUT_PLAIN:
        return np.frombuffer(bytearray(load(stream, data, count * width)), np.uint8)
    return np.stack(_load_planes(stream, data, count, width), axis=1).reshape(-1)


def _load_planes(stream: pb.Stream, data: Bytes, count: int, width: int) -> list[Codes]:
    if stream.layout != pb.LAYOUT_PLANES or len(stream.planes) != width or sum(stream.planes) != len(data):
        raise malformed(f"an order of bytes that words of {width} bytes do not have: {stream.layout}")
    view, planes = memoryview(data), []
    for size in stream.planes:
        piece, view = view[:size], view[size:]
        planes.append(np.frombuffer(piece if size == count else _decompress(piece, count), np.uint8))
    return planes


def store_codes(codes: Codes, bits: int, level: int) -> Part:
    """Numbers of b bits: packed, or as bytes where zstandard makes those smaller."""
    if level == 0 or bits == 8:
        return store(pack(codes, bits), pb.LAYOUT_PACKED, level)

    def as_bytes(part: slice) -> Part:
        if bits < 8:
            return store(codes[part].astype(np.uint8).tobytes(), pb.LAYOUT_PLAIN, level)
        return _store_planes(_planes(codes[part].astype("<u2")), level)

    orders = [as_bytes, lambda part: store(pack(codes[part], bits), pb.LAYOUT_PACKED, level)]
    return _best(orders, codes.nbytes, len(codes))


def load_codes(stream: pb.Stream, data: Bytes, count: int, bits: int, top: int) -> Codes:
    """The inverse; every number is at most `top`."""
    if stream.layout == pb.LAYOUT_PACKED:
        codes = unpack(load(stream, data, packed_bytes(count, bits)), count, bits)
    elif stream.layout == pb.LAYOUT_PLAIN and bits <= 8:
        codes = np.frombuffer(load(stream, data, count), np.uint8)
    elif stream.layout == pb.LAYOUT_PLANES and bits > 8:
        low, high = _load_planes(stream, data, count, 2)
        codes = low.astype(np.uint16) | (high.astype(np.uint16) << 8)
    else:
        raise malformed(f"an order of bytes that numbers of {bits} bits do not have: {stream.layout}")
    if codes.size and int(codes.max()) > top:
        raise malformed(f"a number above {top}")
    return codes.astype(code_type(bits), copy=False)


class _Local(threading.local):
    """zstandard's contexts are expensive to make and must not be shared between threads."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()


_local = _Local()


def _compressor(level: int) -> zstandard.ZstdCompressor:
    if level not in _local.compressors:
        _local.compressors[level] = zstandard.ZstdCompressor(level=level, write_content_size=True)
    return _local.compressors[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    return _local.decompressor
