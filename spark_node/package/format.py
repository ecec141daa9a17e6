"""What both ends of a message share: the terms of a run, the frame, the digests.

"SPRK" | length of the header | header | digest of the header | streams of the blocks
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from spark_node.config import PackageSettings
from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.model import ParameterLayout
from spark_node.package.streams import Bytes

FORMAT = 1
MAGIC = b"SPRK"
DIGEST = 16
PREFIX = struct.Struct("<4sI")


@dataclass(frozen=True)
class Terms:
    """What all peers of a run agree on before the first message."""

    run: str
    layout: ParameterLayout
    """Of the model: what weights are."""
    sketched: ParameterLayout
    """Of the projected parameters: what packages are about. The same as `layout` without a projection."""
    classes: int
    settings: PackageSettings

    def specification(self) -> pb.Specification:
        s = self.settings
        return pb.Specification(
            projection=s.projection,
            sketch=s.sketch if s.projection != "none" else "",
            sketch_size=s.sketch_size if s.projection != "none" else 0,
            fresh_sketch=s.fresh_sketch and s.projection != "none",
            keep=s.keep,
            bits=s.bits,
            max_error=s.max_error,
            rounding=s.rounding,
        )


def digest(*pieces: Bytes) -> bytes:
    state = blake2b(digest_size=DIGEST)
    for piece in pieces:
        state.update(piece)
    return state.digest()


def block_digest(block: pb.Block, streams: Sequence[Bytes]) -> bytes:
    """Names a block by its description, as 64-bit numbers with every list after its length, and its bytes."""
    said = [block.role, block.layer, len(block.shape), *block.shape, block.coding, block.bits, block.levels]
    said += [block.group, block.pattern, block.kept, len(block.streams)]
    for stream in block.streams:
        said += [stream.layout, stream.zstd, stream.bytes, len(stream.planes), *stream.planes]
    return digest(struct.pack(f"<{len(said)}Q", *(number % 2**64 for number in said)), *streams)


def rows_of(role: int, shape: Sequence[int]) -> int:
    """Rows with a scale of their own: a sample, or a sample and class."""
    if role in (pb.ROLE_DENSE, pb.ROLE_SIGNALS):
        return shape[0] * shape[1]
    return shape[0]
