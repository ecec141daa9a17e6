"""What observers hear of a peer."""

import asyncio

import torch

from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.launch.service import Progress


def test_who_follows_a_peer_hears_the_rest_and_then_the_end() -> None:
    async def play() -> list[tuple[str, int, list[int]]]:
        progress = Progress("peer-0", 2)

        async def follow() -> list[tuple[str, int, list[int]]]:
            said = progress.follow(0)
            return [(now.state, now.round, [report.round for report in now.rounds]) async for now in said]

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
