"""The benchmark's attacks do what they claim, on a small model of digits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.leakage import (
    Prior,
    View,
    exact_inputs,
    from_axis_sketch,
    from_flat_sketch,
    from_hidden,
    least_squares,
    sketch_of,
)
from spark_node.config import load
from spark_node.data.datasets import load as load_dataset
from spark_node.learning.algorithms import make_projection
from spark_node.learning.jacobian import jacobian
from spark_node.model import ParameterLayout, build, flatten

DIGITS = load_dataset("digits")
X = DIGITS.standardise(DIGITS.train.pixels[:6])
PRIOR = Prior.of(DIGITS.standardise(DIGITS.train.pixels[100:700]))


def view(rounds: int = 1, **package: Any) -> View:
    """What a neighbour of a peer with the samples X sees."""
    config = load(environment={}).replace(model__hidden=[24], **{f"package__{k}": v for k, v in package.items()})
    module = build(config.model, DIGITS.shape, DIGITS.classes, 0)
    layout = ParameterLayout.of(module)
    weights = [flatten(module) + 0.1 * k * torch.randn(layout.size) for k in range(rounds)]
    packages = [make_projection(config, layout).apply(jacobian(module, w, X), 1) for w in weights]
    return View(config, layout, packages, weights, PRIOR, 8.0)


def error(found: Tensor) -> float:
    true = X.flatten(1).double()
    return float((found - true).norm() / true.norm())


@pytest.mark.parametrize("encoding", ["factored", "dense"])
def test_a_package_without_a_sketch_holds_the_inputs(encoding: str) -> None:
    assert error(exact_inputs(view(encoding=encoding).packages[0])) < 1e-5


def test_a_sketch_no_smaller_than_the_fan_in_hides_nothing() -> None:
    assert error(from_axis_sketch(view(projection="axis", sketch_size=64), None)) < 1e-5


def test_as_many_equations_as_unknowns_give_the_inputs() -> None:
    equations = torch.randn(70, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = X.flatten(1).double() @ equations.T
    assert error(least_squares(equations, values)) < 1e-8
    assert error(least_squares(equations, values, PRIOR, 1e-12)) < 1e-4


def test_a_prior_makes_more_of_a_sketch() -> None:
    seen = view(projection="axis", sketch_size=32)
    with_prior, without = error(from_axis_sketch(seen, PRIOR)), error(from_axis_sketch(seen, None))
    assert with_prior < 0.5 * without


def test_a_flattened_sketch_is_solved_for_the_inputs() -> None:
    seen = view(encoding="dense", projection="flat", sketch="hadamard", sketch_size=200)
    sketch = sketch_of(seen.config, seen.layout, seen.config.run.seed)
    assert error(from_flat_sketch(seen.packages[0], sketch)) < 1e-3
    assert error(from_flat_sketch(seen.packages[0], sketch_of(seen.config, seen.layout, 1))) > 0.5


def test_the_hidden_layer_gives_the_inputs_away_round_by_round_without_any_sketch() -> None:
    torch.manual_seed(0)
    once, often = (error(from_hidden(view(n, projection="axis", sketch_size=32), False)) for n in (1, 12))
    assert often < 0.05 < once
