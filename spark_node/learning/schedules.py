"""The learning rate over rounds."""

import math

from spark_node.config import LearningSettings


def learning_rate(settings: LearningSettings, k: int) -> float:
    """eta of round k (from 1): exponential decay, and the cyclic boost in its preset rounds."""
    boost = settings.eta_boost if k in settings.eta_boost_rounds else 1.0
    return settings.eta * math.exp(-settings.eta_decay * (k - 1)) * boost
