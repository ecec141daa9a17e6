"""Sketches: pinned bits, the algebra of P, and whole Jacobians against written-out products, in float64."""

import gc
import hashlib
import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import numpy as np
import platformdirs
import pytest
import scipy.linalg
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spark_node.errors import ConfigError
from spark_node.learning.jacobian import jacobian
from spark_node.learning.kernel import KERNELS
from spark_node.learning.layers import DenseLayer, FactoredLayer, Jacobian
from spark_node.model import ParameterLayout, flatten
from spark_node.package import projection as module
from spark_node.package.projection import (
    SKETCHES,
    Draw,
    Floats,
    HadamardMap,
    IdentityMap,
    Projection,
    ProjectionSpec,
    linear_map,
    normal,
    quantiles,
    walsh_hadamard,
)
from spark_node.seeds import derive
from tests.unit.networks import CLASSES, autograd_jacobian, inputs, neighbourhood, network, written_out

T = TypeVar("T")
SEED = 11
NORMAL = [2.17194557, -2.09117508, 2.13652325, 1.40103054, 0.345377922, -0.120833397]
PINNED = {
    "gaussian": [0.97132355, -0.935201943, 0.955482244, -0.0540383384, 0.582077622, -0.658733487],
    "orthonormal": [0.551061749, -0.346858531, 0.346056104, -0.0306576118, 0.397163838, -0.427739739],
    "hadamard": [-0.44721359, -0.44721359, -0.44721359, 0.44721359, -0.44721359, -0.44721359],
}
ALL = ["mlp", "deep-mlp", "cnn", "residual", "tied", "tokens"]


@pytest.fixture(autouse=True)
def _empty_caches() -> Iterator[None]:
    module._MATRICES.clear()
    module._FILES.clear()
    yield
    module._MATRICES.clear()
    module._FILES.clear()


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix in blocks, every Hadamard sketch as a transform, every product in several chunks."""
    monkeypatch.setattr(module, "MEMORY_BYTES", 0)
    monkeypatch.setattr(module, "_WRITTEN_HADAMARD", 0)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 700)
    monkeypatch.setattr(module, "_PRODUCT_BYTES", 700)


def matrix(kind: str, width: int, k: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """P, [width, k]."""
    return linear_map(kind, width, k, seed).forward(torch.eye(width, dtype=dtype))


def note(into: list[T], value: T) -> T:
    """The value, written down."""
    into.append(value)
    return value


def whole(layout: ParameterLayout, spec: ProjectionSpec, seed: int, names: tuple[str | int, ...] = ()) -> Tensor:
    """P of all parameters as one block-diagonal matrix, [d, d~]."""
    blocks = []
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        size = math.prod(shape)
        fan_in = size // shape[0] if spec.kind == "axis" else size
        if len(shape) < 2 or fan_in <= spec.k:
            blocks.append(torch.eye(size, dtype=torch.float64))
        else:
            p = matrix(spec.sketch, fan_in, spec.k, derive(seed, "sketch", name, *names))
            blocks.append(torch.kron(torch.eye(size // fan_in, dtype=torch.float64), p))
    return torch.as_tensor(torch.block_diag(*blocks))


def peer(name: str, form: str, samples: int = 5) -> tuple[nn.Module, Jacobian, Tensor]:
    """A network, its product Jacobian in some form, and the Jacobian by autograd."""
    net, x = network(name), inputs(samples)
    w = flatten(net)
    return net, jacobian(net, w, x, form=form, chunk=3), autograd_jacobian(net, w, x)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# Random numbers.


def philox(key: int, counter: int) -> list[int]:
    """Philox4x64-10 as its authors give it (Salmon et al. 2011)."""
    mask = 2**64 - 1
    c = [(counter >> (64 * i)) & mask for i in range(4)]
    k0, k1 = key & mask, key >> 64
    for _ in range(10):
        p0, p1 = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [(p1 >> 64) ^ c[1] ^ k0, p1 & mask, (p0 >> 64) ^ c[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return c


def test_the_table_is_pinned() -> None:
    digest = hashlib.sha256(quantiles().astype("<f4").tobytes()).hexdigest()
    assert digest == "e8cfff23047b7e58f6ae180f798c0bd13cfa7a46c5e6db798596865662071226"


def test_the_table_is_a_standard_normal_variable() -> None:
    table = quantiles().astype(np.float64)
    assert table.shape == (65536,)
    assert table.sum() == 0
    assert abs((table**2).mean() - 1) < 1e-6
    assert abs((table**4).mean() - 3) < 0.01
    assert np.all(np.diff(table) > 0)
    assert np.array_equal(table * 2**20, np.rint(table * 2**20))
    assert np.abs(table - scipy.stats.norm.ppf((np.arange(65536) + 0.5) / 65536)).max() < 1e-4


def test_the_first_entries_are_pinned() -> None:
    np.testing.assert_array_equal(normal(7, 0, 6), np.array(NORMAL, np.float32))
    for kind, values in PINNED.items():
        found = matrix(kind, 12, 5, seed=7, dtype=torch.float32)[:2, :3].flatten()
        tolerance = 1e-6 if kind == "orthonormal" else 0.0
        torch.testing.assert_close(found, torch.tensor(values), rtol=tolerance, atol=tolerance)


def test_entries_are_the_words_of_philox() -> None:
    """Entry e is the 16-bit word e % 16 of counter e // 16 + 1: numpy steps the counter before it draws."""
    key = derive(7, "normal")
    words = [(word >> shift) & 0xFFFF for i in (1, 2, 3) for word in philox(key, i) for shift in (0, 16, 32, 48)]
    assert np.array_equal(normal(7, 0, 48), quantiles()[words])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**18), st.integers(0, 2**17))
def test_any_range_of_entries_can_be_generated_alone(start: int, count: int) -> None:
    assert np.array_equal(normal(3, start, start + count), normal(3, 0, start + count)[start:])


def test_entries_are_independent_enough() -> None:
    values = normal(5, 0, 2**20).astype(np.float64)
    assert abs(values.mean()) < 5 / 2**10
    assert abs(values.var() - 1) < 5 * math.sqrt(2) / 2**10
    for lag in (1, 4, 16, 1000):
        assert abs((values[lag:] * values[:-lag]).mean()) < 5 / 2**10
    assert abs(np.corrcoef(values, normal(6, 0, 2**20))[0, 1]) < 5 / 2**10


# P of one axis.


@pytest.mark.parametrize("kind", SKETCHES)
def test_a_cap_of_the_width_or_more_is_the_identity(kind: str) -> None:
    x = torch.randn(3, 8)
    for k in (8, 9):
        sketch = linear_map(kind, 8, k, seed=1)
        assert (sketch.width, sketch.k) == (8, 8)
        assert sketch.forward(x) is x
        assert sketch.adjoint(x) is x


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("kind", SKETCHES)
@pytest.mark.parametrize(("width", "k"), [(37, 9), (64, 63), (200, 1)])
def test_forward_and_adjoint_are_adjoint(
    kind: str, width: int, k: int, blocks: bool, request: pytest.FixtureRequest
) -> None:
    if blocks:
        request.getfixturevalue("_small_blocks")
    sketch = linear_map(kind, width, k, seed=2)
    x, y = torch.randn(2, 7, width, dtype=torch.float64), torch.randn(2, 7, k, dtype=torch.float64)
    forward, adjoint = sketch.forward(x), sketch.adjoint(y)
    assert (forward.shape, adjoint.shape) == (y.shape, x.shape)
    close((forward * y).sum(), (x * adjoint).sum())
    p = sketch.forward(torch.eye(width, dtype=torch.float64))
    close(forward, x @ p)
    close(adjoint, y @ p.T)


@pytest.mark.parametrize("kind", SKETCHES)
def test_blocks_and_transforms_equal_the_matrix(kind: str, request: pytest.FixtureRequest) -> None:
    x = torch.randn(40, 90)
    stored = linear_map(kind, 90, 30, seed=4).forward(x)
    request.getfixturevalue("_small_blocks")
    torch.testing.assert_close(linear_map(kind, 90, 30, seed=4).forward(x), stored, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", SKETCHES)
def test_p_is_the_same_in_every_dtype(kind: str) -> None:
    for dtype in (torch.float64, torch.float32):
        assert matrix(kind, 20, 6, 3, dtype).dtype == dtype
    assert torch.equal(matrix(kind, 20, 6, 3, torch.float32).double(), matrix(kind, 20, 6, 3))


@pytest.mark.parametrize("kind", ["gaussian", "hadamard"])
def test_p_p_transposed_is_the_identity_on_average(kind: str) -> None:
    width, k, seeds = 24, 6, 3000
    mean = sum(p @ p.T for p in (matrix(kind, width, k, seed) for seed in range(seeds))) / seeds
    # An entry of P P^T has a standard deviation of at most sqrt(2 / k).
    assert (mean - torch.eye(width)).abs().max() < 5 * math.sqrt(2 / k / seeds)


def test_orthonormal_columns_are_orthonormal_and_span_the_gaussian_ones() -> None:
    q, g = matrix("orthonormal", 120, 30, 5), matrix("gaussian", 120, 30, 5)
    torch.testing.assert_close(q.T @ q, torch.eye(30, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(q @ (q.T @ g), g, rtol=0, atol=1e-6)
    r = q.T @ g
    assert torch.all(torch.diagonal(r) > 0)
    assert torch.tril(r, -1).abs().max() < 1e-6


def test_gaussian_entries_have_the_variance_of_the_paper() -> None:
    p = matrix("gaussian", 2000, 100, 6)
    assert abs(p.var().item() * 100 - 1) < 5 * math.sqrt(2 / p.numel())


@pytest.mark.parametrize("kind", ["gaussian", "hadamard"])
@pytest.mark.parametrize("k", [16, 256])
def test_inner_products_concentrate_as_johnson_and_lindenstrauss_promise(kind: str, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.nn.functional.normalize(torch.randn(2, 700, generator=generator, dtype=torch.float64))
    norms, products = [], []
    for seed in range(150):
        sketch = linear_map(kind, 700, k, seed)
        a, b = sketch.forward(torch.stack([x, y]))
        norms.append((a @ a).item() - 1)
        products.append((a @ b).item() - (x @ y).item())
    spread = {"gaussian": 1.0, "hadamard": math.sqrt(1 - k / 1024)}[kind]  # sampled without replacement
    assert np.std(norms) == pytest.approx(spread * math.sqrt(2 / k), rel=0.3)
    assert np.std(products) == pytest.approx(spread * math.sqrt(1 / k), rel=0.3)
    assert abs(np.mean(norms)) < 5 * math.sqrt(2 / k / 150)


@pytest.mark.parametrize("kind", SKETCHES)
def test_a_lifted_gradient_descends(kind: str) -> None:
    for seed in range(20):
        g = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        sketch = linear_map(kind, 50, 8, seed)
        assert g @ sketch.adjoint(sketch.forward(g)) > 0


@pytest.mark.parametrize("width", [1, 2, 32, 64, 128, 4096])
def test_the_fast_transform_is_the_hadamard_matrix(width: int) -> None:
    x = torch.randn(3, width, dtype=torch.float64)
    close(walsh_hadamard(x), x @ torch.from_numpy(scipy.linalg.hadamard(width)).double())


@pytest.mark.parametrize("written", [False, True])
def test_the_hadamard_sketch_is_signs_transform_and_sample(written: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not written:
        monkeypatch.setattr(module, "_WRITTEN_HADAMARD", 0)
    p = matrix("hadamard", 50, 20, 9)
    sketch = HadamardMap(50, 20, Draw("hadamard", 50, 20, 9))
    signs, chosen = sketch._signs(p).numpy(), sketch._chosen(p).numpy()
    assert set(signs) == {-1, 1}
    assert len(set(chosen)) == 20
    assert set(chosen) <= set(range(64))
    expected = np.diag(signs) @ scipy.linalg.hadamard(64)[:50, chosen] / math.sqrt(20)
    np.testing.assert_allclose(p.numpy(), expected, rtol=1e-7)


def test_hadamard_coordinates_are_drawn_evenly() -> None:
    counts = np.zeros(32)
    for seed in range(2000):
        sketch = HadamardMap(30, 8, Draw("hadamard", 30, 8, seed))
        counts[sketch._chosen(torch.empty(0)).numpy()] += 1
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


def test_what_cannot_be_sketched_is_refused() -> None:
    with pytest.raises(ConfigError, match="sketch = 'sparse'"):
        linear_map("sparse", 10, 2, 0)
    with pytest.raises(ConfigError, match="k = 0"):
        linear_map("gaussian", 10, 0, 0)
    with pytest.raises(ConfigError, match="kind = 'row'"):
        ProjectionSpec(kind="row")
    with pytest.raises(ConfigError, match="sketch = 'sparse'"):
        ProjectionSpec(sketch="sparse")
    with pytest.raises(ConfigError, match="k = 0"):
        ProjectionSpec(k=0)
    layout = ParameterLayout(("0.weight",), ((100, 784),))
    with pytest.raises(ConfigError, match="78400 x 10000 is too large"):
        Projection(layout, ProjectionSpec("flat", "orthonormal", 10_000), SEED)


# Whole Jacobians.


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("form", ["factored", "dense", "auto"])
@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("kind", ["axis", "flat"])
@pytest.mark.parametrize("name", ALL)
def test_the_sketched_jacobian_is_j_p(
    name: str, kind: str, sketch: str, form: str, blocks: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    net, found, dense = peer(name, form)
    spec = ProjectionSpec(kind, sketch, k={"axis": 4, "flat": 20}[kind])
    p = whole(ParameterLayout.of(net), spec, SEED)
    if blocks:
        request.getfixturevalue("_small_blocks")
    projection = Projection(ParameterLayout.of(net), spec, SEED, cache_folder=tmp_path)
    sketched = projection.apply(found, 1)
    assert sketched.parameters == projection.layout.size == p.shape[1] < p.shape[0]
    assert torch.equal(sketched.logits, found.logits)
    torch.testing.assert_close(written_out(sketched), dense @ p, rtol=1e-6, atol=1e-6)
    w = torch.randn(p.shape[1], dtype=torch.float64)
    torch.testing.assert_close(projection.lift(w, 1), p @ w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("kind", ["axis", "flat"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_factored_and_dense_layers_give_one_sketch(name: str, kind: str, sketch: str) -> None:
    net, factored, _ = peer(name, "factored")
    _, dense, _ = peer(name, "dense")
    projection = Projection(ParameterLayout.of(net), ProjectionSpec(kind, sketch, k=10), SEED)
    close(written_out(projection.apply(factored, 1)), written_out(projection.apply(dense, 1)))


def test_an_axis_sketch_is_an_einsum_over_the_fan_in() -> None:
    net, found, dense = peer("cnn", "factored")
    layout = ParameterLayout.of(net)
    projection = Projection(layout, ProjectionSpec("axis", "gaussian", k=5), SEED)
    result = written_out(projection.apply(found, 1))
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        piece = dense[:, :, layout.slices[name]]
        if len(shape) > 1:
            p = matrix("gaussian", math.prod(shape[1:]), 5, derive(SEED, "sketch", name))
            piece = torch.einsum("ncoi,ik->ncok", piece.unflatten(2, (shape[0], -1)), p).flatten(2)
        close(result[:, :, projection.layout.slices[name]], piece)


def test_an_axis_sketch_keeps_the_factors() -> None:
    _, found, _ = peer("mlp", "factored")
    projection = Projection(ParameterLayout.of(network("mlp")), ProjectionSpec("axis", k=10), SEED)
    for before, after in zip(found.layers, projection.apply(found, 1).layers, strict=True):
        assert isinstance(before, FactoredLayer)
        assert isinstance(after, FactoredLayer)
        assert after.signals is before.signals
        assert after.inputs.shape[2] == min(before.inputs.shape[2], 10)


def test_a_flat_sketch_never_writes_a_linear_layer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    net, found, dense = peer("deep-mlp", "factored")
    spec = ProjectionSpec("flat", "gaussian", k=50)

    def refuse(*_: object) -> Tensor:
        raise AssertionError("the layer was written out")

    monkeypatch.setattr(FactoredLayer, "dense", refuse)
    sketched = Projection(ParameterLayout.of(net), spec, SEED).apply(found, 1)
    assert [type(layer) for layer in sketched.layers] == [DenseLayer, FactoredLayer, FactoredLayer]
    close(written_out(sketched), dense @ whole(ParameterLayout.of(net), spec, SEED))


@pytest.mark.parametrize("kind", ["none", "axis", "flat"])
@pytest.mark.parametrize("name", ALL)
def test_a_dense_spec_writes_every_layer_out(name: str, kind: str) -> None:
    net, found, _ = peer(name, "auto")
    layout = ParameterLayout.of(net)
    factored = Projection(layout, ProjectionSpec(kind, k=10), SEED).apply(found, 1)
    dense = Projection(layout, ProjectionSpec(kind, k=10, dense=True), SEED).apply(found, 1)
    assert {type(layer) for layer in dense.layers} == {DenseLayer}
    assert sum(layer.parameters for layer in dense.layers) == dense.parameters
    close(written_out(dense), written_out(factored))


def test_no_projection_changes_nothing() -> None:
    net, found, _ = peer("cnn", "auto")
    layout = ParameterLayout.of(net)
    projection = Projection(layout, ProjectionSpec(), SEED)
    w = torch.randn(layout.size)
    assert projection.layout == layout
    assert projection.apply(found, 1) is found
    assert projection.lift(w, 1) is w


def test_the_sketched_layout_has_the_paper_s_dimension() -> None:
    layout = ParameterLayout(
        ("0.weight", "0.bias", "2.weight", "2.bias", "conv.weight", "norm.weight"),
        ((100, 784), (100,), (10, 100), (10,), (8, 40, 3, 3), (8,)),
    )
    axis = Projection(layout, ProjectionSpec("axis", k=250), SEED).layout
    assert axis.names == layout.names
    assert axis.shapes == ((100, 250), (100,), (10, 100), (10,), (8, 250), (8,))
    flat = Projection(layout, ProjectionSpec("flat", k=1000), SEED).layout
    assert flat.shapes == ((1000,), (100,), (10, 100), (10,), (1000,), (8,))


@pytest.mark.parametrize("kernel", ["full", "trace"])
@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("kind", ["axis", "flat"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_kernels_of_sketched_peers_are_j_p_p_j(name: str, kind: str, sketch: str, kernel: str) -> None:
    peers, dense = neighbourhood(name, "sender", ["factored", "factored"])
    layout = ParameterLayout.of(network(name))
    spec = ProjectionSpec(kind, sketch, k=12)
    projection, p = Projection(layout, spec, SEED), whole(layout, spec, SEED)
    operator = KERNELS[kernel]([projection.apply(one, 1) for one in peers])
    j, n = dense @ p, len(dense)
    residual = torch.randn(n, CLASSES, dtype=torch.float64)
    if kernel == "full":
        expected = (j.flatten(0, 1) @ j.flatten(0, 1).T @ residual.flatten()).view(n, CLASSES)
    else:
        expected = torch.einsum("ncd,mcd->nm", j, j) / CLASSES @ residual
    close(operator.apply(residual), expected)
    update = projection.lift(operator.pull_back(residual), 1)
    close(update, p @ p.T @ torch.einsum("ncd,nc->d", dense, residual))


@pytest.mark.parametrize("sketch", ["gaussian", "hadamard"])
@pytest.mark.parametrize("kind", ["axis", "flat"])
def test_sketched_kernels_are_unbiased(kind: str, sketch: str) -> None:
    net, found, dense = peer("mlp", "factored")
    layout, j = ParameterLayout.of(net), dense.flatten(0, 1)
    exact, seeds = j @ j.T, 600
    kernels = []
    for seed in range(seeds):
        sketched = Projection(layout, ProjectionSpec(kind, sketch, k=12), seed).apply(found, 1)
        rows = torch.cat([layer.dense(0, 5) for layer in sketched.layers], 2).flatten(0, 1)
        kernels.append(rows @ rows.T)
    stacked = torch.stack(kernels)
    errors = (stacked.mean(0) - exact).abs() / (stacked.std(0) / math.sqrt(seeds) + 1e-9)
    assert stacked.std(0).max() > 0.1
    assert errors.max() < 5


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("kind", ["axis", "flat"])
def test_a_fresh_sketch_is_another_one_every_round(kind: str, sketch: str) -> None:
    net, found, dense = peer("mlp", "factored")
    layout, spec = ParameterLayout.of(net), ProjectionSpec(kind, sketch, k=12, fresh=True)
    projection, other = Projection(layout, spec, SEED), Projection(layout, spec, SEED)
    for k in (1, 2):
        p = whole(layout, spec, SEED, (k,))
        close(written_out(projection.apply(found, k)), dense @ p)
        w = torch.randn(p.shape[1], dtype=torch.float64)
        close(other.lift(w, k), p @ w)
    assert not torch.equal(projection.lift(w, 1), projection.lift(w, 2))
    fixed = Projection(layout, ProjectionSpec(kind, sketch, k=12), SEED)
    assert torch.equal(fixed.lift(w, 1), fixed.lift(w, 2))


def test_seeds_and_names_give_other_sketches() -> None:
    layout = ParameterLayout(("a.weight", "b.weight"), ((1, 30), (1, 30)))
    w = torch.ones(20)
    one, other = (Projection(layout, ProjectionSpec("axis", k=10), seed).lift(w, 1) for seed in (1, 2))
    assert not torch.equal(one, other)
    assert not torch.equal(one[:30], one[30:])


@pytest.mark.parametrize("kind", ["axis", "flat"])
@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_the_dtype_stays_and_no_samples_are_no_error(name: str, kind: str, sketch: str) -> None:
    net, x = network(name).float(), inputs(4).float()
    projection = Projection(ParameterLayout.of(net), ProjectionSpec(kind, sketch, k=10), SEED)
    found = jacobian(net, flatten(net), x, form="factored")
    sketched = projection.apply(found, 1)
    assert {t.dtype for layer in sketched.layers for t in layer.tensors} <= {torch.float32, torch.bool}
    assert projection.lift(torch.ones(projection.layout.size), 1).dtype == torch.float32
    nobody = Jacobian(
        tuple(
            FactoredLayer(v.name, v.weight, v.bias, v.inputs[:0], v.signals.narrow(0, 0))
            for v in found.layers
            if isinstance(v, FactoredLayer)
        ),
        found.parameters,
        found.logits[:0],
    )
    assert projection.apply(nobody, 1).samples == 0


def test_another_model_s_jacobian_is_refused() -> None:
    net, found, _ = peer("mlp", "dense")
    projection = Projection(ParameterLayout.of(net), ProjectionSpec("axis", k=10), SEED)
    with pytest.raises(ValueError, match="columns"):
        projection.apply(Jacobian(found.layers, found.parameters + 1, found.logits), 1)
    with pytest.raises(ValueError, match="shape"):
        projection.lift(torch.zeros(projection.layout.size + 1), 1)
    half = DenseLayer("half", slice(0, 3), torch.zeros(5, CLASSES, 3))
    with pytest.raises(ValueError, match="no whole parameters"):
        projection.apply(Jacobian((half,), found.parameters, found.logits), 1)


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("kind", ["axis", "flat"])
def test_threads_share_one_p_and_agree(kind: str, sketch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, found, _ = peer("mlp", "factored")
    made: list[Draw] = []
    write = Draw.written
    monkeypatch.setattr(Draw, "written", lambda draw: write(note(made, draw)))
    barrier = Barrier(8)

    def work(_: int) -> Tensor:
        projection = Projection(ParameterLayout.of(net), ProjectionSpec(kind, sketch, k=20), SEED)
        barrier.wait(timeout=30)
        return written_out(projection.apply(found, 1))

    with ThreadPoolExecutor(8) as pool:
        first, *rest = pool.map(work, range(8))
    for other in rest:
        close(other, first)
    assert len(made) == len(set(made)) > 0


def test_the_least_recently_used_matrix_goes_first() -> None:
    shared: module._Shared[str] = module._Shared(10)
    made: list[str] = []

    def get(key: str) -> str:
        return shared.get(key, lambda: note(made, key), 4)

    assert [get(key) for key in "abacab"] == list("abacab")
    assert made == ["a", "b", "c", "b"]
    assert shared.get("large", lambda: "large", 100) == "large"


# Files of large matrices.


@pytest.fixture
def _files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Gaussian matrix is a large one."""
    monkeypatch.setattr(module, "MEMORY_BYTES", 0)


def sketches(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.f32"))


def stored(folder: Path, seed: int = 3, limit: int = 2**20, x: Tensor | None = None) -> Tensor:
    """P of 90 x 30, 10,800 bytes, through a folder."""
    sketch = linear_map("gaussian", 90, 30, seed, cache_folder=folder, cache_bytes=limit)
    return sketch.forward(torch.eye(90) if x is None else x)


def test_a_large_matrix_is_kept_in_a_file_with_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = matrix("gaussian", 90, 30, 3, torch.float32)
    monkeypatch.setattr(module, "MEMORY_BYTES", 0)
    assert torch.equal(matrix("gaussian", 90, 30, 3, torch.float32), expected)  # on the fly
    assert torch.equal(stored(tmp_path / "new"), expected)
    (path,) = sketches(tmp_path / "new")
    assert path.stem == Draw("gaussian", 90, 30, 3).digest
    assert np.array_equal(np.fromfile(path, "<f4").reshape(90, 30), expected.numpy())
    assert not list(path.parent.glob("*.tmp"))
    assert torch.equal(stored(tmp_path / "new", x=torch.eye(90).double()), expected.double())


@pytest.mark.usefixtures("_files")
def test_a_file_is_shared_and_not_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stored(tmp_path)
    (path,) = sketches(tmp_path)
    inode = path.stat().st_ino
    module._FILES.clear()

    def refuse(*_: object) -> None:
        raise AssertionError("written twice")

    monkeypatch.setattr(module, "_write", refuse)
    assert torch.equal(stored(tmp_path), first)
    assert path.stat().st_ino == inode


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize("damage", ["short", "long", "empty", "zeros"])
def test_a_damaged_file_is_written_again(damage: str, tmp_path: Path) -> None:
    first = stored(tmp_path)
    (path,) = sketches(tmp_path)
    whole_file = path.read_bytes()
    module._FILES.clear()
    path.write_bytes(
        {"short": whole_file[:-4], "long": whole_file + b"1234", "empty": b"", "zeros": bytes(len(whole_file))}[damage]
    )
    assert torch.equal(stored(tmp_path), first)
    assert path.read_bytes() == whole_file


@pytest.mark.usefixtures("_files")
def test_without_a_folder_or_room_the_blocks_are_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = matrix("gaussian", 90, 30, 3, torch.float32)
    (tmp_path / "file").write_text("in the way")
    assert torch.equal(stored(tmp_path / "file" / "below"), expected)
    assert torch.equal(stored(tmp_path / "file"), expected)
    assert torch.equal(stored(tmp_path / "small", limit=10_799), expected)
    assert not (tmp_path / "small").exists()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert torch.equal(stored(tmp_path / "full"), expected)
    assert [path.name for path in (tmp_path / "full").iterdir()] == [".lock"]


@pytest.mark.usefixtures("_files")
def test_a_full_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**30 + 10_799)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert torch.equal(stored(tmp_path), matrix("gaussian", 90, 30, 3, torch.float32))
    assert not sketches(tmp_path)


@pytest.mark.usefixtures("_files")
def test_unused_files_make_room_and_used_ones_stay(tmp_path: Path) -> None:
    limit = 2 * 10_800
    (tmp_path / "left.tmp").write_bytes(bytes(100))
    os.utime(tmp_path / "left.tmp", (0, 0))
    stored(tmp_path, 1, limit)
    stored(tmp_path, 2, limit)
    assert not (tmp_path / "left.tmp").exists()
    assert torch.equal(stored(tmp_path, 3, limit), matrix("gaussian", 90, 30, 3, torch.float32))
    names = {seed: Draw("gaussian", 90, 30, seed).digest for seed in (1, 2, 3)}
    assert {path.stem for path in sketches(tmp_path)} == {names[1], names[2]}  # both are open here
    os.utime(tmp_path / f"{names[2]}.f32", (1, 1))
    module._FILES.clear()
    gc.collect()
    stored(tmp_path, 3, limit)
    assert {path.stem for path in sketches(tmp_path)} == {names[1], names[3]}  # the longest unused one went


@pytest.mark.usefixtures("_files")
def test_writers_that_race_leave_one_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_one_writer", lambda _: nullcontext())
    draw = Draw("gaussian", 90, 30, 3)
    path, barrier = tmp_path / f"{draw.digest}.f32", Barrier(6)
    generate = Draw.gaussian

    def together(draw: Draw, start: int, stop: int) -> Floats:
        if stop - start > 1:
            barrier.wait(timeout=30)
        return generate(draw, start, stop)

    monkeypatch.setattr(Draw, "gaussian", together)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: module._open(draw, path, 2**20), range(6)))
    assert all(values is not None and np.array_equal(values, generate(draw, 0, 90)) for values in found)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.usefixtures("_files")
def test_the_default_folder_is_the_user_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    layout = ParameterLayout(("0.weight",), ((3, 30),))
    w = torch.ones(20)
    fixed = Projection(layout, ProjectionSpec("flat", k=20), SEED)
    p = whole(layout, fixed.spec, SEED)
    torch.testing.assert_close(fixed.lift(w, 1), (p @ w.double()).float())
    assert len(sketches(tmp_path / "spark-dfl" / "sketches")) == 1
    Projection(layout, ProjectionSpec("flat", k=20, fresh=True), SEED).lift(w, 1)
    assert len(sketches(tmp_path / "spark-dfl" / "sketches")) == 1  # a fresh one would be written every round


def test_the_sizes_of_the_paper_choose_their_forms() -> None:
    assert type(linear_map("gaussian", 784, 250, 0)) is module.MatrixMap
    assert type(linear_map("gaussian", 78_400, 10_000, 0)) is module.BlockMap
    assert type(linear_map("hadamard", 784, 250, 0)) is module.MatrixMap
    assert type(linear_map("hadamard", 78_400, 10_000, 0)) is HadamardMap
    assert type(linear_map("gaussian", 100, 250, 0)) is IdentityMap
