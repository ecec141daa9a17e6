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

    async def deliver(self, peer: str, sender: str, stage: str, k: int, message: Message) -> None:
        """Put a message into a peer's mailbox."""
        self.slot((peer, sender, stage, k)).set_result(message)

    async def deliver_bytes(self, peer: str, sender: str, stage: str, k: int, data: bytes, compute: Compute) -> bool:
        """The same for coded messages; False where the peer no longer holds a factor that they only name."""
        try:
            message = await compute(self.codecs[peer].decode, data, k, sender)
        except MissingFactor:
            return False
        self.slot((peer, sender, stage, k)).set_result(message)
        return True

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
        await self._network.deliver(peer, self._peer, stage, k, message)

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
        """A factor that the neighbour no longer holds is sent again, with all the others."""
        for whole in (False, True):
            data = await self._compute(self._encode, message, k, peer, whole)
            self._network.bytes_sent[message.kind] += len(data)
            if await self._network.deliver_bytes(peer, self._peer, stage, k, data, self._compute):
                return

    def _encode(self, message: Message, k: int, peer: str, whole: bool) -> bytes:
        return b"".join(self._codec.encode(message, k, peer, whole=whole))
