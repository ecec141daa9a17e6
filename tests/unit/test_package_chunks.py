"""Messages in chunks and back, whatever their sizes; chunks that do not add up are refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.package.chunks import Assembly, split
from spark_node.package.errors import PackageError, Refusal
from tests.unit.packages import grows_by_less_than

DATA = bytes(range(250)) * 4


def assembled(chunks: list[pb.Chunk], limit: int = 10**6) -> bytes:
    assembly = Assembly(limit)
    for chunk in chunks:
        assembly.add(chunk)
    return bytes(assembly.finish())


def refused(chunks: list[pb.Chunk], limit: int = 10**6) -> Refusal:
    with pytest.raises(PackageError) as caught:
        assembled(chunks, limit)
    return caught.value.refusal


@given(st.lists(st.binary(max_size=60), max_size=12), st.integers(1, 80))
@settings(deadline=None)
def test_pieces_of_any_size_come_back_from_chunks_of_any_size(pieces: list[bytes], size: int) -> None:
    whole = b"".join(pieces)
    chunks = list(split(pieces, size))
    assert all(len(chunk.data) == size for chunk in chunks[:-1])
    assert len(chunks) == -(-len(whole) // size)
    assert [chunk.offset for chunk in chunks] == list(range(0, len(whole), size))
    assert {chunk.total for chunk in chunks} <= {len(whole)}
    if whole:
        assert assembled(chunks) == whole
    else:
        assert refused(chunks) is Refusal.MALFORMED


@pytest.mark.parametrize("size", [1, 7, 999, 1000, 1001, 2**20])
def test_a_message_of_exactly_the_limit_is_taken_and_one_byte_more_is_not(size: int) -> None:
    chunks = list(split([DATA], size))
    assert assembled(chunks, len(DATA)) == DATA
    assert refused(chunks, len(DATA) - 1) is Refusal.TOO_LARGE


def test_the_announced_size_is_refused_before_any_data_is_kept() -> None:
    assembly = Assembly(1000)
    with pytest.raises(PackageError) as caught:
        assembly.add(pb.Chunk(total=2**60, offset=0, data=b"x"))
    assert caught.value.refusal is Refusal.TOO_LARGE
    with pytest.raises(PackageError, match="0 of 0"):
        assembly.finish()


def test_an_announced_size_takes_no_memory_before_its_data_come() -> None:
    with grows_by_less_than(2**26):
        Assembly(2**28).add(pb.Chunk(total=2**28, offset=0, data=b"x"))


@given(st.permutations(range(5)))
@settings(deadline=None)
def test_chunks_out_of_order_are_refused(order: list[int]) -> None:
    chunks = list(split([DATA], 200))
    if order == sorted(order):
        assert assembled([chunks[i] for i in order]) == DATA
    else:
        assert refused([chunks[i] for i in order]) is Refusal.MALFORMED


@pytest.mark.parametrize("place", range(5))
def test_missing_and_repeated_chunks_are_refused(place: int) -> None:
    chunks = list(split([DATA], 200))
    assert refused(chunks[:place] + chunks[place + 1 :]) is Refusal.MALFORMED
    assert refused(chunks[: place + 1] + chunks[place:]) is Refusal.MALFORMED


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [pb.Chunk(total=5, offset=0, data=b"")],
        [pb.Chunk(total=0, offset=0, data=b"")],
        [pb.Chunk(total=0, offset=0, data=b"x")],
        [pb.Chunk(total=5, offset=0, data=b"123456")],
        [pb.Chunk(total=5, offset=0, data=b"123"), pb.Chunk(total=5, offset=3, data=b"456")],
        [pb.Chunk(total=5, offset=0, data=b"123"), pb.Chunk(total=5, offset=3, data=b"")],
        [pb.Chunk(total=5, offset=1, data=b"1234")],
        [pb.Chunk(total=5, offset=0, data=b"123"), pb.Chunk(total=6, offset=3, data=b"45")],
        [pb.Chunk(total=5, offset=0, data=b"123"), pb.Chunk(total=4, offset=3, data=b"4")],
        [pb.Chunk(total=5, offset=0, data=b"12345"), pb.Chunk(total=5, offset=5, data=b"6")],
    ],
    ids=[
        "none", "empty", "nothing announced", "more than nothing", "more than announced", "a byte too many",
        "an empty one behind", "a late start", "another total", "a smaller total", "one after the last",
    ],
)  # fmt: skip
def test_chunks_that_do_not_add_up_are_malformed(chunks: list[pb.Chunk]) -> None:
    assert refused(chunks) is Refusal.MALFORMED


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.binary(max_size=20)), max_size=6))
@settings(deadline=None)
def test_what_is_assembled_is_what_was_announced(entries: list[tuple[int, int, bytes]]) -> None:
    chunks = [pb.Chunk(total=total, offset=offset, data=data) for total, offset, data in entries]
    whole = b"".join(data for _, _, data in entries)
    offsets = [sum(len(data) for _, _, data in entries[:i]) for i in range(len(entries))]
    sound = whole and all(data for _, _, data in entries) and [offset for _, offset, _ in entries] == offsets
    if sound and len(whole) <= 30 and {total for total, _, _ in entries} == {len(whole)}:
        assert assembled(chunks, 30) == whole
    else:
        assert refused(chunks, 30) in (Refusal.MALFORMED, Refusal.TOO_LARGE)
