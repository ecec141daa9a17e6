"""Bytes to messages. Reading is total: any bytes give a message or a PackageError.

The receiver knows the model, so a message says only which of the few possible forms it has; every shape follows from
the model and the number of samples, and every length is checked before memory is taken.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.learning.layers import DenseLayer, FactoredLayer, Jacobian, LayerJacobian
from spark_node.learning.messages import Message, Package, Weights
from spark_node.learning.signals import ChainedSignals, ExplicitSignals, IdentitySignals, Signals
from spark_node.package import tensors
from spark_node.package.errors import MissingFactor, PackageError, Refusal, malformed
from spark_node.package.format import DIGEST, FORMAT, MAGIC, PREFIX, Terms, block_digest, digest, rows_of
from spark_node.package.streams import Bytes

Held = Callable[[bytes], "tuple[Bytes, ...] | None"]
"""The streams of a block that came earlier, by its digest."""


def _none_held(_: bytes) -> None:
    return None


@dataclass(frozen=True)
class Decoded:
    """A message, and the static blocks that came with it, by digest."""

    message: Message
    factors: dict[bytes, tuple[Bytes, ...]]


def decode(
    data: Bytes,
    terms: Terms,
    *,
    k: int | None = None,
    sender: str | None = None,
    at: Tensor | None = None,
    held: Held = _none_held,
    device: torch.device | str = "cpu",
) -> Decoded:
    """The message in `data`, checked against what is expected; `at` are the weights that the sender was asked for."""
    header, payload = _open(memoryview(data), terms, k, sender)
    blocks = _Blocks(header, payload, terms.settings.max_decoded_bytes, held)
    if header.kind in (pb.KIND_WEIGHTS, pb.KIND_REQUEST):
        message: Message = _read_weights(header, blocks, terms, device)
    elif header.kind == pb.KIND_PACKAGE:
        message = _PackageReader(header, blocks, terms, at, device).read()
    else:
        raise PackageError(Refusal.WRONG_KIND, f"a message of kind {header.kind}")
    blocks.finish()
    return Decoded(message, blocks.factors)


KINDS = {pb.KIND_WEIGHTS: "weights", pb.KIND_REQUEST: "request", pb.KIND_PACKAGE: "package"}


def inspect(data: Bytes, terms: Terms, *, k: int, sender: str, held: Held = _none_held) -> str:
    """The kind of a message whose header is sound and whose named blocks are held here; its payload is not read."""
    header, _ = _open(memoryview(data), terms, k, sender)
    missing = tuple(block.digest for block in header.blocks if block.named and held(block.digest) is None)
    if missing:
        raise MissingFactor(missing)
    if header.kind not in KINDS:
        raise PackageError(Refusal.WRONG_KIND, f"a message of kind {header.kind}")
    return KINDS[header.kind]


def _open(data: memoryview, terms: Terms, k: int | None, sender: str | None) -> tuple[pb.Header, memoryview]:
    """The header, where it is whole and meant for this run, and what follows it."""
    if len(data) > terms.settings.max_message_bytes:
        raise PackageError(Refusal.TOO_LARGE, f"{len(data):,} bytes; at most {terms.settings.max_message_bytes:,}")
    if len(data) < PREFIX.size + DIGEST:
        raise malformed(f"only {len(data)} bytes")
    magic, length = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise malformed("not a SPARK message")
    limit = 2**16 + 2**10 * len(terms.layout.names)
    if length > limit or PREFIX.size + length + DIGEST > len(data):
        raise malformed(f"a header of {length} bytes")
    text = data[PREFIX.size : PREFIX.size + length]
    end = PREFIX.size + length + DIGEST
    if digest(text) != bytes(data[end - DIGEST : end]):
        raise PackageError(Refusal.CHECKSUM, "the header is damaged")
    header = pb.Header()
    try:
        header.ParseFromString(bytes(text))
    except DecodeError as error:
        raise malformed(f"a header that is none ({error})") from None
    _check_header(header, terms, k, sender)
    return header, data[end:]


def _check_header(header: pb.Header, terms: Terms, k: int | None, sender: str | None) -> None:
    if header.format != FORMAT:
        raise PackageError(Refusal.UNSUPPORTED_FORMAT, f"format {header.format}; this version reads format {FORMAT}")
    if header.run != terms.run:
        raise PackageError(Refusal.WRONG_RUN, f"a message of run {header.run[:64]!r}")
    if k is not None and header.round != k:
        raise PackageError(Refusal.WRONG_ROUND, f"a message of round {header.round} in round {k}")
    if sender is not None and header.sender != sender:
        raise PackageError(Refusal.WRONG_SENDER, f"a message of {header.sender[:64]!r} from {sender!r}")
    if header.signature != terms.layout.signature:
        raise PackageError(Refusal.WRONG_SIGNATURE, "a message about another model")


class _Blocks:
    """Hands out the blocks of a message in order, each with its streams, whole and within the limits."""

    def __init__(self, header: pb.Header, payload: memoryview, limit: int, held: Held) -> None:
        self._blocks, self._next = header.blocks, 0
        self._left = limit
        self._streams = self._locate(payload, held)
        self.factors: dict[bytes, tuple[Bytes, ...]] = {}

    def _locate(self, payload: memoryview, held: Held) -> list[tuple[Bytes, ...]]:
        """Every block's streams, before any is read: all of the payload is accounted for, every digest holds."""
        found: list[tuple[Bytes, ...]] = []
        missing: list[bytes] = []
        offset = 0
        for block in self._blocks:
            sizes = [stream.bytes for stream in block.streams]
            if block.named:
                streams = held(block.digest)
                if streams is None:
                    missing.append(block.digest)
                    streams = ()
                elif [len(s) for s in streams] != sizes:
                    raise malformed("a named block of another size")
            else:
                if sum(sizes) > len(payload) - offset:
                    raise malformed("a message that ends early")
                ends = np.cumsum([offset, *sizes]).tolist()
                streams = tuple(payload[a:b] for a, b in itertools.pairwise(ends))
                offset = ends[-1]
            if not (block.named and not streams) and block_digest(block, streams) != block.digest:
                raise PackageError(Refusal.CHECKSUM, "a block is damaged")
            found.append(streams)
        if offset != len(payload):
            raise malformed(f"{len(payload) - offset} bytes too many")
        if missing:
            raise MissingFactor(tuple(missing))
        return found

    def peek(self) -> pb.Block | None:
        return self._blocks[self._next] if self._next < len(self._blocks) else None

    def take(self, role: pb.Role, layer: int, shape: Sequence[int]) -> tuple[pb.Block, tuple[Bytes, ...]]:
        """The next block, which is due to be this one; its size is charged against the limit first."""
        block = self.peek()
        if block is None or block.role != role or block.layer != layer:
            raise malformed(f"block {self._next} is not the one that is due")
        self._left -= 4 * math.prod(shape)
        if self._left < 0:
            raise PackageError(Refusal.TOO_LARGE, "decoded, the message would pass package.max_decoded_bytes")
        streams = self._streams[self._next]
        self._next += 1
        if role == pb.ROLE_INPUTS and layer == 0 and not block.named:
            self.factors[bytes(block.digest)] = streams
        return block, streams

    def floats(self, role: pb.Role, layer: int, shape: tuple[int, ...]) -> Tensor:
        block, streams = self.take(role, layer, shape)
        return torch.from_numpy(tensors.decode(block, streams, shape, rows_of(role, shape)))

    def finish(self) -> None:
        if self._next != len(self._blocks):
            raise malformed(f"{len(self._blocks) - self._next} blocks too many")


def _read_weights(header: pb.Header, blocks: _Blocks, terms: Terms, device: torch.device | str) -> Weights:
    size = terms.layout.size

    def vector(role: pb.Role) -> Tensor:
        block, streams = blocks.take(role, 0, (size,))
        return torch.from_numpy(tensors.decode(block, streams, (size,), 1)).to(device)

    w = vector(pb.ROLE_WEIGHTS)
    v = vector(pb.ROLE_VELOCITY) if blocks.peek() is not None else None
    return Weights(w, v, request=header.kind == pb.KIND_REQUEST)


class _PackageReader:
    """A package from its header and blocks."""

    def __init__(
        self, header: pb.Header, blocks: _Blocks, terms: Terms, at: Tensor | None, device: torch.device | str
    ) -> None:
        self._header, self._blocks, self._terms, self._at, self._device = header, blocks, terms, at, device
        self._shapes = dict(zip(terms.sketched.names, terms.sketched.shapes, strict=True))
        self._slices = terms.sketched.slices
        self._samples = int(header.samples)

    def read(self) -> Package:
        self._check_terms()
        labels = self._labels()
        logits = self._blocks.floats(pb.ROLE_LOGITS, 0, (self._samples, self._terms.classes)).to(self._device)
        self._check_coverage()
        raw = [self._read_layer(i, layer) for i, layer in enumerate(self._header.layers)]
        layers: list[LayerJacobian] = []
        above: FactoredLayer | None = None
        for i in reversed(range(len(raw))):
            layer = self._header.layers[i]
            if layer.form == pb.FORM_DENSE:
                columns = slice(self._slices[layer.parameters[0]].start, self._slices[layer.parameters[-1]].stop)
                layers.insert(0, DenseLayer(layer.name, columns, raw[i]["dense"]))
                above = None
            else:
                above = self._factored(layer, raw[i], logits, above)
                layers.insert(0, above)
        at = self._at if any(layer.signals == pb.SIGNALS_CHAINED for layer in self._header.layers) else None
        return Package(Jacobian(tuple(layers), self._terms.sketched.size, logits), labels, at)

    def _check_terms(self) -> None:
        mine, theirs = self._terms.specification(), self._header.specification
        for name in ("projection", "sketch", "sketch_size", "fresh_sketch"):
            if getattr(mine, name) != getattr(theirs, name):
                said = f"package.{name} = {str(getattr(theirs, name))[:32]!r}, here {getattr(mine, name)!r}"
                raise PackageError(Refusal.WRONG_SPECIFICATION, said)
        if self._header.classes != self._terms.classes:
            raise PackageError(Refusal.WRONG_SIGNATURE, f"{self._header.classes} classes, not {self._terms.classes}")
        if not 1 <= self._samples <= self._terms.settings.max_decoded_bytes:
            raise malformed(f"a package of {self._samples} samples")

    def _labels(self) -> Tensor:
        shape = (self._samples,)
        block, streams = self._blocks.take(pb.ROLE_LABELS, 0, shape)
        found = tensors.decode_integers(block, streams, shape, self._terms.classes)
        return torch.from_numpy(found).to(self._device)

    def _check_coverage(self) -> None:
        """A layer for each module with parameters of its own, in the model's order: kernels pair layers by place."""
        modules = itertools.groupby(self._terms.sketched.names, key=lambda name: name.rpartition(".")[0])
        due = [(module, list(names)) for module, names in modules]
        if [(layer.name, list(layer.parameters)) for layer in self._header.layers] != due:
            raise malformed("layers that are not the model's")
        for layer in self._header.layers:
            if not (layer.form == pb.FORM_DENSE or (layer.form == pb.FORM_FACTORED and self._sound_factors(layer))):
                raise malformed(f"layer {layer.name[:64]!r} does not fit the model")

    def _sound_factors(self, layer: pb.Layer) -> bool:
        names = list(layer.parameters)
        weight, bias = f"{layer.name}.weight", f"{layer.name}.bias"
        if names != ([weight, bias] if bias in self._shapes else [weight]):
            return False
        shape = self._shapes[weight]
        return (
            len(shape) >= 2 and (bias not in self._shapes or self._shapes[bias] == (shape[0],)) and layer.positions > 0
        )

    def _sizes(self, layer: pb.Layer) -> tuple[int, int, int]:
        """P, I and O of a factored layer."""
        shape = self._shapes[layer.parameters[0]]
        return int(layer.positions), math.prod(shape[1:]), shape[0]

    def _read_layer(self, i: int, layer: pb.Layer) -> dict[str, Tensor]:
        n, c = self._samples, self._terms.classes
        if layer.form == pb.FORM_DENSE:
            columns = sum(math.prod(self._shapes[name]) for name in layer.parameters)
            return {"dense": self._blocks.floats(pb.ROLE_DENSE, i, (n, c, columns)).to(self._device)}
        positions, fan_in, outputs = self._sizes(layer)
        found = {"inputs": self._blocks.floats(pb.ROLE_INPUTS, i, (n, positions, fan_in)).to(self._device)}
        if layer.signals == pb.SIGNALS_EXPLICIT:
            found["signals"] = self._blocks.floats(pb.ROLE_SIGNALS, i, (n, c, positions, outputs)).to(self._device)
        elif layer.signals == pb.SIGNALS_CHAINED and positions == 1:
            slopes = self._read_slopes(i, (n, outputs))
            if slopes is not None:
                found["slopes"] = slopes.to(self._device)
            self._read_weight_above(i, outputs, found)
        elif layer.signals != pb.SIGNALS_IDENTITY or (positions, outputs) != (1, c):
            raise malformed(f"layer {layer.name[:64]!r} has signals that do not fit it")
        return found

    def _read_slopes(self, i: int, shape: tuple[int, int]) -> Tensor | None:
        """Slopes that were sent; None where they follow from the inputs of the layer above."""
        block = self._blocks.peek()
        if block is not None and block.coding == pb.CODING_ABOVE_ZERO:
            block, streams = self._blocks.take(pb.ROLE_SLOPES, i, shape)
            if streams or tuple(block.shape) != shape:
                raise malformed("slopes of another shape")
            return None
        if block is not None and block.coding == pb.CODING_MASK:
            block, streams = self._blocks.take(pb.ROLE_SLOPES, i, shape)
            return torch.from_numpy(tensors.decode_mask(block, streams, shape))
        return self._blocks.floats(pb.ROLE_SLOPES, i, shape)

    def _read_weight_above(self, i: int, outputs: int, found: dict[str, Tensor]) -> None:
        if i + 1 >= len(self._header.layers):
            raise malformed("a chain without a layer above")
        above = self._header.layers[i + 1]
        name = f"{above.name}.weight"
        shape = dict(zip(self._terms.layout.names, self._terms.layout.shapes, strict=True)).get(name, ())
        if above.form != pb.FORM_FACTORED or above.positions != 1 or len(shape) != 2 or shape[1] != outputs:
            raise malformed("a chain through layers that do not fit")
        block = self._blocks.peek()
        if block is not None and block.role == pb.ROLE_WEIGHT_ABOVE:
            found["weight"] = self._blocks.floats(pb.ROLE_WEIGHT_ABOVE, i, (shape[0], shape[1])).to(self._device)
        elif self._at is None:
            raise malformed("a chain whose weights are neither sent nor known here")
        else:
            found["weight"] = self._at[self._terms.layout.slices[name]].view(shape)

    def _factored(
        self, layer: pb.Layer, found: dict[str, Tensor], logits: Tensor, above: FactoredLayer | None
    ) -> FactoredLayer:
        signals: Signals
        if layer.signals == pb.SIGNALS_EXPLICIT:
            signals = ExplicitSignals(found["signals"])
        elif layer.signals == pb.SIGNALS_IDENTITY:
            signals = IdentitySignals(self._samples, logits)
        else:
            assert above is not None  # _read_weight_above has seen it
            slopes = found.get("slopes")
            if slopes is None:
                slopes = above.inputs[:, 0] > 0
                if slopes.shape[1] != self._sizes(layer)[2]:
                    raise malformed("slopes that do not follow from the layer above")
            signals = ChainedSignals(above.signals, found["weight"], slopes)
        names = list(layer.parameters)
        bias = self._slices[names[1]] if len(names) > 1 else None
        return FactoredLayer(layer.name, self._slices[names[0]], bias, found["inputs"], signals)
