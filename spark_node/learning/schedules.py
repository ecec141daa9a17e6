"""What changes over rounds: the learning rate and the kernel."""

import math

from spark_node.config import LearningSettings, LocalSettings


def learning_rate(settings: LearningSettings, k: int) -> float:
    """eta of round k (from 1): constant at first, then exponential decay; boosted in its preset rounds."""
    boost = settings.eta_boost if k in settings.eta_boost_rounds else 1.0
    return settings.eta * math.exp(-settings.eta_decay * max(0, k - 1 - settings.eta_hold)) * boost


def kernel(settings: LearningSettings, k: int) -> str:
    """The kernel of round k: `kernel`, or the full one in the first `full_rounds` rounds."""
    return "full" if k <= settings.full_rounds else settings.kernel


def local_learning_rate(settings: LocalSettings, k: int) -> float:
    """Of the gradient steps of round k (from 1): lr in the first round, lr_decay times as much in each next one."""
    return settings.lr * settings.lr_decay ** (k - 1)
