"""What peers say to each other, as typed values. A transport carries them; a codec turns them into bytes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spark_node.learning.layers import Jacobian


@dataclass(frozen=True)
class Weights:
    """A peer's flat weights, and its velocity where velocities are averaged too."""

    w: Tensor
    v: Tensor | None = None
    request: bool = False
    """The receiver is asked for a package taken at these weights."""

    kind = "weights"

    @property
    def nbytes(self) -> int:
        return self.w.nbytes + (0 if self.v is None else self.v.nbytes)


@dataclass(frozen=True)
class Package:
    """The Jacobian, logits and labels of a peer's samples at one point of weight space."""

    jacobian: Jacobian
    labels: Tensor
    """[N], class numbers."""
    at: Tensor | None = None
    """The weights it was taken at, where its receiver asked for them and so has them."""

    kind = "package"

    @property
    def nbytes(self) -> int:
        """Before any coding: a label takes a byte where there are at most 256 classes."""
        label_bytes = 1 if self.jacobian.logits.shape[1] <= 256 else 4
        return self.jacobian.nbytes + label_bytes * len(self.labels)


Message = Weights | Package


def kind_of(message: Message) -> str:
    """weights | request | package."""
    return "request" if isinstance(message, Weights) and message.request else message.kind


def check(message: Message, parameters: int, package_parameters: int, classes: int) -> str | None:
    """Why a peer's message must not be used, or None: shapes as agreed, every number finite."""
    if isinstance(message, Weights):
        for tensor in (message.w, message.v):
            if tensor is not None and (tensor.shape != (parameters,) or not _is_finite(tensor)):
                return "weights of another shape, or not finite"
        return None
    jacobian, labels = message.jacobian, message.labels
    if jacobian.parameters != package_parameters or jacobian.logits.shape != (len(labels), classes) or len(labels) == 0:
        return "a package of another model or of no samples"
    if bool((labels < 0).any()) or bool((labels >= classes).any()):
        return "labels that are no class"
    if not _is_finite(jacobian.logits):
        return "logits that are not finite"
    for layer in jacobian.layers:
        for tensor in layer.tensors:
            if layer.samples != len(labels) or not _is_finite(tensor):
                return "a Jacobian that is not finite or of another number of samples"
    return None


def _is_finite(tensor: Tensor) -> bool:
    """Whether every number is: float32 numbers cannot overflow a sum in float64. An eighth of isfinite's time."""
    return math.isfinite(float(tensor.sum(dtype=torch.float64)))
