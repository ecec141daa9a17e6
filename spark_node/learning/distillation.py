"""Stage-wise annealed distillation: the schedule and the targets (Algorithm 2)."""

import math

import torch
from torch import Tensor

from spark_node.config import DistillationSettings


def schedule(settings: DistillationSettings, k: int, rounds: int) -> tuple[float, float]:
    """alpha^(k) and tau^(k) of round k (from 1) of R rounds: eqs. progress, alpha_schedule, tau_schedule."""
    if not settings.enabled or k <= settings.r_warm:
        return 1.0, 1.0
    p = min(1.0, (k - settings.r_warm) / max(1, rounds - settings.r_warm))
    alpha = settings.alpha_final + 0.5 * (settings.alpha_init - settings.alpha_final) * (1 + math.cos(math.pi * p))
    tau = settings.tau_init + (settings.tau_final - settings.tau_init) * p
    return alpha, tau


def target(hard: Tensor, logits: Tensor, alpha: float, tau: float) -> Tensor:
    """Y_tgt = alpha Y_hard + (1 - alpha) softmax(z_agg / tau): eqs. soft_labels, distillation_target."""
    if alpha == 1.0:
        return hard
    return alpha * hard + (1 - alpha) * torch.softmax(logits / tau, dim=1)
