"""Gossip averaging with local stochastic gradient descent: D-PSGD, DFedAvg, DFedAvgM and DFedSAM.

A round: send w, average with who arrived, train locally. The four differ in [local] only: epochs, batches, momentum,
sharpness. All peers start from one model, so this is "train locally, then average" cut at another point: the model
after local training is what is evaluated and sent next, as in every other algorithm here.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from spark_node.config import LocalSettings
from spark_node.learning import sample_space, schedules
from spark_node.learning.chain import Autograd, ChainRule, links_of
from spark_node.learning.gossip import Gossip
from spark_node.learning.sample_space import SampleSpace
from spark_node.model import ParameterLayout, attach
from spark_node.seeds import stream


class GossipSgd(Gossip):
    """Local training by gradient steps; momentum begins anew in every round."""

    def train(self, k: int) -> dict[str, float]:
        """All epochs of round k, in place. Facts: the learning rate, and the mean loss met in the last epoch."""
        samples, eta = len(self.labels), schedules.local_learning_rate(self.config.local, k)
        if not samples:
            return {"eta": eta}
        descent = self._descent(eta)
        for batches in self._epochs(k, *descent.seen(), self.labels):
            losses = [descent.step(*batch) for batch in batches]
        descent.finish()
        met = zip(torch.stack(losses).tolist(), batches, strict=True)
        return {"eta": eta, "loss": sum(loss * len(batch[-1]) for loss, batch in met) / samples}

    def _descent(self, eta: float) -> "Descent | SampleSpace":
        """The way of descent with less arithmetic, for this model and these samples."""
        settings, links = self.config.local, links_of(self.module)
        if links:
            outputs, inputs = self.parameters()[f"{links[0].name}.weight"].shape
            if sample_space.pays(settings, len(self.labels), inputs, outputs):
                return SampleSpace(self.module, links, self.w, settings, eta, self.inputs)
        return Descent(self.module, self.w, settings, eta, self.inputs)

    def _epochs(self, k: int, *seen: Tensor) -> Iterator[list[tuple[Tensor, ...]]]:
        """The batches of each epoch, in an order of their own; the last batch is smaller where they do not divide.

        A batch has its part of every tensor that is given, which have a row a sample.
        """
        size, samples = self.config.local.batch_size or len(self.labels), len(self.labels)
        random = stream(self.config.run.seed, "batches", self.peer, k)
        for _ in range(self.config.local.epochs):
            rows = seen
            if size < samples:
                order = torch.from_numpy(random.permutation(samples)).to(self.labels.device)
                rows = tuple(tensor[order] for tensor in seen)  # gathered once an epoch: a batch is a view
            yield list(zip(*(tensor.split(size) for tensor in rows), strict=True))


class Descent:
    """Gradient steps on w, in place, as a few operations on flat vectors: v <- mu v + g + lambda w, w <- w - eta v.

    The module's parameters become views of w. A new Descent begins with v = 0.
    """

    def __init__(self, module: nn.Module, w: Tensor, settings: LocalSettings, eta: float, x: Tensor) -> None:
        attach(module, w)
        self._module, self._layout, self._x = module, ParameterLayout.of(module), x
        self._settings, self._eta = settings, eta
        self.w, self.v = w, torch.zeros_like(w)
        self._gather = self._into(self.v)
        if settings.sam_rho:
            self._start, self._gradient, self._scale = (torch.empty_like(w) for _ in range(3))
            self._ascend = self._into(self._gradient)

    def seen(self) -> tuple[Tensor]:
        """What a step needs to know of each sample."""
        return (self._x,)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step on one batch; its loss before the step."""
        mu, decay, start = self._settings.momentum, self._settings.weight_decay, self.w
        if self._settings.sam_rho:
            loss, start = self._ascend(0.0, x, y), self._start.copy_(self.w)
            perturb(self.w, self._gradient, self._scale, self._settings)
            self._gather(mu, x, y)  # the gradient at w + eps; the step itself begins at w
        else:
            loss = self._gather(mu, x, y)
        if decay:
            self.v.add_(start, alpha=decay)
        torch.add(start, self.v, alpha=-self._eta, out=self.w)
        return loss

    def finish(self) -> None:
        """Nothing is left to do: w is up to date after every step."""

    def _into(self, v: Tensor) -> ChainRule | Autograd:
        """What gathers gradients in v."""
        links = links_of(self._module)
        return ChainRule(links, self._layout, self.w, v) if links else Autograd(self._module, self._layout, v)


def perturb(w: Tensor, gradient: Tensor, scale: Tensor, settings: LocalSettings) -> None:
    """w <- w + eps of SAM, eps = rho g / ||g||; adaptive (ASAM): rho T^2 g / ||T g|| with T = |w| + eta_sam.

    In place, since passes over vectors of this length are what it costs: the gradient is spent, and T stands in scale.
    """
    if not settings.sam_adaptive:
        w.add_(gradient.div_(_norm(gradient).div_(settings.sam_rho)))
        return
    torch.abs(w, out=scale).add_(settings.sam_eta)
    gradient.mul_(scale)
    w.addcmul_(scale, gradient.div_(_norm(gradient).div_(settings.sam_rho)))


def _norm(gradient: Tensor) -> Tensor:
    """||g|| + 1e-12, as SAM's published code has it: once a batch is fitted, g is 1e-25 and its squares are zero."""
    norm: Tensor = gradient.norm().add_(1e-12)
    return norm
