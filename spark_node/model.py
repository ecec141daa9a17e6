"""Models, their one shared initialisation, and the flat view of their parameters."""

import hashlib
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spark_node.config import ModelSettings
from spark_node.errors import ConfigError
from spark_node.seeds import derive, stream

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
}


@dataclass(frozen=True)
class ParameterLayout:
    """Where each named parameter lies in the flat weight vector w."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, module: nn.Module) -> "ParameterLayout":
        named = list(module.named_parameters())
        return cls(tuple(name for name, _ in named), tuple(tuple(p.shape) for _, p in named))

    @property
    def size(self) -> int:
        """d, the number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def slices(self) -> dict[str, slice]:
        """Positions of each parameter in w."""
        result, start = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            result[name] = slice(start, start + math.prod(shape))
            start += math.prod(shape)
        return result

    @property
    def signature(self) -> str:
        """Names and shapes as a digest: peers with different models must not mix."""
        text = repr((self.names, self.shapes))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def unflatten(self, w: Tensor) -> dict[str, Tensor]:
        """Views of the flat vector, by parameter name."""
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = w.split(sizes)
        return {n: p.view(s) for n, p, s in zip(self.names, parts, self.shapes, strict=True)}


def flatten(module: nn.Module) -> Tensor:
    """The module's parameters as one vector, a copy."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def mlp(inputs: int, hidden: Sequence[int], classes: int, activation: str = "relu") -> nn.Sequential:
    """The paper's network: linear layers with an activation between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        layers += [nn.Linear(inputs, width), ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def cnn(
    shape: Sequence[int],
    channels: Sequence[int],
    hidden: Sequence[int],
    classes: int,
    activation: str = "relu",
) -> nn.Sequential:
    """A small convolutional network: 3x3 convolutions with 2x2 mean pooling, then an mlp head."""
    depth, height, width = shape
    layers: list[nn.Module] = []
    for count in channels:
        if min(height, width) < 2:
            raise ConfigError(
                f"model.channels = {list(channels)}: {len(channels)} poolings leave nothing of "
                f"{shape[1]}x{shape[2]} inputs; give fewer convolutions"
            )
        layers += [nn.Conv2d(depth, count, 3, padding=1), ACTIVATIONS[activation](), nn.AvgPool2d(2)]
        depth, height, width = count, height // 2, width // 2
    return nn.Sequential(*layers, *mlp(depth * height * width, hidden, classes, activation))


def build(settings: ModelSettings, shape: Sequence[int], classes: int, seed: int) -> nn.Module:
    """The run's model with the run's initial weights: the same on every peer. Torch's generators are left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "model", "init") % 2**63)
        if settings.kind == "mlp":
            module: nn.Module = mlp(math.prod(shape), settings.hidden, classes, settings.activation)
        elif settings.kind == "cnn":
            module = cnn(shape, settings.channels, settings.hidden, classes, settings.activation)
        else:
            module = _from_factory(settings.kind)
    if settings.init == "kaiming":
        initialise_kaiming(module, seed)
    module.eval()
    _check_outputs(settings.kind, module, shape, classes)
    return module


def initialise_kaiming(module: nn.Module, seed: int) -> None:
    """Kaiming-normal (fan-in) weights and zero biases of linear and convolutional layers, from a named stream."""
    with torch.no_grad():
        for name, part in module.named_modules():
            if isinstance(part, nn.Linear | nn.Conv2d):
                random = stream(seed, "model", "init", name)
                fan_in = part.weight[0].numel()
                values = random.standard_normal(tuple(part.weight.shape)) * math.sqrt(2 / fan_in)
                part.weight.copy_(torch.from_numpy(values))
                if part.bias is not None:
                    part.bias.zero_()


def _from_factory(kind: str) -> nn.Module:
    """`package.module:factory` -> its torch module."""
    path, _, name = kind.partition(":")
    try:
        factory = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model.kind = {kind!r}: cannot be imported ({error}); is it on PYTHONPATH?") from None
    module = factory()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.kind = {kind!r}: returned {type(module).__name__}, not a torch.nn.Module")
    return module


def _check_outputs(kind: str, module: nn.Module, shape: Sequence[int], classes: int) -> None:
    try:
        with torch.no_grad():
            outputs = module(torch.zeros(2, *shape))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.kind = {kind!r}: cannot take inputs of shape {list(shape)} ({reason})") from None
    if tuple(outputs.shape) != (2, classes):
        raise ConfigError(
            f"model.kind = {kind!r}: gives outputs of shape {list(outputs.shape[1:])}; "
            f"the dataset has {classes} classes, so one logit a class is needed"
        )
