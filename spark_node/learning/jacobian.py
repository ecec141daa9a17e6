"""Jacobians of a torch module's logits in its parameters: as factors where a layer allows it, else densely."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from spark_node.learning.chain import Link, forward, links_of, shared_parameters
from spark_node.learning.layers import DenseLayer, FactoredLayer, Jacobian, LayerJacobian, concatenate
from spark_node.learning.signals import ChainedSignals, ExplicitSignals, IdentitySignals, Signals
from spark_node.model import ParameterLayout

Form = str | Mapping[str, str]
"""factored | dense | auto (per layer the one with fewer numbers), or layer name -> factored | dense."""


def jacobian(module: nn.Module, w: Tensor, x: Tensor, *, form: Form = "auto", chunk: int = 50) -> Jacobian:
    """The Jacobian of module(x) at the flat weights w."""
    layout = ParameterLayout.of(module)
    if form != "dense" and (isinstance(form, str) or "dense" not in form.values()):
        chain = links_of(module)
        if chain is not None:
            return _chain_jacobian(chain, layout, w, x)
    pieces = [_module_jacobian(module, layout, w, part, form) for part in x.split(chunk)]
    return pieces[0] if len(pieces) == 1 else concatenate(pieces)


def _chain_jacobian(links: list[Link], layout: ParameterLayout, w: Tensor, x: Tensor) -> Jacobian:
    """One forward pass: inputs and slopes of every layer are the whole Jacobian."""
    parameters, slices = layout.unflatten(w), layout.slices
    with torch.no_grad():
        passed = forward(links, parameters, x)
        signals: Signals = IdentitySignals(x.shape[0], passed.logits)
        layers: list[LayerJacobian] = []
        for i in reversed(range(len(links))):
            name = links[i].name
            bias = slices[f"{name}.bias"] if links[i].bias else None
            layers.append(FactoredLayer(name, slices[f"{name}.weight"], bias, passed.inputs[i].unsqueeze(1), signals))
            if i > 0:
                signals = ChainedSignals(signals, parameters[f"{name}.weight"], passed.slopes[i - 1])
    return Jacobian(tuple(reversed(layers)), layout.size, passed.logits)


def _factorable(part: nn.Module) -> bool:
    """Layers whose Jacobian is sum_p g (x) a. Grouped or oddly padded convolutions are taken densely."""
    if isinstance(part, nn.Conv2d):
        return part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str)
    return type(part) is nn.Linear


def _patches(part: nn.Module, a: Tensor) -> Tensor:
    """The inputs of a layer at its output positions: [N, P, I]."""
    if isinstance(part, nn.Conv2d):
        columns = F.unfold(a, part.kernel_size, part.dilation, part.padding, part.stride)  # type: ignore[arg-type]
        return columns.transpose(1, 2).contiguous()
    return a.reshape(a.shape[0], -1, a.shape[-1])


def _positions_last(part: nn.Module, g: Tensor) -> Tensor:
    """Signals as they come from autograd, [C, N, ...], as [N, C, P, O]."""
    if isinstance(part, nn.Conv2d):
        return g.flatten(3).permute(1, 0, 3, 2).contiguous()
    return g.reshape(g.shape[0], g.shape[1], -1, g.shape[-1]).transpose(0, 1).contiguous()


@dataclass
class _Tap:
    """What a layer saw and gave in one forward pass."""

    inputs: list[Tensor]
    outputs: list[Tensor]


def _module_jacobian(module: nn.Module, layout: ParameterLayout, w: Tensor, x: Tensor, form: Form) -> Jacobian:
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

    shared = shared_parameters(module)
    for name, part in module.named_modules():
        own = {f"{name}.{key}" for key, _ in part.named_parameters(recurse=False)}
        if _factorable(part) and own <= slices.keys() and not own & shared:
            taps[name] = _Tap([], [])
            handles.append(part.register_forward_hook(record(taps[name])))
    return taps, handles


def _factor(
    module: nn.Module, taps: dict[str, _Tap], logits: Tensor, slices: dict[str, slice], form: Form
) -> list[FactoredLayer]:
    """The layers that were used once, as factors; only those that `form` names or, with auto, that are smaller so."""
    parts = dict(module.named_modules())
    once = {name: tap for name, tap in taps.items() if len(tap.outputs) == 1}
    if form == "auto":
        once = {name: tap for name, tap in once.items() if _smaller_as_factors(parts[name], tap, logits.shape[1])}
    elif not isinstance(form, str):
        once = {name: tap for name, tap in once.items() if form.get(name) == "factored"}
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
