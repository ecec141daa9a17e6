"""Messages and Jacobians between ranks: a description in JSON and the tensors' own bytes; nothing is pickled."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spark_node.learning.layers import DenseLayer, FactoredLayer, Jacobian, LayerJacobian
from spark_node.learning.messages import Message, Package, Weights
from spark_node.learning.signals import ChainedSignals, ExplicitSignals, IdentitySignals, SegmentedSignals, Signals

Said = dict[str, Any]
"""What JSON can say."""

_DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8)
}
_ALIGNMENT = 64
"""Bytes: what torch gives a tensor of its own, so that products of read tensors take the same path."""


class Tensors:
    """A list in which each tensor stands once, whoever names it."""

    def __init__(self) -> None:
        self.list: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.list)
            self.list.append(tensor)
        return self._numbers[id(tensor)]


def describe_message(message: Message) -> tuple[Said, list[Tensor]]:
    """Weights or a package."""
    tensors = Tensors()
    if isinstance(message, Weights):
        v = None if message.v is None else tensors.number(message.v)
        return {"w": tensors.number(message.w), "v": v, "request": message.request}, tensors.list
    said = {"jacobian": describe_jacobian(message.jacobian, tensors), "labels": tensors.number(message.labels)}
    said["at"] = None if message.at is None else tensors.number(message.at)
    return said, tensors.list


def read_message(said: Said, tensors: Sequence[Tensor]) -> Message:
    """What was described."""
    if "w" in said:
        return Weights(tensors[said["w"]], None if said["v"] is None else tensors[said["v"]], said["request"])
    at = None if said["at"] is None else tensors[said["at"]]
    return Package(read_jacobian(said["jacobian"], tensors), tensors[said["labels"]], at)


def describe_jacobian(jacobian: Jacobian, tensors: Tensors) -> Said:
    """Its layers, with numbers for their tensors."""
    layers = [_describe_layer(layer, tensors.number) for layer in jacobian.layers]
    return {"layers": layers, "parameters": jacobian.parameters, "logits": tensors.number(jacobian.logits)}


def read_jacobian(said: Said, tensors: Sequence[Tensor]) -> Jacobian:
    """What was described."""
    logits = tensors[said["logits"]]
    layers = tuple(_read_layer(layer, tensors, logits) for layer in said["layers"])
    return Jacobian(layers, said["parameters"], logits)


def _describe_layer(layer: LayerJacobian, number: Callable[[Tensor], int]) -> Said:
    if isinstance(layer, DenseLayer):
        return {"name": layer.name, "columns": _range(layer.columns), "values": number(layer.values)}
    if not isinstance(layer, FactoredLayer):
        raise TypeError(f"no description of a {type(layer).__name__}")
    return {
        "name": layer.name,
        "weight": _range(layer.weight),
        "bias": None if layer.bias is None else _range(layer.bias),
        "inputs": number(layer.inputs),
        "signals": _describe_signals(layer.signals, number),
    }


def _read_layer(said: Said, tensors: Sequence[Tensor], logits: Tensor) -> LayerJacobian:
    if "columns" in said:
        return DenseLayer(said["name"], slice(*said["columns"]), tensors[said["values"]])
    bias = None if said["bias"] is None else slice(*said["bias"])
    signals = _read_signals(said["signals"], tensors, logits)
    return FactoredLayer(said["name"], slice(*said["weight"]), bias, tensors[said["inputs"]], signals)


def _describe_signals(signals: Signals, number: Callable[[Tensor], int]) -> Said:
    if isinstance(signals, IdentitySignals):
        return {"identity": signals.samples}
    if isinstance(signals, ChainedSignals):
        above = _describe_signals(signals.above, number)
        return {"above": above, "weight": number(signals.weight), "slopes": number(signals.slopes)}
    if isinstance(signals, ExplicitSignals):
        return {"values": number(signals.values)}
    if isinstance(signals, SegmentedSignals):
        return {"parts": [_describe_signals(part, number) for part in signals.parts]}
    raise TypeError(f"no description of {type(signals).__name__}")


def _read_signals(said: Said, tensors: Sequence[Tensor], logits: Tensor) -> Signals:
    if "identity" in said:
        return IdentitySignals(said["identity"], logits)
    if "above" in said:
        above = _read_signals(said["above"], tensors, logits)
        return ChainedSignals(above, tensors[said["weight"]], tensors[said["slopes"]])
    if "values" in said:
        return ExplicitSignals(tensors[said["values"]])
    return SegmentedSignals(tuple(_read_signals(part, tensors, logits) for part in said["parts"]))


def _range(columns: slice) -> list[int]:
    return [columns.start, columns.stop]


def to_bytes(tensors: Sequence[Tensor], device: torch.device) -> tuple[list[Said], Tensor]:
    """The tensors one after the other in one buffer on a device, and what each is."""
    table: list[Said] = []
    size = 0
    for tensor in tensors:
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in _DTYPES:
            raise TypeError(f"no tensors of {kind} between ranks")
        table.append({"dtype": kind, "shape": list(tensor.shape), "start": size})
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    for entry, tensor in zip(table, tensors, strict=True):
        if tensor.numel():
            place = buffer[entry["start"] : entry["start"] + tensor.nbytes].view(tensor.dtype)
            place.view(tensor.shape).copy_(tensor.detach())
    return table, buffer


def from_bytes(table: Sequence[Said], buffer: Tensor) -> list[Tensor]:
    """The tensors as views of the buffer; ValueError where it does not hold them."""
    found = []
    for entry in table:
        dtype, shape, start = _DTYPES[entry["dtype"]], entry["shape"], entry["start"]
        size = dtype.itemsize * torch.Size(shape).numel()
        if start % _ALIGNMENT or start < 0 or start + size > len(buffer):
            raise ValueError("tensors that lie outside of their buffer")
        found.append(buffer[start : start + size].view(dtype).view(shape))
    return found
