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


class ChainRule:
    """Gathers in v the gradient of a chain's cross-entropy at w; both are flat, and may change between two calls.

    It takes two thirds of autograd's time for small batches: every product lands where it belongs, and
    nothing is recorded.
    """

    def __init__(self, links: Sequence[Link], layout: ParameterLayout, w: Tensor, v: Tensor) -> None:
        self._links, self._parameters, self._into = links, layout.unflatten(w), layout.unflatten(v)
        self._minus_one = w.new_full((1, 1), -1.0)

    @torch.no_grad()
    def __call__(self, mu: float, x: Tensor, y: Tensor) -> Tensor:
        """v <- mu v + gradient; the loss."""
        passed = forward(self._links, self._parameters, x)
        surprise = passed.logits.log_softmax(1)
        loss = F.nll_loss(surprise, y)
        signal = surprise.exp_()  # (softmax - one-hot) / N: what the mean loss says to the logits
        signal.scatter_add_(1, y.unsqueeze(1), self._minus_one.expand(len(y), 1)).div_(len(y))
        for i in reversed(range(len(self._links))):
            link = self._links[i]
            self._into[f"{link.name}.weight"].addmm_(signal.T, passed.inputs[i], beta=mu)
            if link.bias:
                bias = self._into[f"{link.name}.bias"]
                bias.mul_(mu).add_(signal.sum(0)) if mu else torch.sum(signal, 0, out=bias)
            if i > 0:
                signal = (signal @ self._parameters[f"{link.name}.weight"]).mul_(passed.slopes[i - 1])
        return loss


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
