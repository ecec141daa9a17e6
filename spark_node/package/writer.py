"""Messages to bytes.

A message is coded once, whoever it goes to; only whether a factor is sent or named differs from one receiver to the
next.
"""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spark_node.config import PackageSettings
from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.learning.layers import DenseLayer, FactoredLayer, LayerJacobian
from spark_node.learning.messages import Message, Package, Weights
from spark_node.learning.signals import ChainedSignals, IdentitySignals, Signals
from spark_node.package import tensors
from spark_node.package.format import FORMAT, MAGIC, PREFIX, Terms, block_digest, digest, rows_of
from spark_node.package.tensors import Coded, Coding

_WEIGHT_GROUP = 2**15
_LOGIT_GROUP = 256


@dataclass(frozen=True)
class CodedBlock:
    """A block as it will travel; `static` where it does not depend on the weights and so is worth naming."""

    block: pb.Block
    streams: tuple[bytes, ...]
    static: bool = False


@dataclass(frozen=True)
class CodedMessage:
    """An encoded message, from which each receiver's bytes are made without coding anything again."""

    header: pb.Header
    blocks: tuple[CodedBlock, ...]

    def wire(self, known: Container[bytes] = ()) -> list[bytes]:
        """The message as pieces of bytes; static blocks whose digest the receiver knows are only named."""
        header = pb.Header()
        header.CopyFrom(self.header)
        pieces: list[bytes] = []
        for coded in self.blocks:
            block = header.blocks.add()
            block.CopyFrom(coded.block)
            if coded.static and coded.block.digest in known:
                block.named = True
            else:
                pieces += coded.streams
        text = header.SerializeToString(deterministic=True)
        return [PREFIX.pack(MAGIC, len(text)), text, digest(text), *pieces]

    @property
    def factors(self) -> tuple[bytes, ...]:
        """Digests of the blocks that may be named next time."""
        return tuple(coded.block.digest for coded in self.blocks if coded.static)


Random = np.random.Generator | None
Memo = Callable[[Tensor, Coding, Random, Callable[[Random], CodedBlock]], CodedBlock]
"""(tensor, coding, the message's stream, code it with a stream) -> its block, perhaps from an earlier round."""


def _no_memo(_: Tensor, __: Coding, random: Random, make: Callable[[Random], CodedBlock]) -> CodedBlock:
    return make(random)


def encode(
    message: Message,
    terms: Terms,
    *,
    k: int,
    sender: str,
    random: np.random.Generator | None = None,
    memo: Memo = _no_memo,
) -> CodedMessage:
    """A message of round k. `random` is the stream of stochastic rounding."""
    header = pb.Header(format=FORMAT, run=terms.run, round=k, sender=sender, signature=terms.layout.signature)
    if isinstance(message, Weights):
        header.kind = pb.KIND_REQUEST if message.request else pb.KIND_WEIGHTS
        blocks = list(_encode_weights(message, terms.settings, random))
    else:
        header.kind = pb.KIND_PACKAGE
        header.samples, header.classes = message.jacobian.samples, terms.classes
        header.specification.CopyFrom(terms.specification())
        writer = _PackageWriter(message, terms, random, memo)
        blocks = list(writer.blocks())
        header.layers.extend(writer.layers)
    return CodedMessage(header, tuple(blocks))


def _finish(coded: Coded, role: pb.Role, layer: int = 0, *, static: bool = False) -> CodedBlock:
    block, streams = coded.block, tuple(part.data for part in coded.parts)
    block.role, block.layer = role, layer
    block.digest = block_digest(block, streams)
    return CodedBlock(block, streams, static)


def _numpy(tensor: Tensor) -> NDArray[Any]:
    if tensor.dtype not in (torch.float32, torch.bool, torch.int64):
        raise TypeError(f"messages carry float32 numbers, not {tensor.dtype}")
    return tensor.detach().cpu().contiguous().numpy()


_WEIGHT_CODINGS = {
    "lossless": Coding(),
    "bf16": Coding(bfloat16=True),
    "int8": Coding(bits=8, group=_WEIGHT_GROUP),
}


def _encode_weights(
    message: Weights, settings: PackageSettings, random: np.random.Generator | None
) -> Iterator[CodedBlock]:
    coding = _WEIGHT_CODINGS[settings.weights]
    for role, tensor in ((pb.ROLE_WEIGHTS, message.w), (pb.ROLE_VELOCITY, message.v)):
        if tensor is not None:
            yield _finish(tensors.encode(_numpy(tensor), coding, 1, settings.level, random), role)


@dataclass(frozen=True)
class _Codings:
    """Which coding each kind of number has."""

    first_inputs: Coding
    inputs: Coding
    slopes: Coding
    signals: Coding
    dense: Coding
    logits: Coding

    @classmethod
    def of(cls, s: PackageSettings) -> "_Codings":
        def coding(bits: int, **more: object) -> Coding:
            width = s.bits if bits < 0 else bits
            return Coding(bits=width, max_error=s.max_error, group=s.scale_block, **more)  # type: ignore[arg-type]

        lossy = max(s.bits, s.input_bits, s.hidden_bits, s.signal_bits) > 0 or s.max_error > 0
        logit_bits = s.logit_bits if s.logit_bits >= 0 else (16 if lossy else 0)
        return cls(
            # A sketch of the inputs is two-sided; the inputs themselves mostly start at their background.
            first_inputs=coding(s.input_bits, affine=s.projection == "none"),
            inputs=coding(s.hidden_bits, affine=s.projection == "none", positive=s.projection == "none"),
            slopes=coding(s.signal_bits),
            signals=coding(s.signal_bits, keep=s.keep),
            dense=coding(-1, keep=s.keep),
            logits=Coding(bits=logit_bits, affine=True, group=_LOGIT_GROUP),
        )


class _PackageWriter:
    """The blocks of one package, in the order in which a reader expects them."""

    def __init__(self, package: Package, terms: Terms, random: np.random.Generator | None, memo: Memo) -> None:
        self._package, self._terms, self._random, self._memo = package, terms, random, memo
        self._codings = _Codings.of(terms.settings)
        self._level = terms.settings.level
        self.layers: list[pb.Layer] = []

    def blocks(self) -> Iterator[CodedBlock]:
        labels = self._package.labels
        width = 8 if self._terms.classes <= 2**8 else 16 if self._terms.classes <= 2**16 else 32
        yield _finish(tensors.encode_integers(_numpy(labels), width, self._level), pb.ROLE_LABELS)
        yield self._floats(self._package.jacobian.logits, self._codings.logits, pb.ROLE_LOGITS, 0)
        found = self._package.jacobian.layers
        after: CodedBlock | None = None  # the coded inputs of the layer above, from which slopes may follow
        written: list[list[CodedBlock]] = []
        for i in reversed(range(len(found))):
            layer = found[i]
            if isinstance(layer, DenseLayer):
                after, coded = None, [self._floats(layer.values, self._codings.dense, pb.ROLE_DENSE, i)]
                self.layers.insert(0, pb.Layer(name=layer.name, form=pb.FORM_DENSE, parameters=self._names(layer)))
            elif isinstance(layer, FactoredLayer):
                inputs = self._inputs(layer, i)
                form, coded = self._signals(layer.signals, found[i + 1] if i + 1 < len(found) else None, after, i)
                after, coded = inputs, [inputs, *coded]
                self.layers.insert(0, self._described(layer, form))
            else:
                raise TypeError(f"no coding for {type(layer).__name__}")
            written.insert(0, coded)
        for coded in written:
            yield from coded

    def _floats(self, tensor: Tensor, coding: Coding, role: pb.Role, layer: int) -> CodedBlock:
        return self._rounded(tensor, coding, role, layer, self._random)

    def _rounded(self, tensor: Tensor, coding: Coding, role: pb.Role, layer: int, random: Random) -> CodedBlock:
        values = _numpy(tensor)
        rows = rows_of(role, values.shape)
        return _finish(tensors.encode(values, coding, rows, self._level, random), role, layer)

    def _inputs(self, layer: FactoredLayer, i: int) -> CodedBlock:
        if i > 0:
            return self._floats(layer.inputs, self._codings.inputs, pb.ROLE_INPUTS, i)

        coding = self._codings.first_inputs

        def make(random: Random) -> CodedBlock:
            made = self._rounded(layer.inputs, coding, pb.ROLE_INPUTS, i, random)
            return CodedBlock(made.block, made.streams, static=True)

        return self._memo(layer.inputs, coding, self._random, make)

    def _signals(
        self, signals: Signals, above: LayerJacobian | None, after: CodedBlock | None, i: int
    ) -> tuple[pb.Signals, list[CodedBlock]]:
        if isinstance(signals, IdentitySignals):
            return pb.SIGNALS_IDENTITY, []
        if isinstance(signals, ChainedSignals) and isinstance(above, FactoredLayer) and signals.above is above.signals:
            coded = [self._slopes(signals.slopes, after, i)]
            if self._package.at is None:
                weight = tensors.encode(_numpy(signals.weight), Coding(), len(signals.weight), self._level)
                coded.append(_finish(weight, pb.ROLE_WEIGHT_ABOVE, i))
            return pb.SIGNALS_CHAINED, coded
        return pb.SIGNALS_EXPLICIT, [self._floats(signals.explicit(), self._codings.signals, pb.ROLE_SIGNALS, i)]

    def _slopes(self, slopes: Tensor, after: CodedBlock | None, i: int) -> CodedBlock:
        """A mask is not sent where it can be read off the inputs of the layer above as they will arrive."""
        if slopes.dtype != torch.bool:
            return self._floats(slopes, self._codings.slopes, pb.ROLE_SLOPES, i)
        mask = _numpy(slopes)
        if after is not None:
            shape = tuple(after.block.shape)
            arriving = tensors.decode(after.block, after.streams, shape, shape[0])
            if arriving[:, 0].shape == mask.shape and np.array_equal(arriving[:, 0] > 0, mask):
                block = pb.Block(shape=mask.shape, coding=pb.CODING_ABOVE_ZERO)
                return _finish(Coded(block, ()), pb.ROLE_SLOPES, i)
        return _finish(tensors.encode_mask(mask, self._level), pb.ROLE_SLOPES, i)

    def _described(self, layer: FactoredLayer, signals: pb.Signals) -> pb.Layer:
        names = [f"{layer.name}.weight"] + ([f"{layer.name}.bias"] if layer.bias is not None else [])
        positions = layer.inputs.shape[1]
        return pb.Layer(name=layer.name, form=pb.FORM_FACTORED, signals=signals, positions=positions, parameters=names)

    def _names(self, layer: DenseLayer) -> list[str]:
        """The parameters whose columns a dense layer holds."""
        slices = self._terms.sketched.slices
        start, stop = layer.columns.start, layer.columns.stop
        return [name for name, place in slices.items() if start <= place.start and place.stop <= stop]
