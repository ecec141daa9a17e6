"""One peer's coder: what it remembers from one message to the next.

- a message that goes to several neighbours is coded once;
- what int8 weights have lost is added to the next ones (error feedback);
- factors that do not depend on the weights travel once between two peers and are named by their digest afterwards;
- the weights at which neighbours were asked to linearise, for packages that leave them out.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from spark_node.learning.messages import Message, Weights, kind_of
from spark_node.package.format import Terms, digest
from spark_node.package.reader import decode, inspect
from spark_node.package.streams import Bytes
from spark_node.package.tensors import Coding
from spark_node.package.writer import CodedBlock, CodedMessage, Random, encode
from spark_node.seeds import stream

_SENT = 4096
"""Factors that a peer remembers having sent, over all neighbours."""
_CODED = 4
"""Coded factors kept for reuse."""


class FactorCache:
    """Streams by digest; the oldest go when `limit` bytes are passed."""

    def __init__(self, limit: int) -> None:
        self._limit, self.size = limit, 0
        self._streams: OrderedDict[bytes, tuple[Bytes, ...]] = OrderedDict()

    def get(self, name: bytes) -> tuple[Bytes, ...] | None:
        found = self._streams.get(name)
        if found is not None:
            self._streams.move_to_end(name)
        return found

    def put(self, name: bytes, streams: tuple[Bytes, ...]) -> None:
        copied = tuple(bytes(s) for s in streams)  # not a view that holds the whole message
        if name in self._streams or _size(copied) > self._limit:
            return
        self._streams[name] = copied
        self.size += _size(copied)
        while self.size > self._limit:
            self.size -= _size(self._streams.popitem(last=False)[1])


def _size(streams: tuple[Bytes, ...]) -> int:
    return sum(map(len, streams))


class PeerCodec:
    """Encodes what one peer says and decodes what it hears. Threads may share it."""

    def __init__(self, terms: Terms, peer: str, seed: int, device: torch.device | str = "cpu") -> None:
        self.terms, self.peer = terms, peer
        self._seed, self._device = seed, device
        self._lock = threading.Lock()
        self._latest: dict[str, tuple[Message, int, CodedMessage]] = {}
        self._wired: tuple[CodedMessage, set[bytes], list[bytes]] | None = None
        self._coded: OrderedDict[tuple[bytes, Coding], CodedBlock] = OrderedDict()
        self._sent: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._named: tuple[tuple[object, ...], Tensor, bytes] | None = None
        self._held = FactorCache(terms.settings.factor_cache_bytes)
        self._asked: OrderedDict[int, Tensor] = OrderedDict()
        self.feedback: dict[str, Tensor] = {}
        """What the coding of weights ("w") and velocity ("v") still owes."""

    def encode(self, message: Message, k: int, to: str, *, whole: bool = False) -> list[bytes]:
        """The bytes for one neighbour, in pieces. `whole`: name nothing (the neighbour said it holds too little)."""
        with self._lock:
            coded = self._encode_once(message, k)
            known = set() if whole else {name for name in coded.factors if (to, name) in self._sent}
            for name in coded.factors:
                self._sent[(to, name)] = None
                self._sent.move_to_end((to, name))
            while len(self._sent) > _SENT:
                self._sent.popitem(last=False)
            if self._wired is None or self._wired[0] is not coded or self._wired[1] != known:
                self._wired = (coded, known, coded.wire(known))
            return self._wired[2]

    def ready(self, message: Message, k: int) -> list[bytes] | None:
        """What `encode` gives for any neighbour, where that is at hand: a message without factors, just encoded."""
        latest, wired = self._latest.get(kind_of(message)), self._wired
        if wired is None or latest is None or latest[0] is not message or latest[1] != k:
            return None
        return wired[2] if wired[0] is latest[2] and not wired[0].factors else None

    def decode(self, data: Bytes, k: int, sender: str) -> Message:
        """A neighbour's message of round k, or PackageError."""
        with self._lock:
            at = self._asked.get(k)
            found = decode(data, self.terms, k=k, sender=sender, at=at, held=self._held.get, device=self._device)
            for name, streams in found.factors.items():
                self._held.put(name, streams)
        return found.message

    def inspect(self, data: Bytes, k: int, sender: str) -> str:
        """The kind of a message that may be kept for decoding later, or PackageError: header and named factors."""
        with self._lock:
            return inspect(data, self.terms, k=k, sender=sender, held=self._held.get)

    def state(self) -> dict[str, Tensor]:
        """What later messages depend on. The caches only save bytes: whoever starts anew sends and gets all again."""
        with self._lock:
            return dict(self.feedback)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state; an empty one owes nothing."""
        with self._lock:
            self.feedback = {name: tensor.to(self._device) for name, tensor in state.items()}

    def _encode_once(self, message: Message, k: int) -> CodedMessage:
        kind = kind_of(message)
        latest = self._latest.get(kind)
        if latest is not None and latest[0] is message and latest[1] == k:
            return latest[2]
        owed = self._with_feedback(message)
        random = None
        if self.terms.settings.rounding == "stochastic":
            random = stream(self._seed, "rounding", self.peer, k, type(message).__name__)
        coded = encode(owed, self.terms, k=k, sender=self.peer, random=random, memo=self._memo)
        if isinstance(owed, Weights):
            self._remember(owed, coded, k)
        self._latest[kind] = (message, k, coded)
        return coded

    def _with_feedback(self, message: Message) -> Message:
        """Weights to be averaged, with what earlier ones lost."""
        if not isinstance(message, Weights) or message.request or not self._loses_weights():
            return message
        w = message.w + self.feedback["w"] if "w" in self.feedback else message.w
        v = message.v
        if v is not None and "v" in self.feedback:
            v = v + self.feedback["v"]
        return replace(message, w=w, v=v)

    def _loses_weights(self) -> bool:
        return self.terms.settings.weights == "int8"

    def _remember(self, sent: Weights, coded: CodedMessage, k: int) -> None:
        """What the neighbours will see of these weights."""
        if self.terms.settings.weights == "lossless":
            seen = sent
        else:
            found = decode(b"".join(coded.wire()), self.terms, device=self._device).message
            assert isinstance(found, Weights)
            seen = found
        if sent.request:
            self._asked[k] = seen.w
            while len(self._asked) > 2:
                self._asked.popitem(last=False)
        elif self._loses_weights():
            self.feedback["w"] = sent.w - seen.w
            if sent.v is not None and seen.v is not None:
                self.feedback["v"] = sent.v - seen.v

    def _memo(self, tensor: Tensor, coding: Coding, random: Random, make: Callable[[Random], CodedBlock]) -> CodedBlock:
        """A factor that was coded before is found by its content.

        Its rounding follows from its content too, not from the round in which it is met first: a peer that starts
        again, and remembers no factors, codes it the same way.
        """
        name = self._name(tensor)
        key = (name, coding)
        if key not in self._coded:
            own = None if random is None else stream(self._seed, "rounding", self.peer, "factor", name.hex())
            self._coded[key] = make(own)
        self._coded.move_to_end(key)
        while len(self._coded) > _CODED:
            self._coded.popitem(last=False)
        return self._coded[key]

    def _name(self, tensor: Tensor) -> bytes:
        """A factor's digest; the last one's again where it is the same memory and nothing was written to it."""
        version = None if tensor.is_inference() else tensor._version
        seen = (tensor.data_ptr(), tensor.shape, tensor.stride(), version)
        if self._named is None or version is None or self._named[0] != seen:
            found = digest(repr(tuple(tensor.shape)).encode(), tensor.detach().cpu().contiguous().numpy().data)
            self._named = (seen, tensor, found)  # holds the tensor, so that its memory stays its own
        return self._named[2]
