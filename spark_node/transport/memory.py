"""Messages between peers of one process: handed over as they are, with the bytes they stand for counted."""

import asyncio
from collections.abc import Iterable

from spark_node.learning.messages import Message

_Key = tuple[str, str, str, int]  # receiver, sender, stage, round


class MemoryNetwork:
    """What lies in every peer's mailbox, and what each kind of message has cost."""

    def __init__(self) -> None:
        self._mailbox: dict[_Key, asyncio.Future[Message]] = {}
        self.bytes_sent: dict[str, int] = {"weights": 0, "package": 0, "control": 0}

    def transport(self, peer: str) -> "MemoryTransport":
        """The end of the network that belongs to one peer."""
        return MemoryTransport(self, peer)

    def slot(self, key: _Key) -> "asyncio.Future[Message]":
        """Where one message will lie, whether it is sent or awaited first."""
        if key not in self._mailbox:
            self._mailbox[key] = asyncio.get_running_loop().create_future()
        return self._mailbox[key]

    def take(self, key: _Key) -> None:
        """Forget a message: it was read, or nobody waits for it any more."""
        self._mailbox.pop(key, None)


class MemoryTransport:
    """One peer's end of a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, peer: str) -> None:
        self._network, self._peer = network, peer

    async def send(self, peer: str, stage: str, k: int, message: Message) -> None:
        self._network.bytes_sent[message.kind] += message.nbytes
        self._network.slot((peer, self._peer, stage, k)).set_result(message)

    async def gather(self, stage: str, k: int, peers: Iterable[str], deadline: float | None) -> dict[str, Message]:
        slots = {peer: self._network.slot((self._peer, peer, stage, k)) for peer in peers}
        if slots:
            await asyncio.wait(slots.values(), timeout=deadline)
        for peer in slots:
            self._network.take((self._peer, peer, stage, k))
        return {peer: slot.result() for peer, slot in slots.items() if slot.done()}
