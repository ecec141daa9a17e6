"""Integrators against a fine-step reference, the choice of t*, and the story that f_t and Delta w tell together."""

import math

import pytest
import torch
from torch import Tensor

from spark_node.learning.evolution import LOSSES, MAX_STAGES, _rkc_coefficients, choose_by_loss, evolve
from spark_node.learning.jacobian import jacobian
from spark_node.learning.kernel import FullKernel, TraceKernel
from spark_node.model import flatten
from tests.unit.networks import CLASSES, inputs, neighbourhood, network

GRID = (50, 100, 200)


class MatrixKernel:
    """A dense kernel that is the same for every class: the reference's own operator."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.samples = matrix, len(matrix)

    def apply(self, residual: Tensor) -> Tensor:
        return self.matrix @ residual

    def pull_back(self, residual: Tensor) -> Tensor:
        return residual.reshape(-1)


def problem(samples: int = 30, stiffness: float = 60.0) -> tuple[MatrixKernel, Tensor, Tensor]:
    """A kernel with eigenvalues over six decades; eta / N times the largest is `stiffness` / N."""
    g = torch.Generator().manual_seed(1)
    basis, _ = torch.linalg.qr(torch.randn(samples, samples, generator=g, dtype=torch.float64))
    values = stiffness * torch.logspace(0, -6, samples, dtype=torch.float64)
    kernel = MatrixKernel(basis @ torch.diag(values) @ basis.T)
    f0 = torch.randn(samples, CLASSES, generator=g, dtype=torch.float64)
    labels = torch.randint(CLASSES, (samples,), generator=g)
    return kernel, f0, torch.nn.functional.one_hot(labels, CLASSES).double()


def fine_reference(kernel: MatrixKernel, f0: Tensor, y: Tensor, eta: float, loss: str, parts: int) -> list[Tensor]:
    """S at the grid by classical Runge-Kutta with `parts` steps per unit of time."""
    residual = LOSSES[loss].residual
    f, s, h, found = f0.clone(), torch.zeros_like(f0), 1 / parts, []

    def slope(f: Tensor) -> tuple[Tensor, Tensor]:
        r = residual(f, y)
        return -eta / kernel.samples * kernel.matrix @ r, r

    for step in range(1, GRID[-1] * parts + 1):
        f1, s1 = slope(f)
        f2, s2 = slope(f + h / 2 * f1)
        f3, s3 = slope(f + h / 2 * f2)
        f4, s4 = slope(f + h * f3)
        f, s = f + h / 6 * (f1 + 2 * f2 + 2 * f3 + f4), s + h / 6 * (s1 + 2 * s2 + 2 * s3 + s4)
        if step % parts == 0 and step // parts in GRID:
            found.append(s)
    return found


@pytest.mark.parametrize("loss", ["cross-entropy", "squared"])
@pytest.mark.parametrize(
    ("integrator", "tolerance", "bound"), [("rkc", 0.03, 0.01), ("rkc", 1e-6, 1e-4), ("dopri5", 0.03, 0.01)]
)
def test_integrators_stay_within_a_percent_of_a_fine_reference(
    integrator: str, tolerance: float, bound: float, loss: str
) -> None:
    kernel, f0, y = problem()
    reference = fine_reference(kernel, f0, y, 1.0, loss, parts=8)
    found = evolve(kernel, f0, y, eta=1.0, timesteps=GRID, integrator=integrator, tolerance=tolerance, loss=loss)
    for s, expected in zip(found.residual_sums, reference, strict=True):
        assert float((s - expected).norm() / expected.norm()) < bound


def test_a_smaller_tolerance_gives_a_smaller_error_at_a_higher_price() -> None:
    kernel, f0, y = problem()
    reference = fine_reference(kernel, f0, y, 1.0, "cross-entropy", parts=8)[-1]
    runs = [evolve(kernel, f0, y, eta=1.0, timesteps=GRID, tolerance=t) for t in (0.1, 1e-3, 1e-6)]
    errors = [float((run.residual_sums[-1] - reference).norm()) for run in runs]
    assert errors[0] > errors[1] > errors[2]
    assert runs[0].evaluations < runs[1].evaluations < runs[2].evaluations


def test_euler_is_the_papers_sum_of_residuals() -> None:
    kernel, f0, y = problem(samples=5, stiffness=4.0)
    found = evolve(kernel, f0, y, eta=0.5, timesteps=(1, 3), integrator="euler")
    predictions = [f0]
    for _ in range(3):
        total = sum(torch.softmax(f, 1) for f in predictions) - len(predictions) * y
        predictions.append(f0 - 0.5 / 5 * kernel.matrix @ total)
    torch.testing.assert_close(found.predictions[1], predictions[3])
    expected = sum(torch.softmax(f, 1) for f in predictions[:3]) - 3 * y
    torch.testing.assert_close(found.residual_sums[1], expected)
    assert found.evaluations == 3


def test_the_stabilised_method_needs_far_fewer_products_than_euler_on_a_stiff_problem() -> None:
    kernel, f0, y = problem(stiffness=150.0)
    found = evolve(kernel, f0, y, eta=1.0, timesteps=(100, 800))
    assert found.evaluations < 250
    assert bool(torch.isfinite(found.predictions[-1]).all())


@pytest.mark.parametrize("integrator", ["rkc", "dopri5", "euler"])
def test_predictions_and_residual_sums_tell_one_story(integrator: str) -> None:
    kernel, f0, y = problem()
    found = evolve(kernel, f0, y, eta=0.2, timesteps=GRID, integrator=integrator)
    for f, s in zip(found.predictions, found.residual_sums, strict=True):
        torch.testing.assert_close(f, f0 - 0.2 / kernel.samples * kernel.matrix @ s, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", ["receiver", "sender"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual"])
def test_under_the_full_kernel_predictions_are_f0_plus_jacobian_times_update(name: str, mode: str) -> None:
    found, dense = neighbourhood(name, mode, ["auto", "auto"])
    kernel = FullKernel(found)
    f0 = torch.cat([j.logits for j in found])
    y = torch.nn.functional.one_hot(torch.arange(len(f0)) % CLASSES, CLASSES).double()
    run = evolve(kernel, f0, y, eta=0.05, timesteps=(20, 60))
    for f, s in zip(run.predictions, run.residual_sums, strict=True):
        delta = -0.05 / len(f0) * kernel.pull_back(s)
        torch.testing.assert_close(f, f0 + torch.einsum("ncd,d->nc", dense, delta), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(kernel.push(delta), torch.einsum("ncd,d->nc", dense, delta), rtol=1e-8, atol=1e-8)


def test_the_evolution_lowers_the_loss_of_the_real_network() -> None:
    module, x = network("mlp"), inputs(12)
    w = flatten(module)
    y = torch.nn.functional.one_hot(torch.arange(12) % CLASSES, CLASSES).double()
    found = jacobian(module, w, x)
    for kernel in (FullKernel([found]), TraceKernel([found])):
        run = evolve(kernel, found.logits, y, eta=0.02, timesteps=(10,))
        delta = -0.02 / 12 * kernel.pull_back(run.residual_sums[0])
        moved = jacobian(module, w + delta, x).logits
        value = LOSSES["cross-entropy"].value
        assert float(value(moved, y)) < float(value(found.logits, y))


@pytest.mark.parametrize("stages", [2, 3, 7, 40, MAX_STAGES])
def test_chebyshev_stages_are_consistent_and_stable_as_far_as_promised(stages: int) -> None:
    """Applied to y' = -z y the method's polynomial is 1 - z + z^2/2 + ... and stays below 1 on (0, 0.653 (s^2 - 1)]."""
    first, rows = _rkc_coefficients(stages)

    def polynomial(z: float) -> float:
        before, y = 1.0, 1 - first * z
        for mu, nu, mu_tilde, gamma_tilde in rows:
            before, y = y, 1 - mu - nu + mu * y + nu * before - mu_tilde * z * y - gamma_tilde * z
        return y

    assert math.isclose(polynomial(1e-3), math.exp(-1e-3), rel_tol=2e-9)
    edge = 0.653 * (stages**2 - 1)
    assert all(abs(polynomial(edge * i / 400)) < 1 for i in range(1, 401))


def test_a_kernel_with_no_finite_numbers_is_an_error_not_a_hang() -> None:
    kernel, f0, y = problem(samples=4)
    kernel.matrix[0, 0] = math.nan
    with pytest.raises(ArithmeticError, match="not finite"):
        evolve(kernel, f0, y, eta=1.0, timesteps=(10,))


def test_t_star_is_the_grid_point_of_least_loss() -> None:
    assert choose_by_loss([3.0, 1.0, 2.0]) == 1
    assert choose_by_loss([1.0, 1.0]) == 0


@pytest.mark.parametrize("loss", ["cross-entropy", "squared"])
def test_residual_and_curvature_are_the_derivatives_of_the_loss(loss: str) -> None:
    f = torch.randn(3, CLASSES, dtype=torch.float64, requires_grad=True)
    y, v = torch.softmax(torch.randn(3, CLASSES).double(), 1), torch.randn(3, CLASSES).double()
    total = LOSSES[loss].value(f, y) * 3
    (gradient,) = torch.autograd.grad(total, f, create_graph=True)
    torch.testing.assert_close(gradient, LOSSES[loss].residual(f, y))
    (curved,) = torch.autograd.grad((gradient * v).sum(), f)
    torch.testing.assert_close(curved, LOSSES[loss].curvature(f.detach(), v))
