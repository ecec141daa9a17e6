"""A Jacobian, layer by layer: factored or dense.

For a layer y = W a + b applied at positions p (one for a linear layer, the output pixels of a convolution)

    J[n, c] = sum_p  g[n, c, p] (x) [a[n, p], 1]

so the inputs a and the signals g stand for the N x C x d Jacobian exactly.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spark_node.learning.signals import Signals, join_signals


class LayerJacobian(ABC):
    """The columns of the Jacobian that belong to one layer, for N samples. `w` is always the whole flat vector."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """N."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Columns of this layer."""

    @abstractmethod
    def pull(self, residual: Tensor, into: Tensor) -> None:
        """Add J^T r to the layer's place in the flat vector `into`."""

    @abstractmethod
    def push(self, w: Tensor) -> Tensor:
        """J w: [d] -> [N, C]."""

    @abstractmethod
    def dense(self, start: int, stop: int) -> Tensor:
        """The samples start..stop written out: [n, C, parameters]."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What depends on the samples."""

    @property
    def nbytes(self) -> int:
        """Bytes of what has to be sent for this layer, uncompressed; masks count a bit a value."""
        return sum(math.ceil(t.numel() / 8) if t.dtype == torch.bool else t.nbytes for t in self.tensors)


@dataclass(frozen=True)
class DenseLayer(LayerJacobian):
    """A layer's Jacobian written out."""

    name: str
    columns: slice
    values: Tensor
    """[N, C, columns]."""

    @property
    def samples(self) -> int:
        return self.values.shape[0]

    @property
    def parameters(self) -> int:
        return self.values.shape[2]

    def pull(self, residual: Tensor, into: Tensor) -> None:
        into[self.columns] += residual.reshape(-1) @ self.values.reshape(-1, self.parameters)

    def push(self, w: Tensor) -> Tensor:
        return self.values @ w[self.columns]

    def dense(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)


@dataclass(frozen=True)
class FactoredLayer(LayerJacobian):
    """A linear or convolutional layer's Jacobian as inputs and signals."""

    name: str
    weight: slice
    bias: slice | None
    inputs: Tensor
    """a, [N, P, I]."""
    signals: Signals
    """g, [N, C, P, O]."""

    @property
    def samples(self) -> int:
        return self.inputs.shape[0]

    @property
    def parameters(self) -> int:
        width = self.inputs.shape[2] + (self.bias is not None)
        return self.signals.shape[3] * width

    def pull(self, residual: Tensor, into: Tensor) -> None:
        outputs = self.signals.pull(residual).flatten(0, 1)
        into[self.weight] += (outputs.T @ self.inputs.flatten(0, 1)).reshape(-1)
        if self.bias is not None:
            into[self.bias] += outputs.sum(0)

    def push(self, w: Tensor) -> Tensor:
        width = self.inputs.shape[2]
        outputs = self.inputs @ w[self.weight].view(-1, width).T
        if self.bias is not None:
            outputs = outputs + w[self.bias]
        return self.signals.push(outputs)

    def dense(self, start: int, stop: int) -> Tensor:
        g = self.signals.narrow(start, stop).explicit()
        a = self.inputs[start:stop]
        n, c, p, o = g.shape
        if p == 1:
            weight = g[:, :, 0, :, None] * a[:, None, 0, None, :]
        else:
            weight = (g.permute(0, 1, 3, 2).reshape(n, c * o, p) @ a).view(n, c, o, -1)
        parts = [weight.flatten(2)]
        if self.bias is not None:
            parts.append(g.sum(2))
        return torch.cat(parts, dim=2)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.inputs, *self.signals.tensors)


@dataclass(frozen=True)
class Jacobian:
    """All layers of one peer's Jacobian, in one order that every peer shares, and the logits at the same point."""

    layers: tuple[LayerJacobian, ...]
    parameters: int
    """d."""
    logits: Tensor
    """f(X; w), [N, C]."""

    @property
    def samples(self) -> int:
        return self.logits.shape[0]

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes + sum(layer.nbytes for layer in self.layers)

    def raw_inputs(self) -> Tensor | None:
        """The first layer's inputs where that is a linear layer: what a package reveals of the data, exactly."""
        first = self.layers[0]
        if isinstance(first, FactoredLayer) and first.inputs.shape[1] == 1:
            return first.inputs[:, 0]
        return None


def concatenate(pieces: Sequence[Jacobian]) -> Jacobian:
    """Chunks of one peer's samples as one Jacobian."""
    layers: list[LayerJacobian] = []
    for parts in zip(*(piece.layers for piece in pieces), strict=True):
        first = parts[0]
        if isinstance(first, DenseLayer):
            values = torch.cat([part.values for part in parts if isinstance(part, DenseLayer)])
            layers.append(DenseLayer(first.name, first.columns, values))
        elif isinstance(first, FactoredLayer):
            same = [part for part in parts if isinstance(part, FactoredLayer)]
            inputs = torch.cat([part.inputs for part in same])
            signals = join_signals([part.signals for part in same])
            layers.append(FactoredLayer(first.name, first.weight, first.bias, inputs, signals))
    return Jacobian(tuple(layers), pieces[0].parameters, torch.cat([piece.logits for piece in pieces]))
