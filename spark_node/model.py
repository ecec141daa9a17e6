"""Models, their one shared initialisation, and the flat view of their parameters."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spark_node.config import ModelSettings
from spark_node.errors import ConfigError
from spark_node.plugins import named
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


def attach(module: nn.Module, w: Tensor) -> None:
    """Make the module's parameters views of the flat vector w, ready for autograd."""
    for parameter, view in zip(module.parameters(), ParameterLayout.of(module).unflatten(w).values(), strict=True):
        parameter.requires_grad_(True)
        parameter.data = view


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
    """The run's model with the run's initial weights: the same on every peer."""
    kind = settings.kind

    def make() -> nn.Module:
        if kind == "mlp":
            return mlp(math.prod(shape), settings.hidden, classes, settings.activation)
        if kind == "cnn":
            return cnn(shape, settings.channels, settings.hidden, classes, settings.activation)
        made: nn.Module = named("model.kind", kind)()
        return made

    module = from_factory(make, kind, settings, seed)
    found = outputs(kind, module, shape)
    if found != classes:
        raise ConfigError(
            f"model.kind = {kind!r}: gives outputs of shape [{found}]; "
            f"the dataset has {classes} classes, so one logit a class is needed"
        )
    return module


def from_factory(factory: Callable[[], nn.Module], kind: str, settings: ModelSettings, seed: int) -> nn.Module:
    """The module that a factory makes under the run's seed, initialised as `model.init` says, for evaluation.

    Torch's generators are left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "model", "init") % 2**63)
        module = factory()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.kind = {kind!r}: returned {type(module).__name__}, not a torch.nn.Module")
    if settings.init == "kaiming":
        initialise_kaiming(module, seed)
    return module.eval()


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


def outputs(kind: str, module: nn.Module, shape: Sequence[int]) -> int:
    """How many logits the model gives for inputs of that shape; ConfigError where it does not take them."""
    try:
        with torch.no_grad():
            found = module(torch.zeros(2, *shape))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"model.kind = {kind!r}: cannot take inputs of shape {list(shape)} ({reason})") from None
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != 2:
        shown = list(found.shape[1:]) if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(f"model.kind = {kind!r}: gives outputs of shape {shown}; one logit a class is needed")
    return int(found.shape[1])
