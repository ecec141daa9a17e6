"""Writes pinned messages: `python tests/golden/make.py NAME...`. A file that exists is never written again.

Everything comes from formulas with exact results, so that the messages are the same wherever they are made.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from spark_node.config import Config
from spark_node.learning.algorithms import make_projection, make_terms
from spark_node.learning.jacobian import jacobian
from spark_node.learning.layers import DenseLayer, FactoredLayer
from spark_node.learning.messages import Message, Package, Weights
from spark_node.learning.signals import ChainedSignals, IdentitySignals
from spark_node.model import ParameterLayout, mlp
from spark_node.package.format import Terms
from spark_node.package.reader import decode
from spark_node.package.writer import encode

FOLDER = Path(__file__).resolve().parent
ROUND, SENDER, CLASSES = 7, "peer-2", 3


@dataclass(frozen=True)
class Recipe:
    """A message, made under some settings of [package]; `at`: its receiver has asked for the weights."""

    message: Callable[[dict[str, Any]], Message]
    package: dict[str, Any] = field(default_factory=dict)
    at: bool = False


def numbers(count: int, factor: int, modulus: int) -> Tensor:
    """Numbers between -1 and 1 that float32 holds exactly, in an order without a pattern."""
    return ((torch.arange(count) * factor % modulus) - modulus // 2).float() / 64


def golden_terms(package: dict[str, Any]) -> tuple[Terms, Tensor]:
    """The terms of the pinned messages, and the weights that they are about."""
    layout = ParameterLayout.of(mlp(12, [5], CLASSES))
    return make_terms(_config(package), "golden", layout, CLASSES), numbers(layout.size, 37, 101)


def _config(package: dict[str, Any]) -> Config:
    return Config().replace(**{f"package__{name}": value for name, value in package.items()})


def _weights(package: dict[str, Any]) -> Weights:
    _, w = golden_terms(package)
    return Weights(w, numbers(len(w), 29, 83))


def _request(package: dict[str, Any]) -> Weights:
    return Weights(golden_terms(package)[1], request=True)


def _package(
    package: dict[str, Any], *, samples: int = 6, at: bool = False, activation: str = "relu", pixels: bool = False
) -> Package:
    terms, w = golden_terms(package)
    x = numbers(12 * samples, 53, 97).view(samples, 12)
    if pixels:
        x = (torch.arange(12 * samples) * 53 % 256).float().view(samples, 12) / 256
    found = jacobian(mlp(12, [5], CLASSES, activation), w, x, form="factored")
    sketched = make_projection(_config(package), terms.layout).apply(found, ROUND)
    return Package(sketched, torch.arange(samples) % CLASSES, w if at else None)


RECIPES: dict[str, Recipe] = {
    "format-1-weights-lossless.bin": Recipe(_weights),
    "format-1-weights-bf16.bin": Recipe(_weights, {"weights": "bf16"}),
    "format-1-weights-int8.bin": Recipe(_weights, {"weights": "int8"}),
    "format-1-request.bin": Recipe(_request, {"level": 0}),
    "format-1-package-receiver.bin": Recipe(lambda p: _package(p, at=True), at=True),
    "format-1-package-sender.bin": Recipe(_package),
    "format-1-package-tanh.bin": Recipe(lambda p: _package(p, at=True, activation="tanh"), at=True),
    "format-1-package-pixels.bin": Recipe(lambda p: _package(p, samples=90, at=True, pixels=True), at=True),
    "format-1-package-6-bit.bin": Recipe(lambda p: _package(p, samples=40, at=True), {"bits": 6}, at=True),
    "format-1-package-12-bit.bin": Recipe(
        lambda p: _package(p, samples=30, at=True), {"bits": 12, "scale_block": 50}, at=True
    ),
    "format-1-package-axis.bin": Recipe(
        lambda p: _package(p, at=True), {"projection": "axis", "sketch_size": 4, "bits": 5, "level": 0}, at=True
    ),
    "format-1-package-dense-sparse-6-bit.bin": Recipe(
        lambda p: _package(p, samples=9), {"encoding": "dense", "bits": 6, "keep": 0.5}
    ),
    "format-1-package-dense-rare.bin": Recipe(
        lambda p: _package(p, samples=9), {"encoding": "dense", "keep": 0.01, "level": 6}
    ),
}


def tensors_of(message: Message) -> dict[str, Tensor]:
    """Every tensor of a message, by name."""
    if isinstance(message, Weights):
        return {"w": message.w} if message.v is None else {"w": message.w, "v": message.v}
    found = {"labels": message.labels, "logits": message.jacobian.logits}
    for layer in message.jacobian.layers:
        if isinstance(layer, DenseLayer):
            found[f"{layer.name}.values"] = layer.values
        elif isinstance(layer, FactoredLayer):
            found[f"{layer.name}.inputs"] = layer.inputs
            signals = layer.signals
            if isinstance(signals, ChainedSignals):
                found |= {f"{layer.name}.slopes": signals.slopes, f"{layer.name}.above": signals.weight}
            elif not isinstance(signals, IdentitySignals):
                found[f"{layer.name}.signals"] = signals.explicit()
    return {name: tensor.contiguous() for name, tensor in found.items()}


def write(names: Sequence[str], folder: Path = FOLDER) -> None:
    """The named messages, and what they decode to, beside those that are there."""
    for name in names:
        if (folder / name).exists():
            raise FileExistsError(f"{folder / name} is pinned: a new format gets files of its own")
    path = folder / "expected.json"
    expected = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        recipe = RECIPES[name]
        message = recipe.message(recipe.package)
        terms, w = golden_terms(recipe.package)
        data = b"".join(encode(message, terms, k=ROUND, sender=SENDER).wire())
        if not terms.settings.lossless:
            message = decode(data, terms, at=w if recipe.at else None).message
        (folder / name).write_bytes(data)
        expected[name] = {
            "file": hashlib.sha256(data).hexdigest(),
            "package": recipe.package,
            "round": ROUND,
            "sender": SENDER,
            "at": recipe.at,
            "tensors": {
                name: {"shape": list(tensor.shape), "sha256": hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}
                for name, tensor in tensors_of(message).items()
            },
        }
    path.write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    try:
        write(sys.argv[1:])
    except (FileExistsError, KeyError) as error:
        sys.exit(f"{error}; the recipes are {', '.join(RECIPES)}")
