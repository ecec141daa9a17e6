"""How messages travel between peers."""

from collections.abc import Iterable
from typing import Protocol

from spark_node.learning.messages import Message


class Transport(Protocol):
    """One peer's way to the others."""

    async def send(self, peer: str, stage: str, k: int, message: Message) -> None:
        """Hand a message of a stage of round k to a neighbour. Returns when it is on its way."""

    async def gather(self, stage: str, k: int, peers: Iterable[str], deadline: float | None) -> dict[str, Message]:
        """The messages of that stage from these peers: all of them, or those that came within `deadline` seconds.

        And those that had come from other neighbours of the round by then: nobody waits for them, but they count.
        """
