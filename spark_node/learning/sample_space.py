"""Gradient descent in sample space: the first layer of a chain, as combinations of the peer's own inputs.

Whatever the steps, W = W0 + S^T X with S (samples x outputs), for a gradient of the first layer is always signal^T X.
So its outputs are z = Z0 + K S with K = X X^T: for a peer with few samples, less to multiply than X W^T in every epoch.
Exact up to rounding.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spark_node.config import LocalSettings
from spark_node.learning.chain import ChainRule, Link
from spark_node.model import ParameterLayout, attach


def pays(settings: LocalSettings, samples: int, inputs: int, outputs: int) -> bool:
    """Whether a round takes fewer multiplications here, for a first layer of that many inputs and outputs.

    Decayed weights and sharpness-aware steps leave the space that the inputs span, or need W itself at every step.
    """
    if settings.weight_decay or settings.sam_rho:
        return False
    steps = settings.epochs * math.ceil(samples / (settings.batch_size or samples))
    there = 2 * settings.epochs * samples * inputs * outputs + steps * inputs * outputs
    here = samples * samples * inputs + 2 * samples * inputs * outputs + settings.epochs * samples * samples * outputs
    return here < there


class SampleSpace:
    """Gradient steps on a chain's w: A <- mu A, A[batch] += signal, S <- S - eta A; all other layers as in Descent.

    The first layer in w stands still until `finish`. The module's parameters become views of w. A and S begin at zero.
    """

    def __init__(
        self, module: nn.Module, links: list[Link], w: Tensor, settings: LocalSettings, eta: float, x: Tensor
    ) -> None:
        attach(module, w)
        layout, name = ParameterLayout.of(module), links[0].name
        parameters, v = layout.unflatten(w), torch.zeros_like(w)
        self._mu, self._eta, self._x = settings.momentum, eta, x.flatten(1)
        self._weight, self._bias = parameters[f"{name}.weight"], parameters.get(f"{name}.bias")
        behind = slice(sum(p.numel() for p in (self._weight, self._bias) if p is not None), None)
        self._w, self._v, self._rule = w[behind], v[behind], ChainRule(links, layout, w, v)
        self._s = w.new_zeros(len(x), len(self._weight))
        self._a = torch.zeros_like(self._s)

    def seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a step needs to know of each sample: its row in S, its outputs in Z0 and its row of K.

        A bias is the weight of an input that is 1 for every sample, which adds 1 to all of K.
        """
        z = F.linear(self._x, self._weight, self._bias)
        kernel = self._x @ self._x.T
        return torch.arange(len(z), device=z.device), z, kernel if self._bias is None else kernel.add_(1)

    def step(self, rows: Tensor, z: Tensor, kernel: Tensor, y: Tensor) -> Tensor:
        """One step on one batch of what is `seen`; its loss before the step."""
        loss, signal = self._rule.behind_first(self._mu, torch.addmm(z, kernel, self._s), y)
        if self._mu:
            self._s.add_(self._a.mul_(self._mu).index_add_(0, rows, signal), alpha=-self._eta)
        else:
            self._s.index_add_(0, rows, signal, alpha=-self._eta)
        self._w.add_(self._v, alpha=-self._eta)
        return loss

    def finish(self) -> None:
        """W <- W0 + S^T X, b <- b0 + sum of S over the samples."""
        self._weight.addmm_(self._s.T, self._x)
        if self._bias is not None:
            self._bias.add_(self._s.sum(0))
