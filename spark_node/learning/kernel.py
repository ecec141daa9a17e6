"""Kernel operators over the stacked Jacobians of a neighbourhood.

    full:   K = J J^T,                      (N C) x (N C), applied as J (J^T r), never stored
    trace:  K = (1/C) sum_c J_c J_c^T,      N x N, the same for every class (NTK-DFL)

For linear layers <J[n, c], J[m, c']> = (a[n].a[m] + 1) (g[n, c].g[m, c']), so the trace kernel is a product of two
small Gram matrices per layer and the full one two thin matrix products per layer.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from spark_node.learning.layers import FactoredLayer, Jacobian, LayerJacobian
from spark_node.learning.signals import ChainedSignals, IdentitySignals, SegmentedSignals, Signals, join_signals

_ROW_BYTES = 64 * 2**20
"""What a chunk of written-out Jacobian rows may take while a trace kernel is built."""


class NeighbourhoodKernel:
    """The peers' Jacobians, layer by layer: one joined block where all are linear factors, else a list."""

    def __init__(self, jacobians: Sequence[Jacobian]) -> None:
        counts = {(len(j.layers), j.parameters, j.logits.shape[1]) for j in jacobians}
        if len(counts) != 1:
            raise ValueError("the Jacobians of a neighbourhood must come from one model")
        self.parameters = jacobians[0].parameters
        self.classes = jacobians[0].logits.shape[1]
        self.sizes = [j.samples for j in jacobians]
        self.samples = sum(self.sizes)
        self._like = jacobians[0].logits
        self.linear: list[FactoredLayer] = []
        self.other: list[tuple[LayerJacobian, ...]] = []
        for parts in zip(*(j.layers for j in jacobians), strict=True):
            joined = _join_linear(parts, self._like.dtype)
            if joined is None:
                self.other.append(parts)
            else:
                self.linear.append(joined)

    def pull_back(self, residual: Tensor) -> Tensor:
        """J^T r, [d]."""
        w = self._like.new_zeros(self.parameters)
        for layer in self.linear:
            layer.pull(residual, w)
        self._pull_other(residual, w)
        return w

    def push(self, w: Tensor) -> Tensor:
        """J w, [N, C]."""
        outputs = [layer.push(w) for layer in self.linear]
        return torch.stack([*outputs, self._push_other(w)]).sum(0)

    def trace(self) -> Tensor:
        """(1/C) sum_c J_c J_c^T, [N, N]."""
        matrix = self._like.new_zeros(self.samples, self.samples)
        for layer in self.linear:
            _add_linear_trace(matrix, layer)
        for parts in self.other:
            _add_dense_trace(matrix, parts, self.classes)
        return matrix

    def _pull_other(self, residual: Tensor, into: Tensor) -> None:
        rows = residual.split(self.sizes)
        for parts in self.other:
            for part, r in zip(parts, rows, strict=True):
                part.pull(r, into)

    def _push_other(self, w: Tensor) -> Tensor:
        out = self._like.new_zeros(self.samples, self.classes)
        for parts in self.other:
            out += torch.cat([part.push(w) for part in parts])
        return out


class FullKernel(NeighbourhoodKernel):
    """K = J J^T."""

    def __init__(self, jacobians: Sequence[Jacobian]) -> None:
        super().__init__(jacobians)
        self._blocks = [_LinearBlock(layer) for layer in self.linear]

    def apply(self, residual: Tensor) -> Tensor:
        """K r: per linear layer signals, inputs' Gram matrix, signals; J (J^T r) for the rest."""
        columns = residual.T.contiguous()
        out = torch.zeros_like(columns)
        for block in self._blocks:
            out += block.apply(columns)
        out = out.T.contiguous()
        if self.other:
            w = residual.new_zeros(self.parameters)
            self._pull_other(residual, w)
            out += self._push_other(w)
        return out


class TraceKernel(NeighbourhoodKernel):
    """K = (1/C) sum_c J_c J_c^T as an N x N matrix; the weight update still uses every class's own Jacobian."""

    def __init__(self, jacobians: Sequence[Jacobian]) -> None:
        super().__init__(jacobians)
        self.matrix = self.trace()

    def apply(self, residual: Tensor) -> Tensor:
        """K r. The matrix is symmetric, and a product from the left with C long rows is the faster one."""
        return (residual.T.contiguous() @ self.matrix).T.contiguous()


KERNELS: dict[str, type[FullKernel] | type[TraceKernel]] = {"full": FullKernel, "trace": TraceKernel}


def gram(rows: Tensor, block: int = 300) -> Tensor:
    """rows rows^T; on a CPU only the blocks on and above the diagonal are multiplied."""
    out = rows.new_empty(len(rows), len(rows))
    for here, there in _upper_blocks(rows, block):
        product = rows[here] @ rows[there].T
        out[here, there] = product
        if here != there:
            out[there, here] = product.T
    return out


def _upper_blocks(rows: Tensor, block: int = 300) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of a symmetric matrix's blocks on and above the diagonal; all at once where that is quicker."""
    n = len(rows)
    size = block if rows.device.type == "cpu" else max(n, 1)
    cuts = [slice(i, min(i + size, n)) for i in range(0, n, size)]
    return ((here, there) for i, here in enumerate(cuts) for there in cuts[i:])


class _LinearBlock:
    """One linear layer's part of K, applied to a residual of long rows, one a class: [C, N] -> [C, N].

    Rows of N samples keep every product and every mask contiguous; rows of C classes cost an eighth more time.
    """

    def __init__(self, layer: FactoredLayer) -> None:
        inputs, outputs = layer.inputs[:, 0], layer.signals.shape[3]
        if layer.bias is not None:
            inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1)
        n, width = inputs.shape
        # Multiply-adds per product; building the Gram matrix is spread over about a hundred products.
        stored = n * n * outputs + 0.01 * n * n * width
        self._matrix = gram(inputs) if stored < 2 * n * width * outputs else None
        self._inputs = inputs
        self._signals = layer.signals
        self._chain = _chain(layer.signals)

    def apply(self, residual: Tensor) -> Tensor:
        if self._chain is None:
            outputs = self._mix(self._signals.pull(residual.T).squeeze(1).T)
            return self._signals.push(outputs.T.unsqueeze(1)).T
        for weight, slopes in self._chain:
            residual = (weight.T @ residual).mul_(slopes)
        outputs = self._mix(residual)
        for weight, slopes in reversed(self._chain):
            outputs = weight @ outputs.mul_(slopes)
        return outputs

    def _mix(self, outputs: Tensor) -> Tensor:
        """y (a a^T + 1) for the layer's inputs a, in the cheaper of two orders: [O, N] -> [O, N]."""
        if self._matrix is not None:
            return outputs @ self._matrix
        return (outputs @ self._inputs) @ self._inputs.T


def _chain(signals: Signals) -> list[tuple[Tensor, Tensor]] | None:
    """(W, slopes^T) from the last layer downwards, where one chain of weights serves every sample."""
    if isinstance(signals, IdentitySignals):
        return []
    if isinstance(signals, ChainedSignals):
        above = _chain(signals.above)
        return None if above is None else [*above, (signals.weight, signals.slopes.T.contiguous())]
    return None


def _join_linear(parts: Sequence[LayerJacobian], dtype: torch.dtype) -> FactoredLayer | None:
    """One block of factors for the whole neighbourhood, where every peer's part is a linear layer's."""
    factored = [p for p in parts if isinstance(p, FactoredLayer) and p.inputs.shape[1] == 1]
    if len(factored) != len(parts):
        return None
    first = factored[0]
    inputs = torch.cat([p.inputs for p in factored])
    signals = _in_floats(join_signals([p.signals for p in factored]), dtype)
    return FactoredLayer(first.name, first.weight, first.bias, inputs, signals)


def _in_floats(signals: Signals, dtype: torch.dtype) -> Signals:
    """Masks as numbers: every kernel product multiplies by them."""
    if isinstance(signals, ChainedSignals):
        return ChainedSignals(_in_floats(signals.above, dtype), signals.weight, signals.slopes.to(dtype))
    if isinstance(signals, SegmentedSignals):
        return SegmentedSignals(tuple(_in_floats(part, dtype) for part in signals.parts))
    return signals


def _add_linear_trace(matrix: Tensor, layer: FactoredLayer) -> None:
    """Add (a a^T + 1) * (1/C) sum_c g_c g_c^T, a block at a time: nothing else of the matrix's size is made."""
    inputs, signals = layer.inputs[:, 0], _signal_trace(layer.signals)
    for here, there in _upper_blocks(inputs):
        product = inputs[here] @ inputs[there].T
        if layer.bias is not None:
            product += 1
        if signals is not None:
            product *= signals(here, there)
        matrix[here, there] += product
        if here != there:
            matrix[there, here] += product.T


def _signal_trace(signals: Signals) -> Callable[[slice, slice], Tensor] | None:
    """Blocks of (1/C) sum_c g[n, c].g[m, c] for a linear layer; None stands for a matrix of ones."""
    if isinstance(signals, IdentitySignals):
        return None
    classes = signals.shape[1]
    if _masked(signals) is not None:
        return lambda here, there: _masked_trace(_masked_rows(signals, here), _masked_rows(signals, there), classes)
    rows = signals.explicit().flatten(1)
    return lambda here, there: (rows[here] @ rows[there].T).div_(classes)


def _masked_rows(signals: Signals, rows: slice) -> list[ChainedSignals]:
    found = _masked(signals.narrow(rows.start, rows.stop))
    assert found is not None
    return found


def _masked(signals: Signals) -> list[ChainedSignals] | None:
    """The peers' parts, where each is g[n, c] = W[c] * slopes[n]: those of the layer below the last."""
    parts = signals.parts if isinstance(signals, SegmentedSignals) else (signals,)
    found = [p for p in parts if isinstance(p, ChainedSignals) and isinstance(p.above, IdentitySignals)]
    return found if len(found) == len(parts) else None


def _masked_trace(rows: list[ChainedSignals], columns: list[ChainedSignals], classes: int) -> Tensor:
    """The classes sum into one weight per hidden unit."""
    return torch.cat(
        [
            torch.cat([(p.slopes * ((p.weight * q.weight).sum(0) / classes)) @ q.slopes.T for q in columns], 1)
            for p in rows
        ]
    )


def _add_dense_trace(matrix: Tensor, parts: Sequence[LayerJacobian], classes: int) -> None:
    """Add (1/C) J J^T over (class, column) of a layer whose rows are written out, a bounded chunk at a time."""
    row_bytes = classes * parts[0].parameters * matrix.element_size()
    chunks = list(_chunks(parts, max(1, _ROW_BYTES // row_bytes)))
    for i, (offset, layer, start, stop) in enumerate(chunks):
        here = layer.dense(start, stop).flatten(1)
        rows = slice(offset, offset + stop - start)
        for other_offset, other, other_start, other_stop in chunks[i:]:
            there = here if other_offset == offset else other.dense(other_start, other_stop).flatten(1)
            product = (here @ there.T).div_(classes)
            columns = slice(other_offset, other_offset + other_stop - other_start)
            matrix[rows, columns] += product
            if other_offset != offset:
                matrix[columns, rows] += product.T


def _chunks(parts: Sequence[LayerJacobian], size: int) -> Iterator[tuple[int, LayerJacobian, int, int]]:
    """(position in the neighbourhood, layer, start, stop) of at most `size` samples each."""
    offset = 0
    for part in parts:
        for start in range(0, part.samples, size):
            stop = min(start + size, part.samples)
            yield offset + start, part, start, stop
        offset += part.samples
