"""Chains: linear layers with element-wise activations between them, whose derivatives need no autograd."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spark_node.model import ParameterLayout

_ELEMENTWISE = (
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity,
)  # fmt: skip


@dataclass(frozen=True)
class Link:
    """A linear layer of a chain, and the activation after it (None after the last)."""

    name: str
    bias: bool
    activation: nn.Module | None


@dataclass(frozen=True)
class Passed:
    """What one forward pass leaves behind: each layer's inputs, each activation's slopes, the logits."""

    inputs: list[Tensor]
    slopes: list[Tensor]
    logits: Tensor


def links_of(module: nn.Module) -> list[Link] | None:
    """The links of a Sequential that is a chain, else None."""
    if not isinstance(module, nn.Sequential) or len(list(module.named_children())) != len(module):
        return None
    if shared_parameters(module):
        return None
    links: list[Link] = []
    for name, part in module.named_children():
        if isinstance(part, nn.Linear):
            if links and links[-1].activation is None:
                links[-1] = Link(links[-1].name, links[-1].bias, nn.Identity())
            links.append(Link(name, part.bias is not None, None))
        elif (isinstance(part, nn.Flatten) and not links and part.start_dim == 1 and part.end_dim == -1) or (
            isinstance(part, nn.Dropout) and not part.training
        ):
            continue
        elif type(part) in _ELEMENTWISE and links and links[-1].activation is None:
            links[-1] = Link(links[-1].name, links[-1].bias, part)
        else:
            return None
    return links if links and links[-1].activation is None else None


def shared_parameters(module: nn.Module) -> set[str]:
    """Names of parameters that stand in more than one place of the module (tied weights)."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for same in names.values() if len(same) > 1 for name in same}


def forward(links: Sequence[Link], parameters: dict[str, Tensor], x: Tensor) -> Passed:
    """The chain's logits for x, and all that its derivatives need."""
    h = x.flatten(1)
    inputs, slopes = [], []
    for link in links:
        inputs.append(h)
        z = F.linear(h, parameters[f"{link.name}.weight"], parameters[f"{link.name}.bias"] if link.bias else None)
        if link.activation is None:
            h = z
        else:
            slopes.append(_slopes(link.activation, z))
            h = link.activation(z)
    return Passed(inputs, slopes, h)


def _slopes(activation: nn.Module, z: Tensor) -> Tensor:
    """Derivative of an element-wise activation at z."""
    if type(activation) is nn.ReLU:
        return z > 0
    with torch.enable_grad():
        leaf = z.detach().clone().requires_grad_()
        return torch.autograd.grad(activation(leaf).sum(), leaf)[0]


@dataclass(frozen=True)
class _Layer:
    """A linear layer in the flat vectors of ChainRule: its weight and bias in w, and their places in v."""

    weight: Tensor
    bias: Tensor | None
    weight_into: Tensor
    bias_into: Tensor | None

    def gather(self, mu: float, signal: Tensor, inputs: Tensor) -> None:
        """v <- mu v + gradient, given what the loss says to this layer's outputs."""
        self.weight_into.addmm_(signal.T, inputs, beta=mu)
        if self.bias_into is not None:
            self.bias_into.mul_(mu).add_(signal.sum(0)) if mu else torch.sum(signal, 0, out=self.bias_into)


class ChainRule:
    """Gathers in v the gradient of a chain's cross-entropy at w; both are flat, and may change between two calls.

    It takes two thirds of autograd's time for small batches: every product lands where it belongs, and
    nothing is recorded.
    """

    def __init__(self, links: Sequence[Link], layout: ParameterLayout, w: Tensor, v: Tensor) -> None:
        at, into = layout.unflatten(w), layout.unflatten(v)
        names = [(f"{link.name}.weight", f"{link.name}.bias") for link in links]
        self._first, *self._behind = [
            _Layer(at[weight], at.get(bias), into[weight], into.get(bias)) for weight, bias in names
        ]
        self._activations = [link.activation for link in links if link.activation is not None]
        self._minus_one = w.new_full((1, 1), -1.0)

    @torch.no_grad()
    def __call__(self, mu: float, x: Tensor, y: Tensor) -> Tensor:
        """v <- mu v + gradient; the loss."""
        x = x.flatten(1)
        loss, signal = self.behind_first(mu, F.linear(x, self._first.weight, self._first.bias), y)
        self._first.gather(mu, signal, x)
        return loss

    @torch.no_grad()
    def behind_first(self, mu: float, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The same for all layers but the first, whose outputs are z; the loss, and its gradient in z."""
        passed = []
        for layer, activation in zip(self._behind, self._activations, strict=True):
            h = activation(z)
            passed.append((layer, activation, z, h))
            z = F.linear(h, layer.weight, layer.bias)
        surprise = z.log_softmax(1)
        loss = F.nll_loss(surprise, y)
        signal = surprise.exp_()  # (softmax - one-hot) / N: what the mean loss says to the logits
        signal.scatter_add_(1, y.unsqueeze(1), self._minus_one.expand(len(y), 1)).div_(len(y))
        for layer, activation, z, h in reversed(passed):
            layer.gather(mu, signal, h)
            signal = _through(activation, z, signal @ layer.weight)
        return loss, signal


def _through(activation: nn.Module, z: Tensor, signal: Tensor) -> Tensor:
    """The signal at an activation's outputs, taken back to its inputs z."""
    if type(activation) is nn.ReLU:  # one pass, where a product with z > 0 takes two
        passed: Tensor = torch.ops.aten.threshold_backward(signal, z, 0)
        return passed
    return signal.mul_(_slopes(activation, z))


class Autograd:
    """The same for any module whose parameters are views of w."""

    def __init__(self, module: nn.Module, layout: ParameterLayout, v: Tensor) -> None:
        self._module, self._parameters = module, list(module.parameters())
        self._v, self._into = v, list(layout.unflatten(v).values())

    def __call__(self, mu: float, x: Tensor, y: Tensor) -> Tensor:
        """v <- mu v + gradient, which the backward pass adds in place; the loss."""
        self._v.mul_(mu) if mu else self._v.zero_()
        for parameter, view in zip(self._parameters, self._into, strict=True):
            parameter.grad = view
        loss = F.cross_entropy(self._module(x), y)
        loss.backward()
        for parameter in self._parameters:
            parameter.grad = None
        return loss.detach()
