"""The plan of a message: each layer in the form that takes fewer bytes, unless the form is prescribed."""

from typing import Any

import pytest
import torch
from torch import nn

from spark_node.learning.jacobian import jacobian
from spark_node.learning.layers import DenseLayer, FactoredLayer
from spark_node.learning.messages import Package
from spark_node.model import ParameterLayout, cnn, flatten, mlp
from spark_node.package import planner
from spark_node.package.format import Terms
from spark_node.package.writer import encode
from tests.unit.networks import CLASSES
from tests.unit.packages import MODELS, RUN, SENDER, case, config, model


def image_model() -> nn.Module:
    """A convolution of 28 x 28 positions and 80 parameters, then layers of many parameters and one position."""
    return cnn((1, 28, 28), [8], [64], 10)


IMAGE = torch.zeros(1, 28, 28)


def chosen(module: nn.Module, example: torch.Tensor, **package: Any) -> dict[str, str]:
    return planner.forms(module, example, config(**package).package)


@pytest.mark.parametrize("settings", [{}, {"bits": 6}, {"bits": 6, "keep": 0.1}, {"signal_bits": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_smaller_form_is_chosen(name: str, settings: dict[str, Any]) -> None:
    for layer in planner.plan(model(name), torch.ones(1, 6, 6), config(**settings).package):
        assert layer.forms[layer.form] == min(layer.forms.values())
        assert layer.plain == 4 * CLASSES * layer.parameters


def test_a_convolution_of_many_positions_and_few_parameters_is_written_out() -> None:
    assert chosen(image_model(), IMAGE) == {"0": "dense", "4": "factored", "6": "factored"}


def test_a_form_that_is_asked_for_is_taken() -> None:
    settings = config(encoding="factored").package
    assert {layer.form for layer in planner.plan(image_model(), IMAGE, settings)} == {"factored"}
    settings = config(encoding="dense").package
    assert {layer.form for layer in planner.plan(image_model(), IMAGE, settings)} == {"dense"}


def test_layers_without_factors_are_dense_whatever_is_asked_for() -> None:
    for encoding in ("auto", "factored", "dense"):
        plans = planner.plan(model("grouped"), torch.ones(1, 6, 6), config(encoding=encoding).package)
        named = {layer.name: layer for layer in plans}
        assert named["norm"].form == named["grouped"].form == "dense"
        assert set(named["norm"].forms) == {"dense"}


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_a_chain_of_linear_layers_is_factored_and_its_masks_cost_nothing(activation: str) -> None:
    module = mlp(784, [100, 50], 10, activation)
    first, second, last = planner.plan(module, torch.zeros(784), config().package)
    assert [layer.form for layer in (first, second, last)] == ["factored"] * 3
    slopes = 0 if activation == "relu" else 4
    assert first.forms["factored"] == 4 * 784 + slopes * 100
    assert second.forms["factored"] == 4 * 100 + slopes * 50
    assert last.forms["factored"] == 4 * 50
    assert first.forms["dense"] == first.plain == 4 * 10 * 785 * 100


def test_fewer_bits_and_a_projection_shrink_the_plan() -> None:
    module = mlp(784, [100], 10)
    plain, coded, axis, flat = (
        planner.plan(module, torch.zeros(784), config(**package).package)[0]
        for package in ({}, {"bits": 4}, {"projection": "axis"}, {"projection": "flat", "sketch_size": 300})
    )
    assert coded.forms["factored"] == plain.forms["factored"] / 8
    assert axis.forms["factored"] == 4 * 250 + 100 / 8
    assert axis.forms["dense"] == 4 * 10 * (250 * 100 + 100)
    assert flat.forms == {"dense": 4 * 10 * (300 + 100)}


def test_a_sparse_dense_form_can_beat_factors() -> None:
    module, example = image_model(), IMAGE
    assert chosen(module, example)["6"] == "factored"
    plans = {p.name: p for p in planner.plan(module, example, config(keep=1e-4, bits=2, signal_bits=0).package)}
    assert plans["6"].forms["dense"] < 0.1 * plans["6"].plain


@pytest.mark.parametrize("package", [{"encoding": "dense"}, {"projection": "flat", "sketch_size": 9}], ids=str)
def test_what_is_written_out_later_is_computed_in_factors(package: dict[str, Any]) -> None:
    assert set(chosen(mlp(36, [7], CLASSES), torch.zeros(36), **package).values()) == {"factored"}
    made = case("mlp", **package)
    assert {type(layer) for layer in made.package.jacobian.layers} == {DenseLayer}


def test_the_plan_is_what_jacobians_are_computed_as() -> None:
    module, x = image_model(), torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    found = jacobian(module, flatten(module), x, form=chosen(module, x[0]))
    assert [type(layer) for layer in found.layers] == [DenseLayer, FactoredLayer, FactoredLayer]


@pytest.mark.parametrize("package", [{"level": 0}, {"level": 0, "bits": 8, "logit_bits": 0}], ids=str)
def test_the_bytes_of_a_plan_are_those_on_the_wire_before_entropy_coding(package: dict[str, Any]) -> None:
    module, samples = image_model(), 20
    chosen_config = config(**package)
    layout, w = ParameterLayout.of(module), flatten(module)
    x = torch.randn(samples, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    plans = planner.plan(module, x[0], chosen_config.package)
    found = jacobian(module, w, x, form={layer.name: layer.form for layer in plans})
    terms = Terms(RUN, layout, layout, 10, chosen_config.package)
    coded = encode(Package(found, torch.zeros(samples, dtype=torch.int64), w), terms, k=0, sender=SENDER)
    sent = sum(map(len, coded.wire()[3:]))
    planned = samples * (sum(layer.forms[layer.form] for layer in plans) + 1 + 4 * 10)
    assert 0.9 * planned < sent < 1.15 * planned  # palettes and scales are not in the plan
