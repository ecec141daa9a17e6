"""Kernel evolution of the predictions, and the choice of t*.

    df/dt = -(eta / N) K r(f),     dS/dt = r(f),     r(f) = softmax(f) - Y_tgt

One kernel product per evaluation. f_t = f_0 - (eta / N) K S_t holds by linearity for every method below, and the
weight update is -(eta / N) J^T S_{t*} (eq. compressed_update). `euler` is the paper's literal sum with unit steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, Required, TypedDict

import torch
from torch import Tensor

MAX_STAGES = 250
FLOOR_F, FLOOR_S = 1.0, 0.3
RADIUS_EVERY = 3
"""Steps that share one estimate of the spectral radius: it drifts slowly, and a refused step takes a new one."""


class KernelOperator(Protocol):
    """A symmetric positive semi-definite kernel over N samples and C classes that is applied, never stored."""

    @property
    def samples(self) -> int:
        """N, over the whole neighbourhood."""

    def apply(self, residual: Tensor) -> Tensor:
        """K times a residual, both [N, C]."""

    def pull_back(self, residual: Tensor) -> Tensor:
        """J^T times a residual [N, C], as a flat parameter vector [d]."""


@dataclass(frozen=True)
class Loss:
    """A loss over predictions: its gradient r(f, Y), its value against labels, its largest curvature in f."""

    residual: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor, Tensor], Tensor]
    curvature: Callable[[Tensor, Tensor], Tensor]
    """(f, v) -> Hessian of the loss at f times v, both [N, C]."""


def _softmax_curvature(f: Tensor, v: Tensor) -> Tensor:
    p = torch.softmax(f, 1)
    pv = p * v
    return pv - p * pv.sum(1, keepdim=True)


LOSSES = {
    "cross-entropy": Loss(
        residual=lambda f, y: torch.softmax(f, 1) - y,
        value=lambda f, y: -(y * torch.log_softmax(f, 1)).sum(1).mean(),
        curvature=_softmax_curvature,
    ),
    "squared": Loss(
        residual=lambda f, y: f - y,
        value=lambda f, y: 0.5 * (f - y).square().sum(1).mean(),
        curvature=lambda f, v: v,
    ),
}


@dataclass(frozen=True)
class Trajectory:
    """f_t and S_t = sum of residuals up to t, for every t of the grid T."""

    times: tuple[int, ...]
    predictions: tuple[Tensor, ...]
    residual_sums: tuple[Tensor, ...]
    evaluations: int
    """Kernel products spent."""


@dataclass(frozen=True)
class Problem:
    """The right-hand side of the evolution, with its own count of kernel products."""

    kernel: KernelOperator
    f0: Tensor
    target: Tensor
    eta: float
    loss: Loss

    def slope(self, f: Tensor) -> Tensor:
        """[2, N, C]: d(f, S)/dt."""
        r = self.loss.residual(f, self.target)
        return torch.stack([self.kernel.apply(r).mul_(-self.eta / self.kernel.samples), r])


class EvolutionTerms(TypedDict, total=False):
    """What `evolve` takes beside the tensors, for those who pass it on."""

    eta: Required[float]
    timesteps: Required[Sequence[int]]
    integrator: str
    tolerance: float
    loss: str


def evolve(
    kernel: KernelOperator,
    f0: Tensor,
    target: Tensor,
    *,
    eta: float,
    timesteps: Sequence[int],
    integrator: str = "rkc",
    tolerance: float = 0.02,
    loss: str = "cross-entropy",
) -> Trajectory:
    """The trajectory of the predictions over the grid `timesteps` (rising)."""
    problem = Problem(kernel, f0, target, eta, LOSSES[loss])
    states, evaluations = _INTEGRATORS[integrator](problem, tuple(timesteps), tolerance)
    return Trajectory(
        times=tuple(timesteps),
        predictions=tuple(state[0] for state in states),
        residual_sums=tuple(state[1] for state in states),
        evaluations=evaluations,
    )


def _euler(problem: Problem, times: tuple[int, ...], tolerance: float) -> tuple[list[Tensor], int]:
    """Unit steps, as eq. prediction_evolution is written."""
    state = torch.stack([problem.f0, torch.zeros_like(problem.f0)])
    states = []
    for step in range(1, times[-1] + 1):
        state = state + problem.slope(state[0])
        if step in times:
            states.append(state)
    return states, times[-1]


def _dopri5(problem: Problem, times: tuple[int, ...], tolerance: float) -> tuple[list[Tensor], int]:
    """The error-controlled pair that NTK-DFL uses, from torchdiffeq.

    Its local error says little at the edge of its stability region, where these problems keep it: to end within
    `tolerance` it is held to a hundredth of that.
    """
    from torchdiffeq import odeint

    evaluations = 0

    def slope(_: Tensor, state: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return problem.slope(state[0])

    start = torch.stack([problem.f0, torch.zeros_like(problem.f0)])
    grid = torch.tensor((0, *times), dtype=problem.f0.dtype, device=problem.f0.device)
    states = odeint(slope, start, grid, method="dopri5", rtol=tolerance / 100, atol=tolerance / 100)
    return list(states[1:]), evaluations


@lru_cache(maxsize=MAX_STAGES)
def _rkc_coefficients(stages: int) -> tuple[float, list[tuple[float, float, float, float]]]:
    """mu~_1 and (mu, nu, mu~, gamma~) of stages 2..s of the second-order Runge-Kutta-Chebyshev method.

    Sommeijer, Shampine, Verwer, "RKC: an explicit solver for parabolic PDEs" (1998), eqs. 2.5 to 2.8.
    """
    w0 = 1 + (2 / 13) / stages**2
    t, dt, d2t = [1.0, w0], [0.0, 1.0], [0.0, 0.0]
    for _ in range(2, stages + 1):
        d2t.append(2 * w0 * d2t[-1] - d2t[-2] + 4 * dt[-1])
        dt.append(2 * w0 * dt[-1] - dt[-2] + 2 * t[-1])
        t.append(2 * w0 * t[-1] - t[-2])
    w1 = dt[stages] / d2t[stages]
    b = [0.0, 0.0] + [d2t[j] / dt[j] ** 2 for j in range(2, stages + 1)]
    b[0] = b[1] = b[2]
    rows = []
    for j in range(2, stages + 1):
        mu_tilde = 2 * b[j] * w1 / b[j - 1]
        a = 1 - b[j - 1] * t[j - 1]
        rows.append((2 * b[j] * w0 / b[j - 1], -b[j] / b[j - 2], mu_tilde, -a * mu_tilde))
    return b[1] * w1, rows


def _rkc_step(problem: Problem, y0: Tensor, slope0: Tensor, h: float, stages: int) -> Tensor:
    """One step of s stages: s - 1 kernel products beside the one in `slope0`."""
    first, rows = _rkc_coefficients(stages)
    before, y = y0, torch.add(y0, slope0, alpha=first * h)
    for mu, nu, mu_tilde, gamma_tilde in rows:
        after = y0 * (1 - mu - nu)
        after.add_(y, alpha=mu).add_(before, alpha=nu)
        after.add_(slope0, alpha=gamma_tilde * h).add_(problem.slope(y[0]), alpha=mu_tilde * h)
        before, y = y, after
    return y


def _spectral_radius(problem: Problem, f: Tensor, v: Tensor, rounds: int) -> tuple[float, Tensor]:
    """Largest eigenvalue of (eta / N) H(f) K by power iteration from v; H is the loss's curvature."""
    rho = 0.0
    for _ in range(rounds):
        v = v / v.norm().clamp_min(torch.finfo(v.dtype).tiny)
        v = problem.loss.curvature(f, problem.kernel.apply(v)) * (problem.eta / problem.kernel.samples)
        rho = float(v.norm())
    return rho, v


def _rkc(problem: Problem, times: tuple[int, ...], tolerance: float) -> tuple[list[Tensor], int]:
    """Error-controlled Runge-Kutta-Chebyshev: the stages follow the spectral radius, the step the local error.

    Values at the grid come from the cubic Hermite interpolant of the step that covers them.
    """
    y = start = torch.stack([problem.f0, torch.zeros_like(problem.f0)])
    slope = problem.slope(problem.f0)
    # The error of (f, S) is measured against how far they have moved, and at least this far: a logit of FLOOR_F,
    # and a FLOOR_S-th of what S becomes until the first time of the grid.
    floor = torch.stack([slope.new_tensor(FLOOR_F * math.sqrt(y[0].numel())), FLOOR_S * times[0] * slope[1].norm()])
    rho, v = _spectral_radius(problem, problem.f0, slope[1], 4)
    evaluations = 5
    end, t = float(times[-1]), 0.0
    h = min(end, 1 / max(rho, 1 / end))
    states: list[Tensor] = []
    age = 0
    while t < end:
        if not math.isfinite(rho):
            raise ArithmeticError("the evolution cannot start: the kernel or the predictions are not finite")
        # RKC is stable for h rho <= 0.653 (s^2 - 1); 1.15 covers what the estimate misses and the drift in a step.
        h = min(h, end - t, 0.653 * (MAX_STAGES**2 - 1) / max(1.15 * rho, 1e-30))
        stages = max(2, math.ceil(math.sqrt(1 + 1.15 * rho * h / 0.653)))
        new = _rkc_step(problem, y, slope, h, stages)
        new_slope = problem.slope(new[0])
        evaluations += stages
        local = (y - new).mul_(0.8).add_(slope + new_slope, alpha=0.4 * h)
        error = _relative_error(local, new - start, floor, tolerance)
        factor = min(5.0, max(0.1, 0.8 * error ** (-1 / 3))) if error > 0 else 5.0
        if not error <= 1:  # also refuses NaN
            rho, v = _spectral_radius(problem, y[0], v, 2)
            evaluations += 2
            h *= min(factor, 0.5) if error == error else 0.1
            if h < 1e-6 * end:
                raise ArithmeticError("the evolution diverges: the kernel or the predictions are not finite")
            continue
        states += [_hermite(y, slope, new, new_slope, h, (s - t) / h) for s in times if t < s <= t + h * (1 + 1e-9)]
        t, y, slope = (end if end - t - h < 1e-9 * end else t + h), new, new_slope
        h *= factor
        age += 1
        # A step that will not grow may be held back by a radius taken too small.
        if factor < 1.2 or (stages > 3 and age >= RADIUS_EVERY):
            rho, v = _spectral_radius(problem, y[0], v, 1)
            evaluations += 1
            age = 0
    return states, evaluations


def _relative_error(local: Tensor, moved: Tensor, floor: Tensor, tolerance: float) -> float:
    """Local error of (f, S) over the tolerance, each against how far it has moved."""
    scale = (moved.flatten(1).norm(dim=1) + floor).clamp_min(torch.finfo(floor.dtype).tiny)
    return float((local.flatten(1).norm(dim=1) / (tolerance * scale)).max())


def _hermite(y: Tensor, slope: Tensor, new: Tensor, new_slope: Tensor, h: float, theta: float) -> Tensor:
    if theta >= 1 - 1e-9:
        return new
    return (
        y * ((1 + 2 * theta) * (1 - theta) ** 2)
        + slope * (h * theta * (1 - theta) ** 2)
        + new * (theta**2 * (3 - 2 * theta))
        + new_slope * (h * theta**2 * (theta - 1))
    )


_INTEGRATORS: dict[str, Callable[[Problem, tuple[int, ...], float], tuple[list[Tensor], int]]] = {
    "rkc": _rkc,
    "dopri5": _dopri5,
    "euler": _euler,
}


def choose_by_loss(losses: Sequence[float]) -> int:
    """Position of t* = argmin of the loss over the grid (the first, on a tie)."""
    return min(range(len(losses)), key=lambda i: (losses[i], i))
