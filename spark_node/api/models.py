"""The model that a user gives: a module, a factory of one, or what the settings say."""

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spark_node import config as configuration
from spark_node import model as models
from spark_node.config import Config
from spark_node.errors import ConfigError
from spark_node.learning.algorithm import Algorithm, Learner, Stopwatch, no_stopwatch
from spark_node.learning.algorithms import check_algorithm, make_algorithm
from spark_node.model import ParameterLayout

Model = nn.Module | Callable[[], nn.Module] | str | None
"""A module (its weights are where all peers start), a factory (called under the run's seed), a `model.kind` such as
"cnn" or "package.module:factory", or None: as the settings say."""


def settings_layer(settings: Mapping[str, Any] | None, **given: Any) -> dict[str, Any]:
    """{"section.key": value} of `settings`, and of the arguments section__key=value that are not None."""
    layer = dict(settings or {})
    for name, value in given.items():
        key = name.replace("__", ".", 1)
        if value is None:
            continue
        if key in layer:
            raise ConfigError(f"{key} is given twice, as an argument and in settings; give it once")
        layer[key] = value
    return layer


def load_config(preset: str | None, file: str | Path | None, layer: Mapping[str, Any]) -> Config:
    """As for the command line: defaults < preset < file < environment < these settings."""
    return configuration.load(preset, None if file is None else Path(file), flags=layer)


def own_module(model: Model, config: Config, shape: tuple[int, ...], classes: int | None) -> tuple[nn.Module, int]:
    """The run's module with its initial weights, and how many classes it tells apart."""
    if model is None or isinstance(model, str):
        if classes is None:
            raise ConfigError("classes: say how many there are; one peer's labels need not hold all of them")
        return models.build(config.model, shape, classes, config.run.seed), classes
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", repr(model))
    if isinstance(model, nn.Module):
        module = copy.deepcopy(model).float().cpu().eval()
    elif callable(model):
        module = models.from_factory(model, name, config.model, config.run.seed)
    else:
        raise ConfigError(f"model: {type(model).__name__} is neither a torch.nn.Module nor a function that makes one")
    found = models.outputs(name, module, shape)
    if classes is not None and classes != found:
        raise ConfigError(f"model: {name} gives {found} logits, and classes = {classes}; one a class is needed")
    return module, found


def own_learner(algorithm: str | Learner | None) -> tuple[str | None, Learner]:
    """What run.algorithm says, and who makes the peers' algorithms."""
    if algorithm is None or isinstance(algorithm, str):
        return algorithm, make_algorithm
    parts = algorithm.__module__, getattr(algorithm, "__qualname__", type(algorithm).__name__)
    name = ":".join(re.sub(r"[^\w.]", "_", part.replace("<locals>.", "")) for part in parts)
    made_by = algorithm

    def learner(
        config: Config,
        peer: str,
        module: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        stopwatch: Stopwatch = no_stopwatch,
        /,
    ) -> Algorithm:
        made = made_by(config, peer, module, inputs, labels, stopwatch)
        check_algorithm(name, made)
        return made

    return name, learner


def with_weights(module: nn.Module, w: Tensor) -> nn.Module:
    """A copy of the module with these flat weights, for evaluation; the user's to keep."""
    made = copy.deepcopy(module).cpu()
    parameters = ParameterLayout.of(made).unflatten(w.detach().cpu().clone())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.data = parameters[name].clone()
            parameter.grad = None
            parameter.requires_grad_(True)
    return made.eval()
