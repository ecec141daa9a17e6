"""Deliveries as bytes. A protobuf message with a large field would be copied four times before it leaves; this once.

Delivery { Envelope envelope = 1; Chunk chunk = 2; }      Chunk { uint64 total = 1, offset = 2; bytes data = 3; }
"""

from collections.abc import Iterator, Sequence

from spark_node.generated.spark.v1 import package_pb2, peer_pb2
from spark_node.package.chunks import cut

_CHUNK_TAG, _DATA_TAG = b"\x12", b"\x1a"  # fields 2 and 3, length-delimited


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
