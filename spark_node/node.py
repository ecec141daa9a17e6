"""One peer's round. Who the neighbours are comes from `membership`, what is said from `algorithm`."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from spark_node.learning.algorithm import Algorithm
from spark_node.learning.messages import Message, check
from spark_node.transport import Transport

log = logging.getLogger(__name__)


class Compute(Protocol):
    """Runs work away from the event loop and gives its result; peers of one host take turns with heavy work."""

    def __call__(self, work: Callable[..., Any], *arguments: Any, heavy: bool = False) -> Awaitable[Any]: ...


class Neighbours(Protocol):
    """Who is whose neighbour in which round."""

    def neighbours(self, peer: str, k: int) -> tuple[str, ...]: ...


@dataclass
class Timings:
    """Seconds by part of the round."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """What was measured since the last call."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


@dataclass(frozen=True)
class RoundResult:
    """What a peer tells of a finished round."""

    expected: int
    """Messages that its neighbours owed it in this round."""
    used: int
    seconds: dict[str, float]
    facts: dict[str, float]


class Node:
    """A peer: its learner, its neighbours, its way to them."""

    def __init__(
        self,
        peer: str,
        algorithm: Algorithm,
        membership: Neighbours,
        transport: Transport,
        compute: Compute,
        timings: Timings,
        *,
        classes: int,
        deadline: float | None = None,
    ) -> None:
        self.peer, self.algorithm = peer, algorithm
        self._membership, self._transport, self._compute = membership, transport, compute
        self._timings, self._classes, self._deadline = timings, classes, deadline
        self._sending: set[asyncio.Task[None]] = set()

    async def round(self, k: int) -> RoundResult:
        """Round k of Algorithm 1: in each stage say one's part, hear the neighbours', fold it in."""
        neighbours = self._membership.neighbours(self.peer, k)
        expected, sound = neighbours, set[str]()
        for stage in self.algorithm.stages:
            heavy = stage == self.algorithm.stages[-1]
            outgoing = await self._compute(self.algorithm.outgoing, stage, k, neighbours, heavy=heavy)
            sending = {peer: self._start(self._transport.send(peer, stage, k, m)) for peer, m in outgoing.items()}
            with self._timings(f"waiting, {stage}"):
                arrived = await self._transport.gather(stage, k, expected, self._deadline)
                await asyncio.gather(*(task for peer, task in sending.items() if peer in arrived))
            sound = await self._compute(self._incorporate, stage, k, arrived, heavy=heavy)
            expected = tuple(peer for peer in expected if peer in sound)  # nobody is waited for twice in a round
        return RoundResult(len(neighbours), len(sound), self._timings.take(), self.algorithm.facts())

    def _start(self, sending: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Send beside everything else; one that nobody waits for goes on by itself."""
        task = asyncio.get_running_loop().create_task(sending)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return task

    def _incorporate(self, stage: str, k: int, arrived: dict[str, Message]) -> set[str]:
        """Fold in what came, but for nonsense; whose it was."""
        sound = {peer: m for peer, m in arrived.items() if self._accept(peer, stage, k, m)}
        self.algorithm.incorporate(stage, k, sound)
        return set(sound)

    def _accept(self, peer: str, stage: str, k: int, message: Message) -> bool:
        """A neighbour that sends nonsense is left out of the round."""
        reason = check(message, self.algorithm.weights.numel(), self.algorithm.package_parameters, self._classes)
        if reason is not None:
            log.warning("round %d, %s: %s sent %s; left out", k, stage, peer, reason)
        return reason is None
