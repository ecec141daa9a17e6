"""A neighbourhood's Jacobians in slices: what the ranks hold adds up to the whole kernel, in float64."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import pytest
import torch
from torch import Tensor

from spark_node.learning import sharding
from spark_node.learning.layers import DenseLayer, FactoredLayer, Jacobian
from spark_node.learning.sharding import SHARDED, Shard, shard
from tests.unit.networks import CLASSES, NETWORKS, neighbourhood
from tests.unit.test_kernel import FORMS, materialised


@dataclass
class Table:
    """Where threads that stand for ranks put what they have."""

    size: int
    parts: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=30)


@dataclass
class ThreadRank:
    """Collectives among threads, added in the order of the ranks."""

    rank: int
    table: Table

    @property
    def size(self) -> int:
        return self.table.size

    def gather(self, tensor: Tensor) -> list[Tensor]:
        self.table.parts[self.rank] = tensor.clone()
        self.table.barrier.wait()
        found = [self.table.parts[rank] for rank in range(self.size)]
        self.table.barrier.wait()
        return found

    def add(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self.gather(tensor)).sum(0))

    def add_at(self, tensor: Tensor, rank: int) -> None:
        total = torch.stack(self.gather(tensor)).sum(0)
        tensor.copy_(total if rank == self.rank else torch.full_like(tensor, float("nan")))


def products(kind: str, jacobians: Sequence[Jacobian], ranks: int, residual: Tensor) -> tuple[list[Tensor], Tensor]:
    """K r as every rank has it, and J^T r put together."""
    shards, table = shard(jacobians, ranks), Table(ranks)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        kernel = SHARDED[kind](shards[rank].jacobians, ThreadRank(rank, table))
        return kernel.apply(residual), kernel.pull_back(residual)

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(work, range(ranks)))
    w = torch.full((jacobians[0].parameters,), float("nan"), dtype=residual.dtype)
    for piece, (_, own) in zip(shards, found, strict=True):
        w[piece.columns] = own
    return [applied for applied, _ in found], w


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("mode", ["receiver", "sender"])
@pytest.mark.parametrize("kind", ["full", "trace", "trace by rows"])
@pytest.mark.parametrize("name", NETWORKS)
def test_slices_add_up_to_the_whole(
    name: str, kind: str, mode: str, forms: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "trace by rows":
        monkeypatch.setattr(sharding, "WHOLE_SAMPLES", 0)
        kind = "trace"
    found, dense = neighbourhood(name, mode, FORMS[forms])
    residual = torch.randn(len(dense), CLASSES, dtype=torch.float64)
    applied, w = products(kind, found, ranks, residual)
    expected = materialised(dense, kind, residual)
    for one in applied:
        torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(one, applied[0])
    torch.testing.assert_close(w, torch.einsum("ncd,nc->d", dense, residual), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["full", "trace"])
def test_peers_of_different_forms_are_divided_at_the_same_columns(kind: str) -> None:
    found, dense = neighbourhood("cnn", "sender", ["factored", "factored", "factored"])
    other, _ = neighbourhood("cnn", "sender", ["auto", "auto", "auto"])
    mixed = [found[0], other[1], found[2]]
    residual = torch.randn(len(dense), CLASSES, dtype=torch.float64)
    applied, w = products(kind, mixed, 3, residual)
    torch.testing.assert_close(applied[0], materialised(dense, kind, residual), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(w, torch.einsum("ncd,nc->d", dense, residual), rtol=1e-10, atol=1e-10)


def held(shards: list[Shard]) -> list[int]:
    """Numbers of the factors that each rank holds."""
    return [sum(t.numel() for j in s.jacobians for layer in j.layers for t in layer.tensors) for s in shards]


def test_every_parameter_has_one_rank_and_the_ranks_have_about_as_many() -> None:
    for name in NETWORKS:
        found, _ = neighbourhood(name, "receiver", FORMS["auto"])
        shards = shard(found, 3)
        together = torch.cat([s.columns for s in shards])
        assert torch.equal(together.sort().values, torch.arange(found[0].parameters)), name
        sizes = [len(s.columns) for s in shards]
        assert max(sizes) < 2 * min(sizes), name


def test_the_larger_factor_of_a_layer_is_the_one_that_is_divided() -> None:
    found, _ = neighbourhood("cnn", "receiver", FORMS["factored"])
    first = shard(found, 3)[0].jacobians[0].layers[0]
    whole = found[0].layers[0]
    assert isinstance(first, FactoredLayer)
    assert isinstance(whole, FactoredLayer)
    assert first.inputs.shape == whole.inputs.shape  # C O numbers a position in the signals, 9 in the inputs
    assert first.signals.shape[3] < whole.signals.shape[3]
    mlp, _ = neighbourhood("mlp", "receiver", FORMS["factored"])
    assert max(held(shard(mlp, 3))) < 0.6 * held(shard(mlp, 1))[0]


def test_a_layer_of_fewer_columns_than_ranks_leaves_some_ranks_without() -> None:
    values = torch.randn(3, 2, 2, dtype=torch.float64)
    found = [Jacobian((DenseLayer("tiny", slice(0, 2), values),), 2, torch.zeros(3, 2, dtype=torch.float64))]
    residual = torch.randn(3, 2, dtype=torch.float64)
    applied, w = products("full", found, 4, residual)
    torch.testing.assert_close(applied[3], materialised(values, "full", residual))
    torch.testing.assert_close(w, torch.einsum("ncd,nc->d", values, residual))
