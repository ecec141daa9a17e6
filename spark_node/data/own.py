"""A user's own samples as a dataset: from an .npz file, or from arrays that are already in memory."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_node.data.datasets import Dataset, Samples
from spark_node.data.formats import Inputs, Integers, npz_names, read_npz
from spark_node.errors import DataError
from spark_node.seeds import stream

Numbers = npt.NDArray[Any]

ARRAYS = "x, y [, x_test, y_test] [, writer] [, mean, std]"
_NEEDED, _OPTIONAL = ("x", "y"), ("x_test", "y_test", "writer", "mean", "std")
_MOST_CLASSES = 65_536
_ROWS = 4096
"""Samples that are turned into float64 at once."""


def from_file(path: Path) -> Dataset:
    """The .npz at `path`: x [N, features], [N, H, W] or [N, C, H, W], y [N], and what else ARRAYS says.

    Nothing in it is ever unpickled. Without a test set, a fifth of each class becomes it; without mean and std (of
    bytes: of x / 255), each feature or channel is standardised by those of the training samples.
    """
    arrays = _read(path)
    x, y = _inputs(arrays["x"], "x", path), _labels(arrays["y"], "y", len(arrays["x"]), path)
    writer = _labels(arrays["writer"], "writer", len(x), path) if "writer" in arrays else None
    train = Samples(x, y, writer)
    if "x_test" in arrays:
        x_test = _inputs(arrays["x_test"], "x_test", path)
        test = Samples(x_test, _labels(arrays["y_test"], "y_test", len(x_test), path))
        if (test.pixels.shape[1:], test.pixels.dtype) != (x.shape[1:], x.dtype):
            raise DataError(
                f"{path}: x_test is {x_test.dtype} {x_test.shape[1:]}, x is {x.dtype} {x.shape[1:]}; make them alike"
            )
    else:
        train, test = hold_out(train)
    scale = 255.0 if x.dtype == np.uint8 else 1.0
    mean, std = _statistics(arrays, train.pixels, scale, path)
    classes = count_classes(str(path), train.labels, test.labels)
    return Dataset(path.stem, train, test, classes, x.shape[1:], mean, std, scale, "mean" in arrays)


def hold_out(samples: Samples) -> tuple[Samples, Samples]:
    """A training set, and a fixed fifth of each class as a test set."""
    random = stream(0, "own", "split")
    test = np.zeros(len(samples), bool)
    for label in np.unique(samples.labels):
        members = random.permutation(np.flatnonzero(samples.labels == label))
        test[members[: math.ceil(len(members) / 5) if len(members) > 1 else 0]] = True
    if not test.any():
        raise DataError("no class has two samples, so none can be held out; give a test set")
    writers = samples.writers
    return (
        Samples(samples.pixels[~test], samples.labels[~test], None if writers is None else writers[~test]),
        Samples(samples.pixels[test], samples.labels[test]),
    )


def count_classes(what: str, *labels: Integers) -> int:
    """Labels are 0 to C - 1; a class that only the test set has counts too."""
    classes = 1 + max(int(part.max()) for part in labels)
    if not 2 <= classes <= _MOST_CLASSES:
        raise DataError(f"{what}: labels up to {classes - 1}; allowed: 2 to {_MOST_CLASSES} classes, numbered from 0")
    return classes


def _read(path: Path) -> dict[str, Numbers]:
    names = npz_names(path)
    unknown = [name for name in names if name not in (*_NEEDED, *_OPTIONAL)]
    if unknown:
        raise DataError(f"{path}: array {unknown[0]!r} is not known; allowed: {ARRAYS}")
    for pair in (_NEEDED, ("x_test", "y_test"), ("mean", "std")):
        missing = [name for name in pair if name not in names]
        if missing and (pair is _NEEDED or len(missing) == 1):
            raise DataError(f"{path}: has no array {missing[0]!r}; expected: {ARRAYS}")
    return read_npz(path, tuple(names))


def _inputs(x: Numbers, name: str, path: Path) -> Inputs:
    """Bytes as they are, other numbers as float32; images get a channel axis."""
    if x.ndim not in (2, 3, 4) or not x.size:
        raise DataError(f"{path}: {name} has shape {x.shape}; expected [N, features], [N, H, W] or [N, C, H, W]")
    if x.ndim == 3:
        x = x[:, None]
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind not in "iuf":
        raise DataError(f"{path}: {name} holds {x.dtype}, not numbers")
    with np.errstate(over="ignore"):
        found = x.astype(np.float32)
    if not np.isfinite(found).all():
        raise DataError(f"{path}: {name} has entries that are not finite as float32")
    return found


def _labels(y: Numbers, name: str, count: int, path: Path) -> Integers:
    if y.dtype.kind not in "iu" or y.shape != (count,):
        raise DataError(f"{path}: {name} is {y.dtype} of shape {y.shape}; expected a whole number for each of {count}")
    if y.min() < 0 or int(y.max()) > np.iinfo(np.int32).max:
        raise DataError(f"{path}: {name} has {y.min()} to {y.max()}; allowed: whole numbers from 0 on")
    return y.astype(np.int64)


def _statistics(
    arrays: dict[str, Numbers], x: Inputs, scale: float, path: Path
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation by feature or channel: those in the file, else those of the samples."""
    if "mean" not in arrays:
        return moments(x, scale)
    found = []
    for name in ("mean", "std"):
        values = np.atleast_1d(arrays[name]).astype(np.float64)
        if values.shape not in ((1,), (x.shape[1],)) or not np.isfinite(values).all():
            raise DataError(f"{path}: {name} has shape {values.shape}; expected 1 or {x.shape[1]} finite numbers")
        found.append(tuple(map(float, values)))
    if min(found[1]) <= 0:
        raise DataError(f"{path}: std has {min(found[1])}; allowed: numbers above 0")
    return found[0], found[1]


def moments(x: Inputs, scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of x / scale along axis 1, in two passes; what never varies has deviation 1."""
    axes = (0, *range(2, x.ndim))
    count = x.size // x.shape[1]
    parts = [x[i : i + _ROWS] for i in range(0, len(x), _ROWS)]
    mean = sum((part / scale).sum(axes, dtype=np.float64) for part in parts) / count
    shaped = mean.reshape(1, -1, *(1,) * (x.ndim - 2))
    variance = sum(((part / scale - shaped) ** 2).sum(axes, dtype=np.float64) for part in parts) / count
    std = np.sqrt(variance)
    return tuple(map(float, mean)), tuple(map(float, np.where(std > 1e-8 * np.maximum(abs(mean), 1), std, 1.0)))
