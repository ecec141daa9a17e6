"""What observers hear of a peer."""

import asyncio
import gc

import torch

from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.launch.service import Progress


def test_who_follows_a_peer_hears_the_rest_and_then_the_end() -> None:
    async def play() -> list[tuple[str, int, list[int]]]:
        progress = Progress("peer-0", 2, 256)

        async def follow() -> list[tuple[str, int, list[int]]]:
            said = progress.follow(0)
            heard = [pb.Progress.FromString(data) async for data in said]
            return [(now.state, now.round, [report.round for report in now.rounds]) for now in heard]

        following = asyncio.create_task(follow())
        await progress.set("training", 1)
        await asyncio.sleep(0.05)
        await progress.finished(pb.RoundReport(round=1), torch.zeros(3))
        await progress.set("finished")
        await progress.close()
        return await asyncio.wait_for(following, 10)

    heard = asyncio.run(play())
    assert heard[0][:2] == ("training", 1)
    assert heard[-1][0] == "finished"
    assert [k for _, _, rounds in heard for k in rounds] == [1]


def test_what_is_said_of_a_round_is_all_that_was_reported_and_the_oldest_rounds_go() -> None:
    async def play() -> "pb.Progress":
        progress = Progress("peer-0", 2, 256)
        progress.control = lambda: 77
        for k in range(1, 401):
            await progress.finished(report(k), torch.zeros(3))
        await progress.close()
        (data,) = [data async for data in progress.follow(300)]
        (whole,) = [data async for data in progress.follow(0)]
        assert [r.round for r in pb.Progress.FromString(whole).rounds] == list(range(145, 401))
        return pb.Progress.FromString(data)

    said = asyncio.run(play())
    assert (said.name, said.control_bytes) == ("peer-0", 77)
    assert list(said.rounds) == [report(k) for k in range(301, 401)]


def report(k: int) -> "pb.RoundReport":
    edges = [pb.EdgeBytes(peer=f"peer-{i}", kind="weights", sent=k * i, messages=1) for i in range(3)]
    return pb.RoundReport(round=k, expected=3, used=2, seconds=0.5, facts={"loss": 0.25}, bytes=edges, finished=1e9)


def test_no_report_is_kept_as_an_object() -> None:
    """Ten times the size of its bytes, and a peer keeps hundreds of them."""

    async def play() -> list[object]:
        progress = Progress("peer-0", 1, 256)
        for k in range(1, 20):
            await progress.finished(report(k), torch.zeros(3))
        gc.collect()
        return [found for found in gc.get_objects() if type(found) is pb.RoundReport]

    assert asyncio.run(play()) == []
