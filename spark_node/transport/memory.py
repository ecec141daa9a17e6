"""Messages between peers of one process: handed over as they are, or as the bytes a real network would carry."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from spark_node.learning.messages import Message
from spark_node.package.errors import MissingFactor
from spark_node.package.peer import PeerCodec

_Key = tuple[str, str, str, int]  # receiver, sender, stage, round


Compute = Callable[..., Awaitable[Any]]


class MemoryNetwork:
    """What lies in every peer's mailbox, and what each kind of message has cost."""

    def __init__(self) -> None:
        self._mailbox: dict[_Key, asyncio.Future[Message]] = {}
        self.codecs: dict[str, PeerCodec] = {}
        self.bytes_sent: dict[str, int] = {"weights": 0, "package": 0, "control": 0}

    def transport(
        self, peer: str, codec: PeerCodec | None = None, compute: Compute | None = None
    ) -> "MemoryTransport | EncodedTransport":
        """The end of the network that belongs to one peer; with a codec, messages travel as bytes."""
        if codec is None or compute is None:
            return MemoryTransport(self, peer)
        self.codecs[peer] = codec
        return EncodedTransport(self, peer, codec, compute)

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


class EncodedTransport(MemoryTransport):
    """Every message becomes bytes and is read again at the other end: lossy codings show, and bytes are real ones."""

    def __init__(self, network: MemoryNetwork, peer: str, codec: PeerCodec, compute: Compute) -> None:
        super().__init__(network, peer)
        self._codec, self._compute = codec, compute

    async def send(self, peer: str, stage: str, k: int, message: Message) -> None:
        arrived, count = await self._compute(self._carry, peer, k, message)
        self._network.bytes_sent[message.kind] += count
        self._network.slot((peer, self._peer, stage, k)).set_result(arrived)

    def _carry(self, peer: str, k: int, message: Message) -> tuple[Message, int]:
        """What the neighbour decodes, and the bytes that took; a factor it no longer holds is sent again."""
        other = self._network.codecs[peer]
        data = b"".join(self._codec.encode(message, k, peer))
        try:
            return other.decode(data, k, self._peer), len(data)
        except MissingFactor:
            whole = b"".join(self._codec.encode(message, k, peer, whole=True))
            return other.decode(whole, k, self._peer), len(data) + len(whole)
