"""Momentum over rounds: eqs. velocity_update and nesterov_update, and two relatives.

nesterov      v <- mu v + Delta w,  w <- c + mu v + Delta w     (c: the consensus weights of the round)
heavy-ball    v <- mu v + Delta w,  w <- c + v
quasi-global  v <- mu v + (1 - mu) (c - c'),  w <- c + mu v + Delta w     (c': the consensus of the round before)

The last is QG-DSGDm (Lin et al., 2021): m <- mu m + (1 - mu) (x' - x) / eta over averaged models, and a step
-eta (mu m + g). With v = -eta m and Delta w = -eta g, eta is gone. A peer's own Delta w drives its velocity only as
far as averaging lets it through, so the velocity does not run after the classes that the peer happens to hold; under
a constant Delta w it ends, like heavy ball, at steps of Delta w / (1 - mu). It needs no bytes: a peer has both models.
"""

from torch import Tensor


def step(kind: str, mu: float, w: Tensor, v: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """(w^(k+1), v^(k+1)) from the consensus weights, the velocity and Delta w^(k)."""
    if kind == "off":
        return w + delta, v
    if kind == "quasi-global":
        return w + mu * v + delta, v
    v = mu * v + delta
    if kind == "nesterov":
        return w + mu * v + delta, v
    return w + v, v


def follow(mu: float, v: Tensor, before: Tensor | None, now: Tensor) -> Tensor:
    """The quasi-global velocity once this round's consensus is known; as it is where there was none before."""
    return v if before is None else mu * v + (1 - mu) * (now - before)
