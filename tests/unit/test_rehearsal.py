"""What a host does before it forks: a round by itself, of which nothing is left but warm libraries."""

import asyncio
import logging
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from spark_node.config import Config
from spark_node.launch import peer
from spark_node.launch.peer import PeerJob
from spark_node.launch.rehearsal import rehearse
from spark_node.model import build, flatten

SHAPE, CLASSES = (1, 4, 4), 3


def job(name: str, config: Config, **more: Any) -> PeerJob:
    module = build(config.model, SHAPE, CLASSES, 0)
    inputs = torch.rand(6, *SHAPE, generator=torch.Generator().manual_seed(len(name)))
    return PeerJob(name, config, module, inputs, torch.arange(6) % CLASSES, CLASSES, **more)


@pytest.mark.parametrize("algorithm", ["spark", "ntk-dfl", "dpsgd", "dfedavg", "dfedavgm", "dfedsam"])
def test_a_rehearsal_computes_a_round_and_changes_nothing(
    algorithm: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    from spark_node.package.peer import PeerCodec

    plain = PeerCodec.decode
    monkeypatch.setattr(PeerCodec, "decode", lambda self, *given: decoded.append(plain(self, *given)) or decoded[-1])
    config = Config().replace(run__algorithm=algorithm)
    jobs = [job("peer-000", config), job("peer-001", config)]
    before = [(flatten(j.module).clone(), j.inputs.clone(), torch.get_num_threads()) for j in jobs]
    with caplog.at_level(logging.INFO, "spark_node.launch.rehearsal"):
        rehearse(jobs)
    assert not caplog.records  # nothing failed
    assert len(decoded) >= 2
    for j, (w, x, threads) in zip(jobs, before, strict=True):
        assert torch.equal(flatten(j.module), w)
        assert torch.equal(j.inputs, x)
        assert torch.get_num_threads() == threads


def test_what_fails_in_a_rehearsal_is_left_to_the_peers_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    bad = job("peer-000", Config())
    bad.inputs.resize_(2, 1, 2, 2)
    with caplog.at_level(logging.INFO, "spark_node.launch.rehearsal"):
        rehearse([bad, job("peer-001", Config())])
    assert [record.message for record in caplog.records] == ["the rehearsal failed"]


def test_an_algorithm_of_the_user_is_not_rehearsed() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("called")

    rehearse([job("peer-000", Config(), learner=never), job("peer-001", Config(), learner=never)])


_COUNT_THREADS = """
import os, torch
from tests.unit.test_rehearsal import job, rehearse, Config
from spark_node.launch.peer import _one_thread

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(1)
a, before = torch.rand(600, 800), threads()
rehearse([job("peer-000", Config()), job("peer-001", Config())])
rehearsed, pool = threads(), _one_thread()
pool.submit(torch.mm, a, a.T).result()
pool.submit(torch.mm, a, a.T).result()
print(rehearsed - before, threads() - rehearsed)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_rehearsal_starts_no_thread_and_a_peers_pool_no_second_one() -> None:
    """A process with threads cannot be forked safely; a pool whose products take every core fights all other peers."""
    found = subprocess.run([sys.executable, "-c", _COUNT_THREADS], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "1"]


def test_what_a_peer_does_aside_has_one_thread_however_much_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread more for every moment in which two things came together was a peer that grew for hours."""
    used = set()

    class Busy:
        def __init__(self, *_: Any) -> None:
            pass

        async def run(self) -> None:
            def work() -> None:
                time.sleep(0.02)
                used.add(threading.get_ident())

            await asyncio.gather(*(asyncio.to_thread(work) for _ in range(8)))

    monkeypatch.setattr(peer, "PeerProcess", Busy)
    asyncio.run(peer._run(job("peer-000", Config()), None, None, None))
    assert len(used) == 1
