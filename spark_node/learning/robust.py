"""Learning beside peers that lie: averages that a few cannot bend, and packages that must agree with themselves."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from spark_node.config import RobustSettings
from spark_node.learning.evolution import LOSSES
from spark_node.learning.layers import Jacobian, LayerJacobian
from spark_node.learning.messages import Package
from spark_node.learning.signals import IdentitySignals


def mean(weights: Tensor, own: int, settings: RobustSettings) -> Tensor:
    """Of the rows of [n, d]: what the paper does, and what one liar can move anywhere."""
    return weights.mean(0)


def median(weights: Tensor, own: int, settings: RobustSettings) -> Tensor:
    """Of each coordinate; the mean of the middle two where n is even."""
    ordered = weights.sort(0).values
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed_mean(weights: Tensor, own: int, settings: RobustSettings) -> Tensor:
    """Of each coordinate, without the `trim` share at either end, rounded up; one or two values are always left.

    It stands as many liars in a neighbourhood as it leaves out at one end: liars that exaggerate all stand there.
    """
    n = len(weights)
    cut = min(math.ceil(settings.trim * n), (n - 1) // 2)
    return weights.sort(0).values[cut : n - cut].mean(0)


def clipped_gossip(weights: Tensor, own: int, settings: RobustSettings) -> Tensor:
    """w_i + mean_j clip(w_j - w_i, tau) (He, Karimireddy, Jaggi 2022), tau the `clip` quantile of the distances."""
    steps = weights - weights[own]
    lengths = steps.norm(dim=1)
    others = torch.cat([lengths[:own], lengths[own + 1 :]])
    if len(others) == 0:
        return weights[own]
    radius = others.quantile(settings.clip, interpolation="lower")
    shrink = (radius / lengths.clamp_min(1e-30)).clamp_max(1.0)
    moved: Tensor = weights[own] + (steps * shrink[:, None]).mean(0)
    return moved


AVERAGES: dict[str, Callable[[Tensor, int, RobustSettings], Tensor]] = {
    "mean": mean,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "clipped": clipped_gossip,
}


def average(everyone: Mapping[str, Tensor], own: str, settings: RobustSettings) -> Tensor:
    """The consensus of a neighbourhood; rows in the order of the peers' names, so that all get the same bits."""
    names = sorted(everyone)
    return AVERAGES[settings.weights](torch.stack([everyone[peer] for peer in names]), names.index(own), settings)


def screen(packages: Mapping[str, Package], own: str, settings: RobustSettings, loss: str) -> dict[str, str]:
    """Which neighbours' packages are not to be used, and why.

    - it contradicts itself: the last layer's Jacobian times that layer's weights is not the logits;
    - it could pull on the weights many times as hard as is usual;
    - its labels contradict what the model knows: a loss far above the usual.
    """
    pulls = {peer: _pull(package) for peer, package in packages.items()}
    losses = {peer: _loss(package, loss) for peer, package in packages.items()}
    usual_pull = _median(list(pulls.values()))
    usual_loss = _median(list(losses.values()))
    spread = _median([abs(value - usual_loss) for value in losses.values()])
    classes = packages[own].jacobian.logits.shape[1]
    highest = usual_loss + max(settings.loss_spread * spread, math.log(classes))
    found: dict[str, str] = {}
    for peer, package in packages.items():
        if peer == own:
            continue
        if not agrees(package, settings.agreement):
            found[peer] = "inconsistent"
        elif pulls[peer] > settings.influence * max(usual_pull, 1e-12):
            found[peer] = "influence"
        elif losses[peer] > highest:
            found[peer] = "loss"
    return found


def agrees(package: Package, tolerance: float) -> bool:
    """Whether J_L w_L = f for the last layer L, a linear one: W a + b are the logits. True where it cannot be told."""
    last = _last_linear(package.jacobian)
    if last is None or package.at is None or package.at.numel() != package.jacobian.parameters:
        return True
    logits = package.jacobian.logits
    difference = float((last.push(package.at) - logits).norm())
    return difference <= tolerance * (float(logits.norm()) + 1e-6)


def _last_linear(jacobian: Jacobian) -> LayerJacobian | None:
    """The layer whose outputs are the logits, where it is there in factors."""
    for layer in jacobian.layers:
        if isinstance(getattr(layer, "signals", None), IdentitySignals):
            return layer
    return None


def _pull(package: Package) -> float:
    """How hard the package could pull on the weights: the norm of J^T r / N for residuals r of size one.

    Its own residuals would not do: they vanish where a model fits its peer's samples.
    """
    jacobian = package.jacobian
    residual = torch.full_like(jacobian.logits, -1 / jacobian.logits.shape[1])
    residual.scatter_add_(1, package.labels[:, None], torch.ones_like(residual[:, :1]))
    into = jacobian.logits.new_zeros(jacobian.parameters)
    for layer in jacobian.layers:
        layer.pull(residual, into)
    return float(into.norm()) / jacobian.samples


def _loss(package: Package, loss: str) -> float:
    return float(LOSSES[loss].value(package.jacobian.logits, _one_hot(package)))


def _one_hot(package: Package) -> Tensor:
    logits = package.jacobian.logits
    return torch.nn.functional.one_hot(package.labels, logits.shape[1]).to(logits)


def _median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))
