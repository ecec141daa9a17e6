"""Messages that have come and are not read yet: those of this round, and of a few rounds ahead."""

import asyncio
import time
from collections.abc import Callable, Iterable

from spark_node.generated.spark.v1 import peer_pb2 as pb

_Key = tuple[int, str, str]  # round, stage, sender


class Mailbox:
    """Bounded by construction: one message a neighbour, stage and round, and only `ahead` rounds of them."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._messages: dict[_Key, memoryview] = {}
        self._closed: set[tuple[int, str]] = set()
        self._changed = asyncio.Condition()
        self.round = 0

    def admits(self, k: int, stage: str, sender: str) -> "pb.Reason":
        """Whether such a message may come now, and if not, why."""
        if k < self.round or (k, stage) in self._closed:
            return pb.REASON_STALE
        if k > self.round + self._ahead:
            return pb.REASON_EARLY
        if (k, stage, sender) in self._messages:
            return pb.REASON_DUPLICATE
        return pb.REASON_NONE

    def held(self, sender: str) -> int:
        """Bytes of a sender that are not read yet."""
        return sum(len(data) for key, data in self._messages.items() if key[2] == sender)

    def has_any(self, k: int) -> bool:
        """Whether somebody is in that round already."""
        return any(key[0] >= k for key in self._messages)

    async def put(self, k: int, stage: str, sender: str, data: memoryview) -> None:
        async with self._changed:
            self._messages[(k, stage, sender)] = data
            self._changed.notify_all()

    async def give_up(self) -> None:
        """Somebody who was waited for will not come: look again who is still due."""
        async with self._changed:
            self._changed.notify_all()

    async def enter(self, k: int) -> None:
        """Round k begins: what came for earlier rounds is forgotten."""
        async with self._changed:
            self.round = k
            self._messages = {key: data for key, data in self._messages.items() if key[0] >= k}
            self._closed = {key for key in self._closed if key[0] >= k}

    async def take(
        self,
        k: int,
        stage: str,
        due: Callable[[], Iterable[str]],
        seconds: float | None,
        seen: Callable[[float], None] = lambda _: None,
    ) -> dict[str, memoryview]:
        """The messages of a stage once all senders that are still due have come, or when the time is up."""
        start, arrived = time.monotonic(), set[str]()

        def complete() -> bool:
            for sender in due():
                if sender not in arrived and (k, stage, sender) in self._messages:
                    arrived.add(sender)
                    seen(time.monotonic() - start)
            return all((k, stage, sender) in self._messages for sender in due())

        async with self._changed:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait_for(complete)
            except TimeoutError:
                pass
            self._closed.add((k, stage))
            found = [key for key in self._messages if key[:2] == (k, stage)]
            return {key[2]: self._messages.pop(key) for key in found}
