"""Gossip averaging with local stochastic gradient descent: D-PSGD, DFedAvg, DFedAvgM and DFedSAM.

A round: send w, average with who arrived, train locally. The four differ in [local] only: epochs, batches, momentum,
sharpness. All peers start from one model, so this is "train locally, then average" cut at another point: the model
after local training is what is evaluated and sent next, as in every other algorithm here.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from spark_node.config import LocalSettings
from spark_node.learning import schedules
from spark_node.learning.chain import Autograd, ChainRule, links_of
from spark_node.learning.gossip import Gossip
from spark_node.model import ParameterLayout
from spark_node.seeds import stream


class GossipSgd(Gossip):
    """Local training by gradient steps; momentum begins anew in every round."""

    def train(self, k: int) -> dict[str, float]:
        """All epochs of round k, in place. Facts: the learning rate, and the mean loss met in the last epoch."""
        settings, samples = self.config.local, len(self.labels)
        eta = schedules.local_learning_rate(settings, k)
        if not samples:
            return {"eta": eta}
        descent = Descent(self.module, self.w, settings, eta)
        for batches in self._epochs(k):
            losses = [descent.step(x, y) for x, y in batches]
        met = zip(torch.stack(losses).tolist(), batches, strict=True)
        return {"eta": eta, "loss": sum(loss * len(y) for loss, (_, y) in met) / samples}

    def _epochs(self, k: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """The batches of each epoch, in an order of their own; the last batch is smaller where they do not divide."""
        size, samples = self.config.local.batch_size or len(self.labels), len(self.labels)
        random = stream(self.config.run.seed, "batches", self.peer, k)
        for _ in range(self.config.local.epochs):
            x, y = self.inputs, self.labels
            if size < samples:
                order = torch.from_numpy(random.permutation(samples)).to(x.device)
                x, y = x[order], y[order]  # gathered once an epoch: a batch is a view
            yield list(zip(x.split(size), y.split(size), strict=True))


class Descent:
    """Gradient steps on w, in place, as a few operations on flat vectors: v <- mu v + g + lambda w, w <- w - eta v.

    The module's parameters become views of w. A new Descent begins with v = 0.
    """

    def __init__(self, module: nn.Module, w: Tensor, settings: LocalSettings, eta: float) -> None:
        self._module, self._layout = module, ParameterLayout.of(module)
        self._settings, self._eta = settings, eta
        self.w, self.v = w, torch.zeros_like(w)
        for parameter, view in zip(module.parameters(), self._layout.unflatten(w).values(), strict=True):
            parameter.requires_grad_(True)
            parameter.data = view
        self._gather = self._into(self.v)
        if settings.sam_rho:
            self._gradient = torch.empty_like(w)
            self._ascend = self._into(self._gradient)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step on one batch; its loss before the step."""
        mu, decay = self._settings.momentum, self._settings.weight_decay
        loss = self._gather_sharply(x, y) if self._settings.sam_rho else self._gather(mu, x, y)
        if decay:
            self.v.add_(self.w, alpha=decay)
        self.w.add_(self.v, alpha=-self._eta)
        return loss

    def _gather_sharply(self, x: Tensor, y: Tensor) -> Tensor:
        """v <- mu v + grad L(w + eps), with eps from the gradient at w."""
        loss, w = self._ascend(0.0, x, y), self.w.clone()
        self.w.add_(perturbation(w, self._gradient, self._settings))
        self._gather(self._settings.momentum, x, y)
        self.w.copy_(w)
        return loss

    def _into(self, v: Tensor) -> ChainRule | Autograd:
        """What gathers gradients in v."""
        links = links_of(self._module)
        return ChainRule(links, self._layout, self.w, v) if links else Autograd(self._module, self._layout, v)


def perturbation(w: Tensor, gradient: Tensor, settings: LocalSettings) -> Tensor:
    """SAM's eps = rho g / ||g||; adaptive (ASAM): rho T^2 g / ||T g|| with T = |w| + eta_sam, number by number."""
    tiny = torch.finfo(w.dtype).tiny
    if not settings.sam_adaptive:
        return gradient.mul(settings.sam_rho).div_(gradient.norm() + tiny)
    scale = w.abs().add_(settings.sam_eta)
    scaled = scale * gradient
    return scale.mul_(scaled).mul_(settings.sam_rho).div_(scaled.norm() + tiny)
