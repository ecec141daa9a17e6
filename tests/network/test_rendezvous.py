"""A peer's line to a real orchestrator: when it speaks, and when there is nothing to say."""

import asyncio
import logging
from itertools import pairwise

from spark_node.config import load
from spark_node.rendezvous import Rendezvous
from spark_node.security.identity import Role
from spark_node.security.tls import security_of
from tests.network.test_orchestrator import Running, Start, small, speaks

LEASE = 6.0


async def joined(orchestrator: Running) -> Rendezvous:
    """The only peer of a run, which has started."""
    settings = load(flags={"security.tls": "off"}, environment={}).security
    security = security_of(settings, Role.PEER, "peer-000")
    line = Rendezvous(orchestrator.address, "peer-000", "127.0.0.1:5000", "", "sig", security)
    await line.join(10.0)
    return line


@speaks
def test_a_round_that_is_reported_renews_the_lease_and_nothing_more_is_said(start: Start) -> None:
    async def life() -> list[int]:
        line = await joined(start(*small(1, LEASE)))
        keeping = asyncio.create_task(line.keep())
        await line.started.wait()
        sent = []
        for k in range(1, 6):  # together they take longer than half a lease
            await line.entering(k)
            await asyncio.sleep(1.0)
            sent.append(line.bytes_sent)
        await asyncio.sleep(0.75 * LEASE)
        sent.append(line.bytes_sent)
        keeping.cancel()
        await line.close()
        return sent

    *rounds, quiet = asyncio.run(life())
    one = rounds[1] - rounds[0]  # what a report takes
    assert [after - before for before, after in pairwise(rounds)] == [one] * 4
    assert quiet - rounds[-1] == one  # half a lease after the last report it renews by itself


@speaks
def test_an_orchestrator_that_does_not_answer_is_asked_again_before_the_lease_is_over(start: Start) -> None:
    tried: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tried.append(record.getMessage())

    logger = logging.getLogger("spark_node.rendezvous")
    logger.addHandler(Heard())
    logger.setLevel(logging.INFO)
    orchestrator = start(*small(1, LEASE))

    async def life() -> None:
        line = await joined(orchestrator)
        keeping = asyncio.create_task(line.keep())
        await line.started.wait()
        orchestrator.process.kill()
        await asyncio.sleep(0.95 * LEASE)
        keeping.cancel()
        await line.close()

    asyncio.run(life())
    assert len(tried) >= 2
    assert all("going on without it" in said for said in tried)
