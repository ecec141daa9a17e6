"""Deliveries as bytes, and back. protobuf would copy a large field four times on its way out and twice on its way in.

Delivery { Envelope envelope = 1; Chunk chunk = 2; }      Chunk { uint64 total = 1, offset = 2; bytes data = 3; }
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from spark_node.generated.spark.v1 import package_pb2, peer_pb2
from spark_node.package.chunks import cut
from spark_node.package.errors import malformed

_CHUNK_TAG, _DATA_TAG = b"\x12", b"\x1a"  # fields 2 and 3, length-delimited
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Frame:
    """A Delivery as it came; the chunk's data is a view of the bytes that gRPC handed over."""

    envelope: "peer_pb2.Envelope | None"
    total: int
    offset: int
    data: memoryview


def read(raw: bytes) -> Frame:
    """A serialised Delivery; PackageError where it is none."""
    envelope, chunk = None, memoryview(b"")
    for field, value in _fields(memoryview(raw)):
        if field == 1 and isinstance(value, memoryview):
            envelope = peer_pb2.Envelope()
            try:
                envelope.ParseFromString(bytes(value))
            except DecodeError:
                raise malformed("an envelope that is none") from None
        elif field == 2 and isinstance(value, memoryview):
            chunk = value
    total, offset, data = 0, 0, memoryview(b"")
    for field, value in _fields(chunk):
        if field == 1 and isinstance(value, int):
            total = value
        elif field == 2 and isinstance(value, int):
            offset = value
        elif field == 3 and isinstance(value, memoryview):
            data = value
    return Frame(envelope, total, offset, data)


def _fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of every field of a serialised message; fields that we do not know are passed over."""
    place = 0
    while place < len(view):
        tag, place = _read_varint(view, place)
        kind = tag & 7
        if kind == _VARINT:
            number, place = _read_varint(view, place)
            yield tag >> 3, number
        elif kind in (_BYTES, _FIXED64, _FIXED32):
            length = {_FIXED64: 8, _FIXED32: 4}.get(kind)
            if length is None:
                length, place = _read_varint(view, place)
            if length > len(view) - place:
                raise malformed("a delivery that ends early")
            if kind == _BYTES:
                yield tag >> 3, view[place : place + length]
            place += length
        else:
            raise malformed("a delivery that is none")


def _read_varint(view: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(view) or shift > 63:
            raise malformed("a delivery that ends early")
        byte = view[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value & (2**64 - 1), place


def deliveries(envelope: "peer_pb2.Envelope", pieces: Sequence[bytes], size: int) -> Iterator[bytes]:
    """A message as serialised Delivery messages; the first holds the envelope."""
    total = sum(map(len, pieces))
    said = peer_pb2.Delivery(envelope=envelope).SerializeToString()
    for offset, views in cut(pieces, size):
        length = sum(map(len, views))
        place = package_pb2.Chunk(total=total, offset=offset).SerializeToString() + _DATA_TAG + _varint(length)
        yield b"".join([said, _CHUNK_TAG, _varint(len(place) + length), place, *views])
        said = b""


def _varint(value: int) -> bytes:
    """A whole number in groups of seven bits, lowest first."""
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])
