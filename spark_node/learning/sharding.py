"""One neighbourhood's kernel over several ranks: each holds a slice of the parameters' Jacobian.

The kernel is a sum over parameters, so each rank's slice is a Jacobian of its own, of fewer parameters, and every form
of layer and signal serves as it is. Of a factored layer the larger factor is divided: a column of its inputs stands
for one weight of every unit (784-100-10: both layers), a unit of its signals for that unit's row of weights (early
convolutions). Of a dense layer the columns are.

    full:   K r = sum over ranks of J_rank (J_rank^T r): one all-reduce a product
    trace:  the one N x N matrix is the sum of the ranks' matrices. A large one is divided: each rank holds N / R of its
            rows, and a product is 1/R of the work and one all-gather. A small one every rank holds whole, since there
            the collective would take longer than the product (benchmarks/sharded.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spark_node.learning.kernel import FullKernel, NeighbourhoodKernel
from spark_node.learning.layers import DenseLayer, FactoredLayer, Jacobian, LayerJacobian
from spark_node.learning.signals import ChainedSignals, IdentitySignals, SegmentedSignals, Signals

WHOLE_SAMPLES = 2000
"""Up to so many samples every rank holds the whole matrix of a trace kernel: 16 MB in float32."""


class Collectives(Protocol):
    """What the ranks of one peer do together. All of them call the same, in the same order."""

    @property
    def rank(self) -> int:
        """This one, from 0."""

    @property
    def size(self) -> int:
        """R."""

    def add(self, tensor: Tensor) -> Tensor:
        """All-reduce, in place: the sum of every rank's tensor, with the same bits on all ranks."""

    def add_at(self, tensor: Tensor, rank: int) -> None:
        """Reduce: as `add`, but only one rank's tensor becomes the sum; the others' are void."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """All-gather: every rank's tensor, all of one shape."""


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a neighbourhood's Jacobians."""

    jacobians: tuple[Jacobian, ...]
    """The peers', of this rank's parameters only, numbered from 0."""
    columns: Tensor
    """Where those parameters lie in the whole flat vector, [d of the rank]."""


def shard(jacobians: Sequence[Jacobian], ranks: int) -> list[Shard]:
    """A neighbourhood's Jacobians in `ranks` slices; the slices are views where they can be."""
    layers = list(zip(*(j.layers for j in jacobians), strict=True))
    splits = [_split(parts, ranks) for parts in layers]
    return [_one(jacobians, layers, splits, rank) for rank in range(ranks)]


def _one(
    jacobians: Sequence[Jacobian], layers: list[tuple[LayerJacobian, ...]], splits: list["_Split"], rank: int
) -> Shard:
    kept: list[list[LayerJacobian]] = [[] for _ in jacobians]
    columns: list[Tensor] = []
    offset = 0
    for parts, split in zip(layers, splits, strict=True):
        place = split.columns(rank)
        if len(place) == 0:  # fewer columns than ranks
            continue
        for i, part in enumerate(parts):
            kept[i].append(split.cut(part, rank, offset, place))
        columns.append(place)
        offset += len(place)
    pieces = [Jacobian(tuple(own), offset, j.logits) for own, j in zip(kept, jacobians, strict=True)]
    return Shard(tuple(pieces), torch.cat(columns) if columns else torch.zeros(0, dtype=torch.int64))


def bounds(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """The share start..stop of one rank: shares differ by one at most."""
    return count * rank // ranks, count * (rank + 1) // ranks


@dataclass(frozen=True)
class _Split:
    """How one layer's columns are divided; in dense layers by number, which holds for any other form too."""

    first: int
    count: int
    ranks: int

    def columns(self, rank: int) -> Tensor:
        """This rank's places in the flat vector, weights before biases."""
        start, stop = bounds(self.count, self.ranks, rank)
        return torch.arange(self.first + start, self.first + stop)

    def cut(self, part: LayerJacobian, rank: int, offset: int, place: Tensor) -> LayerJacobian:
        """A peer's part of the layer at these places, which are numbered from `offset` on."""
        if not isinstance(part, DenseLayer):
            raise TypeError(f"a layer of another form than its neighbours': {type(part).__name__}")
        mine = slice(offset, offset + len(place))
        numbers = place - part.columns.start
        if len(numbers) == int(numbers[-1] - numbers[0]) + 1:
            return DenseLayer(part.name, mine, part.values[:, :, int(numbers[0]) : int(numbers[-1]) + 1])
        return DenseLayer(part.name, mine, part.values.index_select(2, numbers.to(part.values.device)))


@dataclass(frozen=True)
class _FactoredSplit(_Split):
    """Of a layer that some peer has in factors: by the columns of its inputs, or by its units."""

    weight: slice
    bias: slice | None
    units: int
    width: int
    by_units: bool

    def columns(self, rank: int) -> Tensor:
        grid = torch.arange(self.weight.start, self.weight.stop).view(self.units, self.width)
        start, stop = self._share(rank)
        if self.by_units:
            chosen = grid[start:stop].flatten()
            biases = slice(start, stop)
        else:  # the biases, a column of ones, go with the last columns
            chosen = grid[:, start:stop].flatten()
            biases = slice(0, self.units if rank == self.ranks - 1 else 0)
        if self.bias is None:
            return chosen
        return torch.cat([chosen, torch.arange(self.bias.start, self.bias.stop)[biases]])

    def cut(self, part: LayerJacobian, rank: int, offset: int, place: Tensor) -> LayerJacobian:
        if not isinstance(part, FactoredLayer):
            return super().cut(part, rank, offset, place)
        start, stop = self._share(rank)
        inputs, signals = part.inputs, part.signals
        if self.by_units:
            signals = signals.outputs(start, stop)
            weights = (stop - start) * self.width
        else:
            inputs = inputs[:, :, start:stop]
            weights = self.units * (stop - start)
        bias = slice(offset + weights, offset + len(place)) if len(place) > weights else None
        return FactoredLayer(part.name, slice(offset, offset + weights), bias, inputs, signals)

    def _share(self, rank: int) -> tuple[int, int]:
        return bounds(self.units if self.by_units else self.width, self.ranks, rank)


def _split(parts: Sequence[LayerJacobian], ranks: int) -> _Split:
    """The larger factor is divided."""
    factored = next((p for p in parts if isinstance(p, FactoredLayer)), None)
    if factored is None:
        dense = parts[0]
        if not isinstance(dense, DenseLayer):
            raise TypeError(f"a layer that cannot be divided: {type(dense).__name__}")
        return _Split(dense.columns.start, dense.parameters, ranks)
    _, positions, width = factored.inputs.shape
    units = factored.signals.shape[3]
    by_units = units >= ranks and _divided_by_units(factored.signals) > positions * width
    where = factored.weight.start, factored.parameters, ranks
    return _FactoredSplit(*where, factored.weight, factored.bias, units, width, by_units)


def _divided_by_units(signals: Signals) -> int:
    """Numbers a sample that ranks would share out if each had a share of the units."""
    if isinstance(signals, IdentitySignals):
        return 0
    if isinstance(signals, SegmentedSignals):
        return max(_divided_by_units(part) for part in signals.parts)
    if isinstance(signals, ChainedSignals):
        return signals.shape[3]
    _, classes, positions, units = signals.shape
    return classes * positions * units


class ShardedFull:
    """K = J J^T, of which this rank has the products of its own parameters."""

    def __init__(self, jacobians: Sequence[Jacobian], together: Collectives) -> None:
        self._part, self._together = FullKernel(jacobians), together
        self.samples = self._part.samples

    def apply(self, residual: Tensor) -> Tensor:
        """K r, on every rank."""
        return self._together.add(self._part.apply(residual))

    def pull_back(self, residual: Tensor) -> Tensor:
        """J^T r of this rank's parameters."""
        return self._part.pull_back(residual)


class ShardedTrace:
    """K = (1/C) sum_c J_c J_c^T, of which this rank has a share of the rows, or all where they are few."""

    def __init__(self, jacobians: Sequence[Jacobian], together: Collectives) -> None:
        self._part, self._together = NeighbourhoodKernel(jacobians), together
        self.samples = self._part.samples
        self._shares = [bounds(self.samples, together.size, rank) for rank in range(together.size)]
        matrix = self._part.trace()
        self._whole = self.samples <= WHOLE_SAMPLES
        if self._whole:
            self.rows = together.add(matrix)
            return
        for rank, (start, stop) in enumerate(self._shares):
            together.add_at(matrix[start:stop], rank)
        start, stop = self._shares[together.rank]
        self.rows = matrix[start:stop].clone()

    def apply(self, residual: Tensor) -> Tensor:
        """K r, on every rank."""
        product = residual.T.contiguous() @ self.rows.T
        if not self._whole:
            product = self._joined(product)
        return product.T.contiguous()

    def _joined(self, own: Tensor) -> Tensor:
        """Every rank's columns of [C, N], side by side."""
        widest = max(stop - start for start, stop in self._shares)
        padded = own.new_zeros(len(own), widest)
        padded[:, : own.shape[1]] = own
        found = self._together.gather(padded)
        parts = [part[:, : stop - start] for part, (start, stop) in zip(found, self._shares, strict=True)]
        return torch.cat(parts, 1)

    def pull_back(self, residual: Tensor) -> Tensor:
        """J^T r of this rank's parameters."""
        return self._part.pull_back(residual)


SHARDED: dict[str, type[ShardedFull] | type[ShardedTrace]] = {"full": ShardedFull, "trace": ShardedTrace}
