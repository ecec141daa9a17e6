"""Test accuracy of flat weight vectors."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spark_node.model import ParameterLayout


def accuracy(module: nn.Module, w: Tensor, x: Tensor, y: Tensor, batch: int = 2000) -> float:
    """Fraction of the samples whose largest logit is their label's."""
    module = copy.deepcopy(module)  # functional_call swaps its parameters while it runs, and threads may share it
    parameters = ParameterLayout.of(module).unflatten(w)
    hits = 0
    with torch.no_grad():
        for inputs, labels in zip(x.split(batch), y.split(batch), strict=True):
            logits = functional_call(module, parameters, (inputs,))
            hits += int((logits.argmax(1) == labels).sum())
    return hits / len(y)


def mean_weights(models: Sequence[Tensor]) -> Tensor:
    """The aggregated model: the plain mean of all peers' weights, added in float64."""
    return mean_of(add_weights(None, models), len(models), models[0])


def add_weights(total: Tensor | None, models: Sequence[Tensor]) -> Tensor:
    """A running sum of weights in float64, with these added one after the other."""
    total = torch.zeros_like(models[0], dtype=torch.float64) if total is None else total.clone()
    for w in models:
        total += w
    return total


def mean_of(total: Tensor, count: int, like: Tensor) -> Tensor:
    """The mean model of a sum of `count`."""
    return (total / count).to(like)
