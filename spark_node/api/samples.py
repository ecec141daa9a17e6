"""A user's arrays and tensors as a dataset; everything is taken as it is, nothing is standardised."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from spark_node.data.datasets import Dataset, Samples
from spark_node.data.formats import Integers
from spark_node.errors import DataError

Array = Tensor | npt.NDArray[Any]
Pair = tuple[Array, Array]
"""Inputs [N, ...] of floating-point numbers, and labels [N] of whole numbers from 0 on."""


def samples_of(pair: Pair, what: str) -> Samples:
    """(x, y), checked; DataError says in a line what is wrong with `what`."""
    try:
        given_x, given_y = pair
    except (TypeError, ValueError):
        raise DataError(f"{what}: give a pair (x, y) of inputs and labels") from None
    x, y = _array(given_x, f"{what}: x"), _array(given_y, f"{what}: y")
    if x.dtype.kind != "f" or x.ndim < 2:
        remedy = "floating-point inputs [N, ...] are needed, standardised; of bytes for example (x / 255 - 0.5) / 0.5"
        raise DataError(f"{what}: x is {x.dtype} of shape {list(x.shape)}; {remedy}")
    if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
        raise DataError(f"{what}: y is {y.dtype} of shape {list(y.shape)}; {len(x)} whole numbers are needed, as x has")
    if not len(x):
        raise DataError(f"{what}: no samples; give at least one")
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise DataError(f"{what}: x has entries that are not finite; remove or replace them")
    if y.min() < 0 or y.max() > np.iinfo(np.int32).max:
        raise DataError(f"{what}: y has {y.min()} to {y.max()}; number the classes from 0 on")
    return Samples(x, y.astype(np.int64))


def joined(parts: Sequence[Samples]) -> Samples:
    """The samples of several peers as one; `writers` says whose each is."""
    shapes = {part.pixels.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise DataError(f"data: peers have inputs of shapes {', '.join(map(str, sorted(shapes)))}; all must be alike")
    owners = [np.full(len(part), peer, np.int64) for peer, part in enumerate(parts)]
    pixels = np.concatenate([part.pixels for part in parts])
    return Samples(pixels, np.concatenate([part.labels for part in parts]), np.concatenate(owners))


def as_dataset(name: str, train: Samples, test: Samples, classes: int) -> Dataset:
    """The samples as they are: mean 0, deviation 1."""
    shape = train.pixels.shape[1:]
    if test.pixels.shape[1:] != shape:
        raise DataError(f"test: x has samples of shape {list(test.pixels.shape[1:])}, training has {list(shape)}")
    for what, labels in (("data", train.labels), ("test", test.labels)):
        check_classes(what, labels, classes)
    return Dataset(name, train, test, classes, shape, (0.0,), (1.0,), 1.0)


def check_classes(what: str, labels: Integers, classes: int) -> None:
    """DataError where a label is none of the classes."""
    if labels.max() >= classes:
        raise DataError(f"{what}: y has class {labels.max()}; the model tells 0 to {classes - 1} apart")


def _array(given: Any, what: str) -> npt.NDArray[Any]:
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        return cast(npt.NDArray[Any], given.float().numpy() if given.is_floating_point() else given.numpy())
    try:
        return np.asarray(given)
    except ValueError as error:
        raise DataError(f"{what}: no array of numbers ({error})") from None
