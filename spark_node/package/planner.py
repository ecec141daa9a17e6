"""Which form of a layer's Jacobian is the smallest on the wire, and why.

The choice depends on the model and the specification alone, so that all peers make it alike.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spark_node.config import PackageSettings
from spark_node.learning.jacobian import jacobian
from spark_node.learning.layers import DenseLayer, FactoredLayer, LayerJacobian
from spark_node.learning.signals import ChainedSignals, IdentitySignals
from spark_node.model import ParameterLayout, flatten

_GUESS = 8
"""Bits a number where max_error leaves the choice to the data."""


@dataclass(frozen=True)
class LayerPlan:
    """One layer: its possible forms with the bytes a sample takes in each, before entropy coding, and the choice."""

    name: str
    parameters: int
    plain: int
    """Bytes a sample of the Jacobian as float32, unprojected: 4 C d_l."""
    forms: dict[str, float]
    form: str


def plan(module: nn.Module, example: Tensor, settings: PackageSettings) -> list[LayerPlan]:
    """The plan of every layer; `example` is one input."""
    found = jacobian(module, flatten(module).to(example), example[None], form="factored")
    layout = ParameterLayout.of(module)
    plans = []
    for i, layer in enumerate(found.layers):
        forms = _forms(found.layers, i, settings, layout, found.logits.shape[1])
        allowed = forms if settings.encoding == "auto" or len(forms) == 1 else {settings.encoding: 0.0}
        chosen = min(allowed, key=lambda form: allowed[form])
        plain = 4 * found.logits.shape[1] * layer.parameters
        plans.append(LayerPlan(_name(layer), layer.parameters, plain, forms, chosen))
    return plans


def forms(module: nn.Module, example: Tensor, settings: PackageSettings) -> dict[str, str]:
    """Layer name -> form in which `jacobian` computes it.

    What the projection writes out anyway is computed as factors where those are smaller: that is far faster.
    """
    if settings.encoding == "dense" or settings.projection == "flat":
        settings = dataclasses.replace(settings, encoding="auto", projection="none")
    return {layer.name: layer.form for layer in plan(module, example, settings)}


def _name(layer: LayerJacobian) -> str:
    assert isinstance(layer, DenseLayer | FactoredLayer)
    return layer.name


def _forms(
    layers: Sequence[LayerJacobian], i: int, settings: PackageSettings, layout: ParameterLayout, classes: int
) -> dict[str, float]:
    """Bytes a sample of each form that this layer can have."""
    layer = layers[i]
    columns = _sketched_columns(layer, settings, layout)
    entry = settings.keep * _bits(settings.bits, settings) + (settings.keep < 1)
    found = {"dense": classes * columns * entry / 8}
    if isinstance(layer, FactoredLayer) and not _flattened(layer, settings, layout):
        _, _, positions, outputs = layer.signals.shape
        width = layer.inputs.shape[2]
        if settings.projection == "axis":
            width = min(width, settings.sketch_size)
        inputs = positions * width * _bits(settings.input_bits if i == 0 else settings.hidden_bits, settings)
        found["factored"] = (inputs + _signal_bits(layer, settings, classes * positions * outputs)) / 8
    return found


def _signal_bits(layer: FactoredLayer, settings: PackageSettings, explicit: int) -> float:
    signals = layer.signals
    if isinstance(signals, IdentitySignals):
        return 0
    if isinstance(signals, ChainedSignals):
        # A mask follows from the inputs of the layer above, unless those are projected.
        mask = 0 if settings.projection == "none" else 1
        each = mask if signals.slopes.dtype == torch.bool else _bits(settings.signal_bits, settings)
        return signals.slopes.shape[1] * each
    return explicit * (settings.keep * _bits(settings.signal_bits, settings) + (settings.keep < 1))


def _bits(bits: int, settings: PackageSettings) -> int:
    chosen = settings.bits if bits < 0 else bits
    return chosen or (_GUESS if settings.max_error > 0 else 32)


def _matrices(layer: LayerJacobian, layout: ParameterLayout) -> list[tuple[int, ...]]:
    """Shapes of the layer's own parameters."""
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    if isinstance(layer, FactoredLayer):
        names = [f"{layer.name}.weight"] + ([f"{layer.name}.bias"] if layer.bias is not None else [])
    else:
        assert isinstance(layer, DenseLayer)
        places = layout.slices
        names = [n for n, p in places.items() if layer.columns.start <= p.start and p.stop <= layer.columns.stop]
    return [shapes[name] for name in names]


def _sketched_columns(layer: LayerJacobian, settings: PackageSettings, layout: ParameterLayout) -> int:
    total = 0
    for shape in _matrices(layer, layout):
        size, fan_in = math.prod(shape), math.prod(shape[1:])
        if len(shape) < 2 or settings.projection == "none":
            total += size
        elif settings.projection == "axis":
            total += shape[0] * min(fan_in, settings.sketch_size)
        else:
            total += min(size, settings.sketch_size)
    return total


def _flattened(layer: FactoredLayer, settings: PackageSettings, layout: ParameterLayout) -> bool:
    """A projection of the whole tensor leaves no factors."""
    size = math.prod(_matrices(layer, layout)[0])
    return settings.projection == "flat" and size > settings.sketch_size
