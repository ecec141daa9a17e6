"""Jacobians of a torch module's logits in its parameters, layer by layer: factored or dense.

For a layer y = W a + b applied at positions p (one for a linear layer, the output pixels of a convolution)

    J[n, c] = sum_p  g[n, c, p] (x) [a[n, p], 1],        g[n, c, p] = d f_c(x_n) / d y[n, p]

so the inputs a and the signals g stand for the N x C x d Jacobian exactly. In a chain of linear layers with
element-wise activations the signals themselves are a product of weights and slopes, and only the slopes depend on
the sample.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from spark_node.model import ParameterLayout


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


def jacobian(module: nn.Module, w: Tensor, x: Tensor, *, form: str = "auto", chunk: int = 50) -> Jacobian:
    """The Jacobian of module(x) at the flat weights w. form: factored | dense | auto (per layer the smaller)."""
    layout = ParameterLayout.of(module)
    if form != "dense":
        chain = _chain(module)
        if chain is not None:
            return _chain_jacobian(chain, layout, w, x)
    pieces = [_module_jacobian(module, layout, w, part, form) for part in x.split(chunk)]
    return pieces[0] if len(pieces) == 1 else _concatenate(pieces)


@dataclass(frozen=True)
class _Link:
    """A linear layer of a chain, and the activation after it (None after the last)."""

    name: str
    bias: bool
    activation: nn.Module | None


_ELEMENTWISE = (
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity,
)  # fmt: skip


def _chain(module: nn.Module) -> list[_Link] | None:
    """The links of a Sequential of linear layers with element-wise activations between them, else None."""
    if not isinstance(module, nn.Sequential) or len(list(module.named_children())) != len(module):
        return None
    if _shared_parameters(module):
        return None
    links: list[_Link] = []
    for name, part in module.named_children():
        if isinstance(part, nn.Linear):
            if links and links[-1].activation is None:
                links[-1] = _Link(links[-1].name, links[-1].bias, nn.Identity())
            links.append(_Link(name, part.bias is not None, None))
        elif (isinstance(part, nn.Flatten) and not links and part.start_dim == 1 and part.end_dim == -1) or (
            isinstance(part, nn.Dropout) and not part.training
        ):
            continue
        elif type(part) in _ELEMENTWISE and links and links[-1].activation is None:
            links[-1] = _Link(links[-1].name, links[-1].bias, part)
        else:
            return None
    return links if links and links[-1].activation is None else None


def _slopes(activation: nn.Module, z: Tensor) -> Tensor:
    """Derivative of an element-wise activation at z."""
    if type(activation) is nn.ReLU:
        return z > 0
    with torch.enable_grad():
        leaf = z.detach().clone().requires_grad_()
        return torch.autograd.grad(activation(leaf).sum(), leaf)[0]


def _chain_jacobian(links: list[_Link], layout: ParameterLayout, w: Tensor, x: Tensor) -> Jacobian:
    """One forward pass: inputs and slopes of every layer are the whole Jacobian."""
    parameters, slices = layout.unflatten(w), layout.slices
    with torch.no_grad():
        h = x.flatten(1)
        inputs, slopes = [], []
        for link in links:
            inputs.append(h)
            z = F.linear(h, parameters[f"{link.name}.weight"], parameters[f"{link.name}.bias"] if link.bias else None)
            if link.activation is None:
                h = z
            else:
                slopes.append(_slopes(link.activation, z))
                h = link.activation(z)
        signals: Signals = IdentitySignals(x.shape[0], h)
        layers: list[LayerJacobian] = []
        for i in reversed(range(len(links))):
            name = links[i].name
            bias = slices[f"{name}.bias"] if links[i].bias else None
            layers.append(FactoredLayer(name, slices[f"{name}.weight"], bias, inputs[i].unsqueeze(1), signals))
            if i > 0:
                signals = ChainedSignals(signals, parameters[f"{name}.weight"], slopes[i - 1])
    return Jacobian(tuple(reversed(layers)), layout.size, h)


def _shared_parameters(module: nn.Module) -> set[str]:
    """Names of parameters that stand in more than one place of the module (tied weights)."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for same in names.values() if len(same) > 1 for name in same}


def _factorable(part: nn.Module) -> bool:
    """Layers whose Jacobian is sum_p g (x) a. Grouped or oddly padded convolutions are taken densely."""
    if isinstance(part, nn.Conv2d):
        return part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str)
    return type(part) is nn.Linear


def _patches(part: nn.Module, a: Tensor) -> Tensor:
    """The inputs of a layer at its output positions: [N, P, I]."""
    if isinstance(part, nn.Conv2d):
        columns = F.unfold(a, part.kernel_size, part.dilation, part.padding, part.stride)  # type: ignore[arg-type]
        return columns.transpose(1, 2)
    return a.reshape(a.shape[0], -1, a.shape[-1])


def _positions_last(part: nn.Module, g: Tensor) -> Tensor:
    """Signals as they come from autograd, [C, N, ...], as [N, C, P, O]."""
    if isinstance(part, nn.Conv2d):
        return g.flatten(3).permute(1, 0, 3, 2)
    return g.reshape(g.shape[0], g.shape[1], -1, g.shape[-1]).transpose(0, 1)


@dataclass
class _Tap:
    """What a layer saw and gave in one forward pass."""

    inputs: list[Tensor]
    outputs: list[Tensor]


def _module_jacobian(module: nn.Module, layout: ParameterLayout, w: Tensor, x: Tensor, form: str) -> Jacobian:
    """Any module: factored where a layer is linear or convolutional and used once, dense for the rest."""
    slices = layout.slices
    taps, handles = _tap(module, slices) if form != "dense" else ({}, [])
    leaves = {name: p.detach().requires_grad_() for name, p in layout.unflatten(w).items()}
    try:
        with torch.enable_grad():
            logits = functional_call(module, leaves, (x,))
    finally:
        for handle in handles:
            handle.remove()
    factored = _factor(module, taps, logits, slices, form)
    claimed = {name for layer in factored for name in (f"{layer.name}.weight", f"{layer.name}.bias")}
    rest = [name for name in layout.names if name not in claimed]
    layers = [*factored, *_dense_layers(module, layout, w, x, rest)]
    layers.sort(key=lambda layer: _first_column(layer))
    return Jacobian(tuple(layers), layout.size, logits.detach())


def _first_column(layer: LayerJacobian) -> int:
    start: int = layer.columns.start if isinstance(layer, DenseLayer) else layer.weight.start  # type: ignore[attr-defined]
    return start


def _tap(
    module: nn.Module, slices: dict[str, slice]
) -> tuple[dict[str, _Tap], list[torch.utils.hooks.RemovableHandle]]:
    """Hooks on every factorable layer."""
    taps: dict[str, _Tap] = {}
    handles = []

    def record(tap: _Tap) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            tap.inputs.append(inputs[0].detach())
            tap.outputs.append(output)

        return hook

    shared = _shared_parameters(module)
    for name, part in module.named_modules():
        own = {f"{name}.{key}" for key, _ in part.named_parameters(recurse=False)}
        if _factorable(part) and own <= slices.keys() and not own & shared:
            taps[name] = _Tap([], [])
            handles.append(part.register_forward_hook(record(taps[name])))
    return taps, handles


def _factor(
    module: nn.Module, taps: dict[str, _Tap], logits: Tensor, slices: dict[str, slice], form: str
) -> list[FactoredLayer]:
    """The layers that were used once, as factors; with form auto only where that is smaller than dense."""
    parts = dict(module.named_modules())
    once = {name: tap for name, tap in taps.items() if len(tap.outputs) == 1}
    if form == "auto":
        once = {name: tap for name, tap in once.items() if _smaller_as_factors(parts[name], tap, logits.shape[1])}
    if not once:
        return []
    classes = logits.shape[1]
    rows = torch.eye(classes, dtype=logits.dtype, device=logits.device)
    rows = rows.unsqueeze(1).expand(classes, *logits.shape)
    outputs = [tap.outputs[0] for tap in once.values()]
    gradients = torch.autograd.grad(logits, outputs, rows, is_grads_batched=True, materialize_grads=True)
    return [
        FactoredLayer(
            name,
            slices[f"{name}.weight"],
            slices.get(f"{name}.bias"),
            _patches(parts[name], tap.inputs[0]),
            ExplicitSignals(_positions_last(parts[name], gradient)),
        )
        for (name, tap), gradient in zip(once.items(), gradients, strict=True)
    ]


def _smaller_as_factors(part: nn.Module, tap: _Tap, classes: int) -> bool:
    parameters = sum(p.numel() for p in part.parameters())
    weight = next(iter(part.parameters()))
    outputs, width = weight.shape[0], weight[0].numel()
    positions = tap.outputs[0][0].numel() // outputs
    return positions * (width + classes * outputs) < classes * parameters


def _dense_layers(
    module: nn.Module, layout: ParameterLayout, w: Tensor, x: Tensor, names: Sequence[str]
) -> list[LayerJacobian]:
    """The named parameters by reverse-mode differentiation of one sample at a time, vectorised."""
    if not names:
        return []
    parameters = {name: p.detach() for name, p in layout.unflatten(w).items()}
    chosen = {name: parameters[name] for name in names}

    def one(subset: dict[str, Tensor], sample: Tensor) -> Tensor:
        logits: Tensor = functional_call(module, {**parameters, **subset}, (sample.unsqueeze(0),))
        return logits.squeeze(0)

    found = vmap(jacrev(one), (None, 0))(chosen, x)
    layers: list[LayerJacobian] = []
    for owner, group in itertools.groupby(names, key=lambda name: name.rpartition(".")[0]):
        own = list(group)  # a module's own parameters lie side by side in w
        columns = slice(layout.slices[own[0]].start, layout.slices[own[-1]].stop)
        layers.append(DenseLayer(owner, columns, torch.cat([found[name].detach().flatten(2) for name in own], 2)))
    return layers


def _concatenate(pieces: Sequence[Jacobian]) -> Jacobian:
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
