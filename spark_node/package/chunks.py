"""A message in chunks, so that no message limit bounds its size, and back within a limit of our own."""

from collections.abc import Iterator, Sequence

import numpy as np

from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.package.errors import PackageError, Refusal, malformed


def cut(pieces: Sequence[bytes], size: int) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset, views that make up a chunk of `size` bytes; the last may be shorter). Nothing is copied."""
    offset, room, chunk = 0, size, list[memoryview]()
    for piece in pieces:
        view = memoryview(piece)
        while view:
            taken, view = view[:room], view[room:]
            chunk.append(taken)
            room -= len(taken)
            if room == 0:
                yield offset, chunk
                offset, room, chunk = offset + size, size, []
    if chunk:
        yield offset, chunk


def split(pieces: Sequence[bytes], size: int) -> Iterator[pb.Chunk]:
    """The chunks of a message that is given in pieces."""
    total = sum(map(len, pieces))
    for offset, views in cut(pieces, size):
        yield pb.Chunk(total=total, offset=offset, data=b"".join(views))


class Assembly:
    """Puts chunks together in order. What is held never exceeds what the sender announced, nor the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._total: int | None = None
        self._done = 0
        self._data = memoryview(b"")

    def add(self, chunk: pb.Chunk) -> None:
        self.put(chunk.total, chunk.offset, chunk.data)

    def put(self, total: int, offset: int, data: bytes | memoryview) -> None:
        """A chunk's fields, as they lie in a Chunk."""
        if self._total is None:
            if total > self._limit:
                raise PackageError(Refusal.TOO_LARGE, f"{total:,} bytes announced; at most {self._limit:,}")
            self._total = total
        if total != self._total or offset != self._done:
            raise malformed(f"a chunk of offset {offset} where {self._done} is due")
        if not data or self._done + len(data) > self._total:
            raise malformed("a chunk that is empty or passes the announced size")
        if len(data) == self._total:
            self._data = memoryview(data)
        else:
            if not self._done:
                self._data = np.empty(self._total, np.uint8).data  # pages come when they are written to
            self._data[self._done : self._done + len(data)] = data
        self._done += len(data)

    def finish(self) -> memoryview:
        """The whole message."""
        if self._total is None or self._done != self._total:
            raise malformed(f"{self._done:,} of {self._total or 0:,} announced bytes came")
        return self._data
