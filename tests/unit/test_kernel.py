"""Kernel operators against materialised kernels, in float64."""

import pytest
import torch
from torch import Tensor

from spark_node.learning import kernel as kernels
from spark_node.learning.kernel import FullKernel, TraceKernel, gram
from spark_node.learning.layers import FactoredLayer
from tests.unit.networks import CLASSES, NETWORKS, neighbourhood

FORMS = {"factored": ["factored"] * 3, "dense": ["dense"] * 3, "auto": ["auto"] * 3}


def materialised(dense: Tensor, kind: str, residual: Tensor) -> Tensor:
    n, c, d = dense.shape
    if kind == "full":
        j = dense.reshape(n * c, d)
        return (j @ j.T @ residual.reshape(-1)).view(n, c)
    k = sum(dense[:, i] @ dense[:, i].T for i in range(c)) / c
    return torch.as_tensor(k @ residual)


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("mode", ["receiver", "sender"])
@pytest.mark.parametrize("kind", ["full", "trace"])
@pytest.mark.parametrize("name", NETWORKS)
def test_apply_equals_the_materialised_kernel(name: str, kind: str, mode: str, forms: str) -> None:
    found, dense = neighbourhood(name, mode, FORMS[forms])
    operator = kernels.KERNELS[kind](found)
    residual = torch.randn(len(dense), CLASSES, dtype=torch.float64)
    torch.testing.assert_close(operator.apply(residual), materialised(dense, kind, residual), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["receiver", "sender"])
@pytest.mark.parametrize("kind", ["full", "trace"])
@pytest.mark.parametrize("name", NETWORKS)
def test_pull_back_equals_the_transposed_jacobian(name: str, kind: str, mode: str) -> None:
    found, dense = neighbourhood(name, mode, FORMS["auto"])
    residual = torch.randn(len(dense), CLASSES, dtype=torch.float64)
    expected = torch.einsum("ncd,nc->d", dense, residual)
    torch.testing.assert_close(kernels.KERNELS[kind](found).pull_back(residual), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["full", "trace"])
def test_factored_and_dense_peers_mix_in_one_neighbourhood(kind: str) -> None:
    found, dense = neighbourhood("cnn", "sender", ["factored", "factored", "factored"])
    other, _ = neighbourhood("cnn", "sender", ["auto", "auto", "auto"])
    mixed = [found[0], other[1], found[2]]
    assert {type(layer) for layer in mixed[1].layers} != {FactoredLayer}
    residual = torch.randn(len(dense), CLASSES, dtype=torch.float64)
    expected = materialised(dense, kind, residual)
    torch.testing.assert_close(kernels.KERNELS[kind](mixed).apply(residual), expected, rtol=1e-10, atol=1e-10)


def test_both_orders_of_the_full_product_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    found, dense = neighbourhood("mlp", "receiver", FORMS["factored"])
    operator = FullKernel(found)
    stored = [block._matrix is not None for block in operator._blocks]
    assert any(stored)  # 12 samples, 37 inputs: the Gram matrix is the cheaper order
    residual = torch.randn(len(dense), CLASSES, dtype=torch.float64)
    with_gram = operator.apply(residual)
    for block in operator._blocks:
        block._matrix = None
    torch.testing.assert_close(operator.apply(residual), with_gram, rtol=1e-11, atol=1e-11)


def test_a_trace_kernel_built_in_small_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = neighbourhood("cnn", "sender", FORMS["auto"])
    whole = TraceKernel(found).matrix
    monkeypatch.setattr(kernels, "_ROW_BYTES", 1)
    torch.testing.assert_close(TraceKernel(found).matrix, whole, rtol=1e-12, atol=1e-12)


def test_gram_by_blocks_is_the_gram_matrix() -> None:
    rows = torch.randn(23, 5, dtype=torch.float64)
    torch.testing.assert_close(gram(rows, block=4), rows @ rows.T)


@pytest.mark.parametrize("kind", ["full", "trace"])
def test_kernels_are_symmetric_and_positive(kind: str) -> None:
    found, dense = neighbourhood("residual", "sender", FORMS["auto"])
    operator = kernels.KERNELS[kind](found)
    n = len(dense)
    basis = torch.eye(n * CLASSES, dtype=torch.float64).view(-1, n, CLASSES)
    matrix = torch.stack([operator.apply(e).reshape(-1) for e in basis])
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-9, atol=1e-9)
    assert float(torch.linalg.eigvalsh(matrix)[0]) > -1e-9


def test_jacobians_of_different_models_are_refused() -> None:
    found, _ = neighbourhood("mlp", "receiver", ["auto"])
    other, _ = neighbourhood("cnn", "receiver", ["auto"])
    with pytest.raises(ValueError, match="one model"):
        FullKernel([*found, *other])
