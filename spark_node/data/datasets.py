"""The datasets: found, proven by digest, parsed, and ready to be standardised."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spark_node.data import catalogue, formats, lookup
from spark_node.data.catalogue import Entry, File
from spark_node.data.formats import Inputs, Integers, Pixels
from spark_node.data.lookup import Place, locate
from spark_node.errors import DataError
from spark_node.seeds import stream

if TYPE_CHECKING:
    import torch

__all__ = ["NAMES", "Check", "Dataset", "Place", "Samples", "load", "locate", "verify"]

NAMES = tuple(catalogue.ENTRIES)


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs [N, *shape], images of bytes or a user's own numbers; their labels and, where known, who wrote each."""

    pixels: Inputs
    labels: Integers
    writers: Integers | None = None

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set and a test set. `mean` and `std` are per channel (or feature), of pixels / scale."""

    name: str
    train: Samples
    test: Samples
    classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    public: bool = True
    """Whether mean and std come from elsewhere: those of the samples tell a little of each sample."""

    def standardise(self, pixels: Inputs) -> "torch.Tensor":
        """(pixels / scale - mean) / std per channel, as float32 [n, *shape]."""
        import torch

        if pixels.shape[1:] != self.shape:
            raise ValueError(f"pixels of shape {pixels.shape}, not (n, {', '.join(map(str, self.shape))})")
        broadcast = 1, -1, *(1,) * (len(self.shape) - 1)
        mean, std = (torch.tensor(values).view(broadcast) for values in (self.mean, self.std))
        return torch.from_numpy(pixels.astype(np.float32)).div_(self.scale).sub_(mean).div_(std)


@dataclass(frozen=True)
class Check:
    """What `verify` says of one file."""

    file: str
    path: Path
    ok: bool
    detail: str


def load(name: str, folder: Path | None = None, *, verify: bool = True) -> Dataset:
    """The dataset called `name`, from `folder` or the usual places; or a user's own, where that is file:PATH.npz.

    `verify=False` is for synthetic files.
    """
    if name.startswith("file:"):
        from spark_node.data.own import from_file

        return from_file(Path(name.removeprefix("file:")).expanduser())
    entry = catalogue.entry(name)
    if entry.embedded:
        return _dataset(entry, *_read_digits())
    place = lookup.find(entry, folder)
    try:
        return _dataset(entry, *_READERS[name](entry, place.files, verify))
    except DataError as error:
        raise DataError(f"{error}; {lookup.remedy(entry, place.path)}") from error


def verify(name: str, folder: Path | None = None) -> list[Check]:
    """Each file of the dataset against its official digest; where there is none, the whole is parsed."""
    entry = catalogue.entry(name)
    if entry.embedded:
        return [Check(name, locate(name)[0].path, True, "embedded")]
    place = lookup.find(entry, folder)
    if entry.files:
        return [_check(file, place.files[file.name]) for file in entry.files]
    try:
        load(name, folder)
    except DataError as error:
        return [Check(name, place.path, False, str(error))]
    return [Check(name, place.path, True, "consistent (there is no official digest)")]


def _check(file: File, path: Path) -> Check:
    try:
        formats.read_official(path, file)
    except DataError as error:
        return Check(file.name, path, False, str(error))
    return Check(file.name, path, True, f"sha256 {file.sha256[:12]}")


def _dataset(entry: Entry, train: Samples, test: Samples) -> Dataset:
    return Dataset(entry.name, train, test, entry.classes, entry.shape, entry.mean, entry.std, entry.scale)


def _bytes(entry: Entry, files: Mapping[str, Path], name: str, verify: bool) -> bytes:
    file = next(file for file in entry.files if file.name == name)
    return formats.read_official(files[name], file) if verify else formats.read(files[name])


def _read_mnist(entry: Entry, files: Mapping[str, Path], verify: bool) -> tuple[Samples, Samples]:
    """The four IDX files of MNIST and Fashion-MNIST."""

    def part(prefix: str) -> Samples:
        images, labels = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
        x = formats.parse_images(_bytes(entry, files, images, verify), files[images], entry.shape)
        y = formats.parse_labels(_bytes(entry, files, labels, verify), files[labels], entry.classes)
        if len(x) != len(y):
            raise DataError(f"{files[labels]}: {len(y)} labels for {len(x)} images in {files[images]}")
        return Samples(x, y)

    return part("train"), part("t10k")


def _read_mnist_writers(entry: Entry, files: Mapping[str, Path], verify: bool) -> tuple[Samples, Samples]:
    """MNIST with writers: row n of QMNIST's extended labels describes MNIST's sample n."""

    def with_writers(samples: Samples, name: str) -> Samples:
        path = files[name]
        rows = formats.parse_idx(_bytes(entry, files, name, verify), path, 2, of_int32=True)
        if rows.shape[1] != 8 or len(rows) < len(samples):
            raise DataError(f"{path}: {rows.shape} instead of at least ({len(samples)}, 8) numbers")
        rows = rows[: len(samples)]
        if (different := rows[:, 0] != samples.labels).any():
            raise DataError(f"{path}: its class of sample {int(different.argmax())} is not MNIST's label")
        if (rows[:, 2] < 0).any():
            raise DataError(f"{path}: a writer below 0")
        return Samples(samples.pixels, samples.labels, rows[:, 2].astype(np.int64))

    train, test = _read_mnist(entry, files, verify)
    return (
        with_writers(train, "qmnist-train-labels-idx2-int"),
        with_writers(test, "qmnist-test-labels-idx2-int"),
    )


def _read_cifar10(entry: Entry, files: Mapping[str, Path], verify: bool) -> tuple[Samples, Samples]:
    """Five training batches and a test batch of the binary version."""

    def batches(prefix: str) -> Samples:
        names = [name for name in sorted(files) if name.startswith(prefix)]
        parts = [formats.parse_cifar(_bytes(entry, files, n, verify), files[n], entry.classes) for n in names]
        return Samples(np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]))

    return batches("data_batch"), batches("test_batch")


def _read_femnist(entry: Entry, files: Mapping[str, Path], _verify: bool) -> tuple[Samples, Samples]:
    """LEAF's JSON files, or the one .npz made of them."""
    archives = [path for path in files.values() if path.suffix == ".npz"]
    if len(archives) > 1:
        raise DataError(f"{archives[0].parent}: several archives, {', '.join(a.name for a in archives)}; keep one")
    return _read_femnist_npz(entry, archives[0]) if archives else _read_leaf(entry, files)


def _read_leaf(entry: Entry, files: Mapping[str, Path]) -> tuple[Samples, Samples]:
    """Writers are numbered in the order of their names, over training and test files together."""
    parts: dict[str, list[tuple[str, Pixels, Integers]]] = {"train": [], "test": []}
    for name, path in files.items():
        parts[name.partition("/")[0]].extend(formats.parse_leaf(formats.read(path), path, entry.classes))
    number = {user: n for n, user in enumerate(sorted({user for part in parts.values() for user, _, _ in part}))}

    def samples(part: str) -> Samples:
        users = parts[part]
        if not sum(len(labels) for _, _, labels in users):
            raise DataError(f"{next(iter(files.values())).parent.parent / part}: holds no samples")
        writers = [np.full(len(labels), number[user], np.int64) for user, _, labels in users]
        return Samples(
            np.concatenate([pixels for _, pixels, _ in users]),
            np.concatenate([labels for _, _, labels in users]),
            np.concatenate(writers),
        )

    return samples("train"), samples("test")


def _read_femnist_npz(entry: Entry, path: Path) -> tuple[Samples, Samples]:
    """x [N, 28, 28] bytes, y, writer (an index into writer_ids) and split (0 train, 1 test)."""
    arrays = formats.read_npz(path, ("x", "y", "writer", "split", "writer_ids"))
    x, y, writer, split = (arrays[name] for name in ("x", "y", "writer", "split"))
    if x.dtype != np.uint8 or x.shape != (len(y) if y.ndim else -1, *entry.shape[1:]):
        raise DataError(f"{path}: x is {x.dtype} of shape {x.shape}, y has shape {y.shape}; bytes (N, 28, 28) wanted")
    for name in ("y", "writer", "split"):
        if arrays[name].shape != y.shape or arrays[name].dtype.kind not in "iu" or y.ndim != 1:
            raise DataError(f"{path}: {name} is not one whole number a sample")
    if not np.isin(split, (0, 1)).all():
        raise DataError(f"{path}: split has values other than 0 (train) and 1 (test)")
    if len(writer) and not 0 <= writer.min() <= writer.max() < arrays["writer_ids"].size:
        raise DataError(f"{path}: a writer outside writer_ids, which has {arrays['writer_ids'].size}")
    labels = formats.check_labels(y, path, entry.classes)

    def part(value: int) -> Samples:
        chosen = split == value
        if not chosen.any():
            raise DataError(f"{path}: no sample has split {value}")
        pixels = np.ascontiguousarray(x[chosen]).reshape(-1, *entry.shape)
        return Samples(pixels, labels[chosen], writer[chosen].astype(np.int64))

    return part(0), part(1)


def _read_digits() -> tuple[Samples, Samples]:
    """scikit-learn's digits; a fixed fifth of each class is the test set.

    Its file is read here: to import scikit-learn, and with it half of SciPy, takes longer than a small run.
    """
    path = locate("digits")[0].path
    try:
        rows = np.loadtxt(path, np.uint8, delimiter=",")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); run: pip install --force-reinstall scikit-learn") from None
    pixels, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    random = stream(0, "digits", "split")
    test = np.zeros(len(labels), bool)
    for label in range(10):
        members = random.permutation(np.flatnonzero(labels == label))
        test[members[: round(len(members) / 5)]] = True
    return Samples(pixels[~test], labels[~test]), Samples(pixels[test], labels[test])


_READERS: dict[str, Callable[[Entry, Mapping[str, Path], bool], tuple[Samples, Samples]]] = {
    "fashion-mnist": _read_mnist,
    "mnist": _read_mnist,
    "mnist-writers": _read_mnist_writers,
    "cifar10": _read_cifar10,
    "femnist": _read_femnist,
}
