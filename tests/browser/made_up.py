"""A live page of a network that is made up, message by message: `python -m tests.browser.made_up 300 8000`.

The messages are those that peers and orchestrator send, the page and its server are the real ones.
"""

import asyncio
import sys
from collections.abc import Iterator

import numpy as np

from spark_node.config import load
from spark_node.generated.spark.v1 import orchestrator_pb2, peer_pb2
from spark_node.membership import Roster, peer_names
from spark_node.observe import dashboard
from spark_node.observe.live import Live
from spark_node.observe.records import RoundRecord, RunInfo


def rounds(live: Live, peers: int, count: int) -> Iterator[None]:
    """Let the network go through its rounds, a step at a time: an eighth of the peers ends a round."""
    config, names, dice = live.config, peer_names(peers), np.random.default_rng(5)
    run = orchestrator_pb2.RunDescription(
        run="made-up", seed=1, topology="regular", degree=config.topology.degree, fresh=True, started=True
    )
    members = [orchestrator_pb2.Member(name=name, address="127.0.0.1:1") for name in names]
    live.described(run, orchestrator_pb2.Members(version=1, from_round=1, members=members))
    roster = Roster(1, config.topology)
    roster.add(1, 1, dict.fromkeys(names, ""))
    lost: set[str] = set()
    for k in range(1, count + 1):
        sums = {"weights": 0, "package": 0, "control": 800 * peers}
        if k == 4:
            lost = set(names[7:9])
            for name in sorted(lost):
                live.line_lost(name)
        for i, name in enumerate(names):
            if name in lost:
                continue
            others = roster.neighbours(name, k)
            edges = [
                peer_pb2.EdgeBytes(peer=peer, kind=kind, sent=int(size * dice.uniform(0.7, 1.0)))
                for peer in others
                if peer not in lost
                for kind, size in (("weights", 90_000), ("package", 240_000))
            ]
            for edge in edges:
                sums[edge.kind] += edge.sent
            used = sum(peer not in lost for peer in others)
            report = peer_pb2.RoundReport(
                round=k, expected=len(others), used=used, seconds=dice.uniform(1.4, 2.6), finished=float(k), bytes=edges
            )
            report.facts["loss"] = 1.9 * 0.8**k + dice.uniform(0, 0.1)
            if k == 6 and i % 40 == 3:
                report.refused["stale"] = 2
            said = peer_pb2.Progress(name=name, state="training", round=k, rounds=[report], control_bytes=500 * k)
            live.heard(said)
            live.progress(k, i + 1, peers)
            if i % (peers // 8 or 1) == 0:
                yield
        base = 0.9 - 0.75 * 0.75**k
        accuracy = {name: float(np.clip(dice.normal(base - 0.05, 0.03), 0, 1)) for name in names if name not in lost}
        live.scored(accuracy)
        live.round_done(
            RoundRecord(
                round=k,
                aggregated_accuracy=base,
                client_accuracy=tuple(accuracy.values()),
                bytes_sent=sums,
                seconds={
                    "round": 2.6,
                    "evaluation": 0.3,
                    "jacobian": 0.5 * peers,
                    "evolution": 0.7 * peers,
                    "waiting, weights": 0.2 * peers,
                    "waiting, package": 0.35 * peers,
                    "encode": 0.1 * peers,
                },
                neighbours_expected=5 * peers,
                neighbours_used=5 * peers - len(lost),
                loss=1.9 * 0.8**k,
            )
        )
        yield


def make(peers: int, count: int, degree: int = 5) -> Live:
    """The page's state before the first round."""
    config = load(
        flags={"run.nodes": peers, "run.rounds": count, "topology.degree": degree, "run.target_accuracy": 0.85},
        environment={},
    )
    return Live(config, RunInfo(79_510, peers, (200,) * peers, 10_000))


async def serve(peers: int, port: int, pause: float, count: int = 30, upto: int = 1000) -> None:
    """Until it is stopped: `upto` rounds with a pause after each step."""
    listener = dashboard.bind("127.0.0.1", port)
    live = make(peers, count)
    server = await dashboard.start(listener, "127.0.0.1", live)
    print(dashboard.address(listener), flush=True)
    for _ in rounds(live, peers, min(count, upto)):
        await asyncio.sleep(pause)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    given = [float(word) for word in sys.argv[1:]]
    asyncio.run(serve(int(given[0]), int(given[1]), *given[2:3] or [0.5], *(int(word) for word in given[3:])))
