"""Networks and references that several tests use. The references use autograd and loops, nothing of the product."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spark_node.learning.jacobian import jacobian
from spark_node.learning.layers import Jacobian
from spark_node.model import ParameterLayout, cnn, initialise_kaiming, mlp

CLASSES = 4


class Residual(nn.Module):
    """No Sequential: a skip connection, a layer norm, a strided convolution and a bias-free linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(3 * 3 * 3)
        self.inner = nn.Linear(27, 27, bias=False)
        self.head = nn.Linear(27, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.conv(x)).flatten(1))
        out: Tensor = self.head(h + torch.relu(self.inner(h)))
        return out


class Tied(nn.Module):
    """One linear layer used twice, and another whose weight two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.once = nn.Linear(36, 6)
        self.twice = nn.Linear(6, 6)
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.right.weight = self.left.weight
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.once(x.flatten(1)))
        h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
        out: Tensor = self.head(self.right(torch.tanh(self.left(h))))
        return out


class Tokens(nn.Module):
    """A linear layer applied at several positions of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.embed(x.squeeze(1))).mean(1))
        return out


def network(name: str) -> nn.Module:
    """A small network in float64 for inputs of shape [1, 6, 6]."""
    module: nn.Module = {
        "mlp": lambda: mlp(36, [7], CLASSES),
        "deep-mlp": lambda: mlp(36, [9, 5], CLASSES),
        "tanh-mlp": lambda: mlp(36, [8, 6], CLASSES, "tanh"),
        "linear": lambda: mlp(36, [], CLASSES),
        "cnn": lambda: cnn((1, 6, 6), [3, 4], [6], CLASSES),
        "residual": Residual,
        "tied": Tied,
        "tokens": Tokens,
    }[name]()
    initialise_kaiming(module, seed=3)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module.double().eval()


NETWORKS = ["mlp", "deep-mlp", "tanh-mlp", "linear", "cnn", "residual", "tied", "tokens"]


def inputs(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def autograd_jacobian(module: nn.Module, w: Tensor, x: Tensor) -> Tensor:
    """[N, C, d] by one backward pass per sample and class."""
    layout = ParameterLayout.of(module)
    leaf = w.clone().requires_grad_()
    logits = functional_call(module, layout.unflatten(leaf), (x,))
    rows = [
        torch.autograd.grad(logits[n, c], leaf, retain_graph=True)[0] for n in range(len(x)) for c in range(CLASSES)
    ]
    return torch.stack(rows).view(len(x), CLASSES, -1)


def written_out(found: Jacobian) -> Tensor:
    """[N, C, d] of a product Jacobian, through its own push of unit vectors."""
    basis = torch.eye(found.parameters, dtype=found.logits.dtype)
    columns = [sum(layer.push(e) for layer in found.layers) for e in basis]
    return torch.stack([torch.as_tensor(column) for column in columns], dim=2)


def neighbourhood(name: str, mode: str, forms: list[str]) -> tuple[list[Jacobian], Tensor]:
    """Jacobians of several peers, at one weight (receiver) or each at its own (sender), and the dense reference."""
    module = network(name)
    base = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    found, dense = [], []
    for i, form in enumerate(forms):
        w = (
            base
            if mode == "receiver"
            else base + 0.05 * torch.randn(base.shape, generator=torch.Generator().manual_seed(i))
        )
        x = inputs(3 + i, seed=i)
        found.append(jacobian(module, w, x, form=form, chunk=2))
        dense.append(autograd_jacobian(module, w, x))
    return found, torch.cat(dense)
