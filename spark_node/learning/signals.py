"""Signals: how a layer's outputs act on the logits, in the form that is smallest.

g[n, c, p] = d f_c(x_n) / d y[n, p] for the outputs y of a layer at its positions p. The last layer's are the identity;
in a chain of linear layers with element-wise activations they are a product of weights and slopes, and only the
slopes depend on the sample.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Signals(ABC):
    """g of one layer for N samples: [N, C, P, O], in whatever form is smallest."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """(N, C, P, O)."""

    @abstractmethod
    def pull(self, residual: Tensor) -> Tensor:
        """sum_c g[n, c] r[n, c]: [N, C] -> [N, P, O]."""

    @abstractmethod
    def push(self, outputs: Tensor) -> Tensor:
        """sum_{p, o} g[n, c, p, o] y[n, p, o]: [N, P, O] -> [N, C]."""

    @abstractmethod
    def explicit(self) -> Tensor:
        """[N, C, P, O], written out."""

    @abstractmethod
    def narrow(self, start: int, stop: int) -> "Signals":
        """The samples start..stop."""

    @abstractmethod
    def outputs(self, start: int, stop: int) -> "Signals":
        """Of the layer's outputs start..stop only: [N, C, P, stop - start]."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What depends on the samples, and so has to be stored or sent."""


@dataclass(frozen=True)
class IdentitySignals(Signals):
    """The last layer of a network: g[n, c, o] = 1 where c = o."""

    samples: int
    like: Tensor
    """Any tensor of the dtype and device of the network; its last dimension is C."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        classes = self.like.shape[-1]
        return self.samples, classes, 1, classes

    def pull(self, residual: Tensor) -> Tensor:
        return residual.unsqueeze(1)

    def push(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(1)

    def explicit(self) -> Tensor:
        classes = self.like.shape[-1]
        eye = torch.eye(classes, dtype=self.like.dtype, device=self.like.device)
        return eye[None, :, None, :].expand(self.samples, classes, 1, classes)

    def narrow(self, start: int, stop: int) -> "IdentitySignals":
        return IdentitySignals(stop - start, self.like)

    def outputs(self, start: int, stop: int) -> "ExplicitSignals":
        return ExplicitSignals(self.explicit()[..., start:stop].contiguous())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()


@dataclass(frozen=True)
class ChainedSignals(Signals):
    """A linear layer below another: g = (g_above W_above) * slopes, slopes = derivative of the activation."""

    above: Signals
    weight: Tensor
    """W of the layer above, [O_above, O]."""
    slopes: Tensor
    """[N, O]; a mask of bools for ReLU."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.slopes.shape[0], self.above.shape[1], 1, self.slopes.shape[1]

    def pull(self, residual: Tensor) -> Tensor:
        return (self.above.pull(residual) @ self.weight).mul_(self.slopes.unsqueeze(1))

    def push(self, outputs: Tensor) -> Tensor:
        return self.above.push((outputs * self.slopes.unsqueeze(1)) @ self.weight.T)

    def explicit(self) -> Tensor:
        return (self.above.explicit() @ self.weight) * self.slopes[:, None, None, :]

    def narrow(self, start: int, stop: int) -> "ChainedSignals":
        return ChainedSignals(self.above.narrow(start, stop), self.weight, self.slopes[start:stop])

    def outputs(self, start: int, stop: int) -> "ChainedSignals":
        return ChainedSignals(self.above, self.weight[:, start:stop], self.slopes[:, start:stop])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.slopes,)


@dataclass(frozen=True)
class ExplicitSignals(Signals):
    """g written out."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        n, c, p, o = self.values.shape
        return n, c, p, o

    def pull(self, residual: Tensor) -> Tensor:
        n, c, p, o = self.shape
        return (residual.unsqueeze(1) @ self.values.reshape(n, c, p * o)).view(n, p, o)

    def push(self, outputs: Tensor) -> Tensor:
        n, c, p, o = self.shape
        return (self.values.reshape(n, c, p * o) @ outputs.reshape(n, p * o, 1)).squeeze(2)

    def explicit(self) -> Tensor:
        return self.values

    def narrow(self, start: int, stop: int) -> "ExplicitSignals":
        return ExplicitSignals(self.values[start:stop])

    def outputs(self, start: int, stop: int) -> "ExplicitSignals":
        return ExplicitSignals(self.values[..., start:stop])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)


@dataclass(frozen=True)
class SegmentedSignals(Signals):
    """Signals of several peers that were taken at different weights, one after the other."""

    parts: tuple[Signals, ...]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        _, c, p, o = self.parts[0].shape
        return sum(part.shape[0] for part in self.parts), c, p, o

    @property
    def sizes(self) -> list[int]:
        return [part.shape[0] for part in self.parts]

    def pull(self, residual: Tensor) -> Tensor:
        rows = residual.split(self.sizes)
        return torch.cat([part.pull(r) for part, r in zip(self.parts, rows, strict=True)])

    def push(self, outputs: Tensor) -> Tensor:
        rows = outputs.split(self.sizes)
        return torch.cat([part.push(y) for part, y in zip(self.parts, rows, strict=True)])

    def explicit(self) -> Tensor:
        return torch.cat([part.explicit() for part in self.parts])

    def narrow(self, start: int, stop: int) -> Signals:
        kept, offset = [], 0
        for part in self.parts:
            low, high = max(start - offset, 0), min(stop - offset, part.shape[0])
            if low < high:
                kept.append(part.narrow(low, high))
            offset += part.shape[0]
        return SegmentedSignals(tuple(kept))

    def outputs(self, start: int, stop: int) -> "SegmentedSignals":
        return SegmentedSignals(tuple(part.outputs(start, stop) for part in self.parts))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.tensors)


def join_signals(parts: Sequence[Signals]) -> Signals:
    """The signals of several peers as one; where they share their weights, as one set of factors."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, IdentitySignals) and all(isinstance(p, IdentitySignals) for p in parts):
        return IdentitySignals(sum(p.shape[0] for p in parts), first.like)
    chained = [p for p in parts if isinstance(p, ChainedSignals)]
    if len(chained) == len(parts) and all(torch.equal(p.weight, chained[0].weight) for p in chained[1:]):
        above = join_signals([p.above for p in chained])
        if not isinstance(above, SegmentedSignals):
            return ChainedSignals(above, chained[0].weight, torch.cat([p.slopes for p in chained]))
    explicit = [p for p in parts if isinstance(p, ExplicitSignals)]
    if len(explicit) == len(parts):
        return ExplicitSignals(torch.cat([p.values for p in explicit]))
    return SegmentedSignals(tuple(parts))
