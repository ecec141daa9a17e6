"""Models, terms, messages and comparisons that the package tests share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.client_round import reset_peak
from spark_node.config import Config
from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.learning.algorithms import make_projection, make_terms
from spark_node.learning.jacobian import Form, jacobian
from spark_node.learning.kernel import FullKernel, TraceKernel
from spark_node.learning.layers import FactoredLayer, Jacobian, LayerJacobian
from spark_node.learning.messages import Message, Package, Weights
from spark_node.learning.signals import ChainedSignals, ExplicitSignals, Signals
from spark_node.model import ParameterLayout, cnn, flatten, initialise_kaiming, mlp
from spark_node.observe.environment import peak_rss
from spark_node.package import planner
from spark_node.package.format import PREFIX, Terms
from tests.unit.networks import CLASSES, Residual, Tied, Tokens, inputs

RUN, ROUND, SENDER = "test", 3, "peer-1"


class Grouped(nn.Module):
    """A grouped convolution and a layer norm, which have no factors, around layers that do."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(1, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2, stride=2)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(torch.relu(self.grouped(torch.tanh(self.wide(x)))).flatten(1)))
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(36, [7], CLASSES),
    "tanh-mlp": lambda: mlp(36, [7], CLASSES, "tanh"),
    "deep-mlp": lambda: mlp(36, [9, 8, 5], CLASSES),
    "deep-tanh-mlp": lambda: mlp(36, [9, 8, 5], CLASSES, "tanh"),
    "linear": lambda: mlp(36, [], CLASSES),
    "cnn": lambda: cnn((1, 6, 6), [3, 4], [6], CLASSES),
    "residual": Residual,
    "grouped": Grouped,
    "tied": Tied,
    "tokens": Tokens,
}
"""Networks in float32 for inputs of shape [1, 6, 6]."""


def model(name: str) -> nn.Module:
    module = MODELS[name]()
    initialise_kaiming(module, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module.eval()


def config(**package: Any) -> Config:
    """The defaults with settings of [package]."""
    return Config().replace(**{f"package__{name}": value for name, value in package.items()})


def terms_for(name: str, **package: Any) -> Terms:
    return make_terms(config(**package), RUN, ParameterLayout.of(model(name)), CLASSES)


@dataclass(frozen=True)
class Case:
    """A package, the terms it is sent under, and the weights that its receiver asked for."""

    terms: Terms
    package: Package
    w: Tensor


def case(
    name: str, mode: str = "receiver", *, samples: int = 6, seed: int = 0, form: Form | None = None, **package: Any
) -> Case:
    """A package of a model as a peer makes it, for a receiver that asked for it or from a sender's own weights."""
    module, chosen = model(name), config(**package)
    layout, w = ParameterLayout.of(module), flatten(module)
    x = inputs(samples, seed).float()
    found = jacobian(module, w, x, form=form or planner.forms(module, x[0], chosen.package))
    labels = torch.arange(samples) % CLASSES
    made = Package(laid_out(make_projection(chosen, layout).apply(found, ROUND)), labels)
    if mode == "receiver":
        made = replace(made, at=w)
    return Case(make_terms(chosen, RUN, layout, CLASSES), made, w)


def laid_out(found: Jacobian) -> Jacobian:
    """The same numbers, contiguous as they arrive: the order in memory changes the last digit of matrix products."""
    layers: list[LayerJacobian] = []
    for layer in found.layers:
        if isinstance(layer, FactoredLayer):
            signals = layer.signals
            if isinstance(signals, ExplicitSignals):
                signals = ExplicitSignals(signals.values.contiguous())
            layer = replace(layer, inputs=layer.inputs.contiguous(), signals=signals)
        layers.append(layer)
    return replace(found, layers=tuple(layers))


def vectors(size: int, seed: int = 0, scale: float = 0.1) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def header_of(data: bytes) -> pb.Header:
    """The header of a whole message."""
    header = pb.Header()
    header.ParseFromString(data[PREFIX.size : PREFIX.size + PREFIX.unpack_from(data)[1]])
    return header


def blocks_of(data: bytes, role: int) -> list[pb.Block]:
    return [block for block in header_of(data).blocks if block.role == role]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in type, shape and every bit: minus zero is not zero."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    view = torch.int32 if a.dtype == torch.float32 else a.dtype
    return torch.equal(a.contiguous().view(view), b.contiguous().view(view))


def _fields(signals: Signals) -> Iterator[Tensor]:
    if isinstance(signals, ChainedSignals):
        yield signals.weight
        yield signals.slopes
        yield from _fields(signals.above)
    else:
        yield from signals.tensors


def assert_same(found: Message, expected: Message) -> None:
    """Every tensor, every place in the flat vector and the form of every layer."""
    if isinstance(expected, Weights):
        assert isinstance(found, Weights)
        assert found.request == expected.request
        assert same_bits(found.w, expected.w)
        assert (found.v is None) == (expected.v is None)
        assert found.v is None or expected.v is None or same_bits(found.v, expected.v)
        return
    assert isinstance(found, Package)
    assert torch.equal(found.labels, expected.labels)
    assert same_bits(found.jacobian.logits, expected.jacobian.logits)
    assert found.jacobian.parameters == expected.jacobian.parameters
    for mine, theirs in zip(found.jacobian.layers, expected.jacobian.layers, strict=True):
        assert type(mine) is type(theirs)
        for name in ("name", "weight", "bias", "columns"):
            assert getattr(mine, name, None) == getattr(theirs, name, None)
        ours, sent = [*mine.tensors], [*theirs.tensors]
        if hasattr(theirs, "signals"):
            assert type(mine.signals) is type(theirs.signals)  # type: ignore[attr-defined]
            ours, sent = [*ours, *_fields(mine.signals)], [*sent, *_fields(theirs.signals)]  # type: ignore[attr-defined]
        assert len(ours) == len(sent)
        assert all(same_bits(a, b) for a, b in zip(ours, sent, strict=True))


@contextmanager
def grows_by_less_than(limit: int) -> Iterator[None]:
    """The process never holds so many bytes more than before, where the system tells (Linux)."""
    told = Path("/proc/self/clear_refs").exists()
    before = reset_peak() if told else 0
    yield
    if told:
        assert (peak_rss() or 0) - before < limit


def kernel_products(found: Jacobian) -> tuple[Tensor, Tensor]:
    """What a learner takes from a Jacobian: a product with the full kernel, and the trace kernel."""
    residual = torch.randn(found.logits.shape, generator=torch.Generator().manual_seed(9))
    return FullKernel([found]).apply(residual), TraceKernel([found]).matrix
