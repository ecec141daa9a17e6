"""Momentum over rounds: eqs. velocity_update and nesterov_update."""

from torch import Tensor


def step(kind: str, mu: float, w: Tensor, v: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """(w^(k+1), v^(k+1)) from the consensus weights, the velocity and Delta w^(k)."""
    if kind == "off":
        return w + delta, v
    v = mu * v + delta
    if kind == "nesterov":
        return w + mu * v + delta, v
    return w + v, v
