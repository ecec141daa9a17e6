"""Factored and dense Jacobians against autograd, in float64."""

import pytest
import torch

from spark_node.learning.jacobian import jacobian
from spark_node.learning.layers import DenseLayer, FactoredLayer
from spark_node.model import flatten
from tests.unit.networks import NETWORKS, autograd_jacobian, inputs, network, written_out


@pytest.mark.parametrize("form", ["auto", "factored", "dense"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_form_equals_autograd(name: str, form: str) -> None:
    module, x = network(name), inputs(5)
    w = flatten(module)
    found = jacobian(module, w, x, form=form, chunk=2)
    reference = autograd_jacobian(module, w, x)
    torch.testing.assert_close(written_out(found), reference, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.logits, module(x), rtol=1e-12, atol=1e-12)
    rows = torch.cat([layer.dense(1, 4) for layer in found.layers], dim=2)
    assert rows.shape == (3, 4, found.parameters)


@pytest.mark.parametrize("name", NETWORKS)
def test_pull_is_the_transpose_of_push(name: str) -> None:
    module, x = network(name), inputs(4)
    found = jacobian(module, flatten(module), x, form="factored")
    w, residual = torch.randn(found.parameters).double(), torch.randn(4, 4).double()
    pulled = torch.zeros_like(w)
    for layer in found.layers:
        layer.pull(residual, pulled)
    pushed = sum(layer.push(w) for layer in found.layers)
    torch.testing.assert_close(pulled @ w, (residual * pushed).sum(), rtol=1e-11, atol=1e-11)


def test_the_chunk_size_does_not_change_the_result() -> None:
    module, x = network("cnn"), inputs(7)
    whole = written_out(jacobian(module, flatten(module), x, chunk=100))
    parts = written_out(jacobian(module, flatten(module), x, chunk=3))
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-13)


def test_the_evaluation_point_is_the_given_weight_not_the_modules() -> None:
    module, x = network("mlp"), inputs(3)
    w = flatten(module) * 0.5 + 0.1
    torch.testing.assert_close(written_out(jacobian(module, w, x)), autograd_jacobian(module, w, x))


def test_the_papers_model_is_sent_as_factors_of_a_four_hundredth_of_its_dense_size() -> None:
    from spark_node.model import mlp

    module = mlp(784, [100], 10)
    found = jacobian(module, flatten(module), torch.randn(200, 1, 28, 28))
    dense = 200 * 10 * 79_510 * 4
    assert all(isinstance(layer, FactoredLayer) for layer in found.layers)
    assert dense / found.nbytes > 800  # masks and the weights above instead of signals: about 900


def test_auto_takes_the_smaller_form_per_layer() -> None:
    module, x = network("cnn"), inputs(4)
    forms = {type(layer) for layer in jacobian(module, flatten(module), x, form="auto").layers}
    assert forms == {DenseLayer, FactoredLayer}
    sizes = {form: jacobian(module, flatten(module), x, form=form).nbytes for form in ("auto", "factored", "dense")}
    assert sizes["auto"] <= min(sizes["factored"], sizes["dense"])


def test_shared_weights_are_never_factored() -> None:
    module = network("tied")
    layers = jacobian(module, flatten(module), inputs(3), form="factored").layers
    factored = {layer.name for layer in layers if isinstance(layer, FactoredLayer)}
    assert factored == {"once", "head"}


def test_relu_slopes_are_masks() -> None:
    module = network("mlp")
    first = jacobian(module, flatten(module), inputs(3)).layers[0]
    assert first.tensors[1].dtype == torch.bool
