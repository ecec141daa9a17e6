"""Sketches of a peer's Jacobian, layer by layer, from the run's seed alone: no peer ever sends one.

    J~ = J P      (eq. compression)        dw = P dw~      (eq. backproject)

    axis:   P acts on the fan-in of a parameter seen as [O, fan_in]; k_l = min(fan_in, k)
    flat:   P acts on the whole parameter, d_l = O fan_in;           k_l = min(d_l, k)

Parameters of one dimension (biases, norms) stay whole in both: they are few, and a sketch would only add noise.
"""

import hashlib
import math
import os
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from threading import RLock
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import platformdirs
import torch
from torch import Tensor

from spark_node.errors import ConfigError
from spark_node.learning.layers import DenseLayer, FactoredLayer, Jacobian, LayerJacobian
from spark_node.model import ParameterLayout
from spark_node.seeds import derive

if sys.platform != "win32":
    import fcntl

KINDS = ("none", "axis", "flat")
SKETCHES = ("gaussian", "orthonormal", "hadamard")

MEMORY_BYTES = 64 * 2**20
"""A larger Gaussian P is read from a file or generated, a block at a time."""

_FORMAT = "philox-quantiles-1"
_BLOCK_BYTES = 8 * 2**20
"""A block of a P that is not in memory."""
_PRODUCT_BYTES = 24 * 2**20
"""A temporary product, or a chunk of a written-out layer."""
_WRITTEN_HADAMARD = 2**20
"""Entries up to which a Hadamard sketch is kept as a matrix: one product is faster than a transform."""
_ORTHONORMAL = 2**26
"""Entries up to which a matrix is orthonormalised: that needs all of it at once, in float64."""

Floats = npt.NDArray[np.float32]
T = TypeVar("T")


def _ranges(stop: int, step: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive pieces of 0..stop."""
    for start in range(0, stop, max(1, step)):
        yield start, min(start + max(1, step), stop)


# Random numbers: the same bits on every platform and in every version of numpy and torch.


@lru_cache(maxsize=1)
def quantiles() -> Floats:
    """65,536 equally likely values of a standard normal variable, on a grid of 2^-20 that hides a libm's last digit."""
    upper = [NormalDist().inv_cdf((2 * i + 1) / 2**17) for i in range(2**15, 2**16)]
    scale = math.sqrt(2**15 / math.fsum(q * q for q in upper))
    grid = np.rint(np.array(upper) * scale * 2**20) / 2**20
    table = np.concatenate([-grid[::-1], grid]).astype(np.float32)
    table.flags.writeable = False
    return table


def normal(seed: int, start: int, stop: int, scale: float = 1.0) -> Floats:
    """Entries start..stop of the stream of normal values called `seed`: 16 bits each, 16 entries a Philox counter."""
    table = quantiles() * np.float32(scale)
    bits = np.random.Philox(key=derive(seed, "normal"), counter=start // 16)
    out = np.empty(stop - start, np.float32)
    done, skip = 0, start % 16
    while done < len(out):
        count = min(2**16, len(out) - done + skip)
        words = _raw(bits, -(-count // 4)).view("<u2")[skip:count]
        np.take(table, words, out=out[done : done + len(words)], mode="clip")
        done, skip = done + len(words), 0
    return out


def _raw(bits: np.random.Philox, count: int) -> npt.NDArray[np.uint64]:
    """Little-endian 64-bit words."""
    words: npt.NDArray[np.uint64] = np.asarray(bits.random_raw(count)).astype("<u8", copy=False)
    return words


# Matrices that peers of one process, or of one host, share.


@dataclass(frozen=True)
class Draw:
    """Everything that determines one P."""

    sketch: str
    width: int
    k: int
    seed: int

    @property
    def digest(self) -> str:
        text = repr((_FORMAT, self.sketch, self.width, self.k, self.seed))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def nbytes(self) -> int:
        """In float32."""
        return 4 * self.width * self.k

    def gaussian(self, start: int, stop: int) -> Floats:
        """Rows start..stop of P ~ N(0, 1/k) (eq. projection_matrix)."""
        entries = normal(self.seed, start * self.k, stop * self.k, 1 / math.sqrt(self.k))
        return entries.reshape(stop - start, self.k)

    def written(self) -> Tensor:
        """The whole of P, float32 on the CPU."""
        if self.sketch == "hadamard":
            return HadamardMap(self.width, self.k, self).forward(torch.eye(self.width))
        matrix = torch.from_numpy(self.gaussian(0, self.width))
        return _orthonormal(matrix) if self.sketch == "orthonormal" else matrix


def _orthonormal(matrix: Tensor) -> Tensor:
    """Q of matrix = Q R with a positive diagonal of R, which makes Q unique: platforms agree but for a last digit."""
    q, r = torch.linalg.qr(matrix.double())
    signs = torch.where(torch.diagonal(r) < 0, -1.0, 1.0)
    return torch.mul(q, signs).float().contiguous()


class _Shared(Generic[T]):
    """What was made for a key, for every thread; the least recently used goes where the sizes exceed the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._total = 0
        self._kept: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._lock = RLock()

    def get(self, key: Hashable, make: Callable[[], T], size: int) -> T:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make(), size
                self._total += size
            self._kept.move_to_end(key)
            while self._total > self._limit and len(self._kept) > 1:
                self._total -= self._kept.popitem(last=False)[1][1]
            return self._kept[key][0]

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._total = 0


_MATRICES: _Shared[Tensor] = _Shared(512 * 2**20)
_FILES: _Shared[Floats | None] = _Shared(4 * 2**30)


def _matrix(draw: Draw, like: Tensor) -> Tensor:
    """P in memory, of the dtype and on the device of `like`."""

    def make() -> Tensor:
        if like.dtype == torch.float32 and like.device.type == "cpu":
            return draw.written()
        return _matrix(draw, torch.empty(0, dtype=torch.float32)).to(like)

    return _MATRICES.get((draw, like.dtype, like.device), make, draw.width * draw.k * like.element_size())


def _mapped(draw: Draw, folder: Path, limit: int) -> Floats | None:
    """P from its file, whose pages all processes of the host share; None where it cannot or may not be stored."""
    if draw.nbytes > limit:
        return None
    path = folder / f"{draw.digest}.f32"
    return _FILES.get(path, lambda: _open(draw, path, limit), draw.nbytes)


def _open(draw: Draw, path: Path, limit: int) -> Floats | None:
    try:
        found = _map_file(draw, path)
        if found is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _one_writer(path.parent):
                found = _map_file(draw, path)
                if found is None:
                    _write(draw, path, limit)
                    found = _map_file(draw, path)
        return found
    except OSError:
        return None


def _map_file(draw: Draw, path: Path) -> Floats | None:
    """The file's values where its size and a few of its rows are right. The map keeps the file's shared lock."""
    try:
        with path.open("rb") as handle:
            if os.fstat(handle.fileno()).st_size != draw.nbytes:
                return None
            if sys.platform != "win32":
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_SH)
            values: Floats = np.memmap(handle, "<f4", "c", shape=(draw.width, draw.k))
    except FileNotFoundError:
        return None
    with suppress(OSError):
        os.utime(path)
    some = range(0, draw.width, -(-draw.width // 16))
    return values if all(np.array_equal(values[i], draw.gaussian(i, i + 1)[0]) for i in some) else None


@contextmanager
def _one_writer(folder: Path) -> Iterator[None]:
    """One process at a time writes; where files cannot be locked several may, and one of their equal files stays."""
    with (folder / ".lock").open("w") as handle:
        if sys.platform != "win32":
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write(draw: Draw, path: Path, limit: int) -> None:
    """Raw little-endian float32, under a temporary name until it is complete."""
    path.unlink(missing_ok=True)
    _make_room(path.parent, draw.nbytes, limit)
    number, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(number, "wb") as file:
            for start, stop in _ranges(draw.width, _BLOCK_BYTES // (4 * draw.k)):
                file.write(draw.gaussian(start, stop).astype("<f4", copy=False).data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _make_room(folder: Path, needed: int, limit: int) -> None:
    """Remove files that no process has open, the longest unused first; OSError where that is not enough."""
    files = sorted((p for p in folder.iterdir() if p.suffix in (".f32", ".tmp")), key=lambda p: p.stat().st_mtime)
    sizes = {path: path.stat().st_size for path in files}
    for path in files:
        if sum(sizes.values()) + needed > limit and _remove_unused(path):
            del sizes[path]
    if sum(sizes.values()) + needed > limit or shutil.disk_usage(folder).free < needed + 2**30:
        raise OSError(f"{folder}: no room for a sketch of {needed} bytes")


def _remove_unused(path: Path) -> bool:
    with suppress(OSError):
        with path.open("rb") as handle:
            if sys.platform != "win32":
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False


# Linear maps: P of one axis.


class LinearMap(ABC):
    """P of one parameter axis, d -> k."""

    width: int
    """d."""
    k: int

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x P: [..., d] -> [..., k]."""

    @abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """y P^T: [..., k] -> [..., d]."""


@dataclass(frozen=True)
class IdentityMap(LinearMap):
    """P = I, where k >= d."""

    width: int
    k: int

    def forward(self, x: Tensor) -> Tensor:
        return x

    def adjoint(self, y: Tensor) -> Tensor:
        return y


@dataclass(frozen=True)
class MatrixMap(LinearMap):
    """P as a matrix in memory."""

    width: int
    k: int
    draw: Draw

    def rows(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Rows start..stop of P, of the dtype and on the device of `like`."""
        return _matrix(self.draw, like)[start:stop]

    def step(self, like: Tensor) -> int:
        """Rows to be read at once."""
        return self.width

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.width)
        out = x.new_zeros(flat.shape[0], self.k)
        for start, stop in _ranges(self.width, self.step(x)):
            out.addmm_(flat[:, start:stop], self.rows(start, stop, x))
        return out.view(*x.shape[:-1], self.k)

    def adjoint(self, y: Tensor) -> Tensor:
        flat = y.reshape(-1, self.k)
        out = y.new_empty(flat.shape[0], self.width)
        for start, stop in _ranges(self.width, self.step(y)):
            out[:, start:stop] = flat @ self.rows(start, stop, y).T
        return out.view(*y.shape[:-1], self.width)


@dataclass(frozen=True)
class BlockMap(MatrixMap):
    """A Gaussian P that is never in memory as a whole: blocks of a file, or generated where there is none."""

    folder: Path | None
    cache_bytes: int

    def rows(self, start: int, stop: int, like: Tensor) -> Tensor:
        stored = None if self.folder is None else _mapped(self.draw, self.folder, self.cache_bytes)
        values = self.draw.gaussian(start, stop) if stored is None else np.asarray(stored[start:stop], np.float32)
        return torch.from_numpy(values).to(like)

    def step(self, like: Tensor) -> int:
        return max(1, _BLOCK_BYTES // (self.k * like.element_size()))


@dataclass(frozen=True)
class HadamardMap(LinearMap):
    """A subsampled randomised Hadamard transform: P = diag(signs) H S / sqrt(k), so E[P P^T] = I; O(d log d)."""

    width: int
    k: int
    draw: Draw

    @property
    def padded(self) -> int:
        """The power of two that H acts on."""
        return 1 << (self.width - 1).bit_length()

    def forward(self, x: Tensor) -> Tensor:
        signs, chosen = self._signs(x), self._chosen(x)
        flat = x.reshape(-1, self.width)
        out = x.new_empty(flat.shape[0], self.k)
        for start, stop in self._chunks(flat):
            padded = x.new_zeros(stop - start, self.padded)
            torch.mul(flat[start:stop], signs, out=padded[:, : self.width])
            out[start:stop] = walsh_hadamard(padded)[:, chosen]
        return out.mul_(1 / math.sqrt(self.k)).view(*x.shape[:-1], self.k)

    def adjoint(self, y: Tensor) -> Tensor:
        signs, chosen = self._signs(y) / math.sqrt(self.k), self._chosen(y)
        flat = y.reshape(-1, self.k)
        out = y.new_empty(flat.shape[0], self.width)
        for start, stop in self._chunks(flat):
            padded = y.new_zeros(stop - start, self.padded)
            padded[:, chosen] = flat[start:stop]
            torch.mul(walsh_hadamard(padded)[:, : self.width], signs, out=out[start:stop])
        return out.view(*y.shape[:-1], self.width)

    def _chunks(self, rows: Tensor) -> Iterator[tuple[int, int]]:
        return _ranges(rows.shape[0], _PRODUCT_BYTES // (2 * self.padded * rows.element_size()))

    def _signs(self, like: Tensor) -> Tensor:
        def make() -> Tensor:
            words = _raw(np.random.Philox(key=derive(self.draw.seed, "signs")), -(-self.width // 64))
            bits = np.unpackbits(words.view(np.uint8), count=self.width, bitorder="little")
            return torch.from_numpy(1 - 2 * bits.astype(np.float32)).to(like)

        size = self.width * like.element_size()
        return _MATRICES.get(("signs", self.draw, like.dtype, like.device), make, size)

    def _chosen(self, like: Tensor) -> Tensor:
        """k distinct coordinates: those of the k smallest of as many random words as there are coordinates."""

        def make() -> Tensor:
            words = _raw(np.random.Philox(key=derive(self.draw.seed, "coordinates")), self.padded)
            chosen = np.sort(np.argsort(words, kind="stable")[: self.k])
            return torch.from_numpy(chosen.astype(np.int64)).to(like.device)

        return _MATRICES.get(("coordinates", self.draw, like.device), make, 8 * self.k)


def walsh_hadamard(x: Tensor) -> Tensor:
    """x H along the last axis, a power of two: a product with a small H for every six bits of the index."""
    shape, low = x.shape, 1
    while low < shape[-1]:
        size = min(64, shape[-1] // low)
        small = _sylvester(size).to(x)
        if low == 1:
            x = x.reshape(-1, size) @ small
        else:
            x = small.expand(x.numel() // (size * low), size, size).bmm(x.view(-1, size, low))
        low *= size
    return x.view(shape)


@lru_cache(maxsize=8)
def _sylvester(size: int) -> Tensor:
    """H of a power of two, H_2n = [[H_n, H_n], [H_n, -H_n]]."""
    h = torch.ones(1, 1)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def linear_map(
    kind: str, width: int, k: int, seed: int, *, cache_folder: Path | None = None, cache_bytes: int = 0
) -> LinearMap:
    """The sketch `kind` of an axis of `width` down to k; the identity where k >= width. Equal arguments, equal P."""
    if kind not in SKETCHES:
        raise ConfigError(f"sketch = {kind!r}: choose one of {', '.join(SKETCHES)}")
    if k >= width:
        return IdentityMap(width, width)
    if k < 1:
        raise ConfigError(f"sketch: k = {k}; it must be 1 or more")
    draw = Draw(kind, width, k, seed)
    if kind == "hadamard" and width * k > _WRITTEN_HADAMARD:
        return HadamardMap(width, k, draw)
    if kind == "orthonormal" and width * k > _ORTHONORMAL:
        raise ConfigError(
            f"sketch = 'orthonormal': {width} x {k} is too large to orthonormalise; take hadamard or a smaller k"
        )
    if kind == "gaussian" and draw.nbytes > MEMORY_BYTES:
        return BlockMap(width, k, draw, cache_folder, cache_bytes)
    return MatrixMap(width, k, draw)


# The projection of a whole Jacobian.


@dataclass(frozen=True)
class ProjectionSpec:
    """Everything that names a projection; equal specs give equal P everywhere."""

    kind: str = "none"
    """none | axis | flat."""
    sketch: str = "gaussian"
    """gaussian (the paper's) | orthonormal (a true projection) | hadamard (fast)."""
    k: int = 250
    """k_proj, the cap."""
    fresh: bool = False
    """A new P every round instead of one for the run."""
    dense: bool = False
    """Write every layer out, as the paper does, instead of keeping factors."""

    def __post_init__(self) -> None:
        for name, value, choices in (("kind", self.kind, KINDS), ("sketch", self.sketch, SKETCHES)):
            if value not in choices:
                raise ConfigError(f"projection {name} = {value!r}: choose one of {', '.join(choices)}")
        if self.k < 1:
            raise ConfigError(f"projection k = {self.k}: it must be 1 or more")


@dataclass(frozen=True)
class _Part:
    """One parameter seen as [rows, width], and its place before and after the sketch of the width to k."""

    name: str
    rows: int
    width: int
    k: int
    before: slice
    after: slice


class Projection:
    """J -> J P and back, for one model: P of every parameter comes from the seed and the parameter's name."""

    def __init__(
        self,
        layout: ParameterLayout,
        spec: ProjectionSpec,
        seed: int,
        *,
        cache_folder: Path | None = None,
        cache_bytes: int = 4 * 2**30,
    ) -> None:
        self.spec = spec
        self._seed = seed
        self._original = layout
        self._folder = cache_folder or platformdirs.user_cache_path("spark-dfl") / "sketches"
        self._cache_bytes = cache_bytes
        self.layout = ParameterLayout(layout.names, tuple(_sketched_shape(shape, spec) for shape in layout.shapes))
        before, after = layout.slices, self.layout.slices
        self._parts = [
            _Part(name, *_seen_as(shape, spec), before[name], after[name])
            for name, shape in zip(layout.names, layout.shapes, strict=True)
        ]
        for part in self._parts:
            self._map(part, 0)  # a sketch that cannot be had is refused here, not in a round

    def apply(self, jacobian: Jacobian, k: int) -> Jacobian:
        """J~ = J P in round k (eq. compression)."""
        if jacobian.parameters != self._original.size:
            raise ValueError(f"a Jacobian of {jacobian.parameters} columns, a model of {self._original.size}")
        if self.spec.kind == "none" and not self.spec.dense:
            return jacobian
        layers = tuple(self._sketched(layer, k) for layer in jacobian.layers)
        return Jacobian(layers, self.layout.size, jacobian.logits)

    def lift(self, w: Tensor, k: int) -> Tensor:
        """dw = P dw~ in round k (eq. backproject)."""
        if w.shape != (self.layout.size,):
            raise ValueError(f"a vector of shape {tuple(w.shape)}, a sketched space of {self.layout.size}")
        if self.spec.kind == "none":
            return w
        return torch.cat(
            [self._map(part, k).adjoint(w[part.after].view(part.rows, part.k)).flatten() for part in self._parts]
        )

    def _map(self, part: _Part, k: int) -> LinearMap:
        """P of a parameter in round k. A fresh one gets no file: it would be written anew every round."""
        names = ("sketch", part.name, k) if self.spec.fresh else ("sketch", part.name)
        return linear_map(
            self.spec.sketch,
            part.width,
            part.k,
            derive(self._seed, *names),
            cache_folder=None if self.spec.fresh else self._folder,
            cache_bytes=self._cache_bytes,
        )

    def _inside(self, columns: slice) -> list[_Part]:
        """The parameters in some columns of the original Jacobian."""
        found = [p for p in self._parts if columns.start <= p.before.start and p.before.stop <= columns.stop]
        if sum(p.rows * p.width for p in found) != columns.stop - columns.start:
            raise ValueError(f"columns {columns.start}..{columns.stop} are no whole parameters of the model")
        return found

    def _sketched(self, layer: LayerJacobian, k: int) -> LayerJacobian:
        if isinstance(layer, DenseLayer):
            return self._dense(layer, k)
        if isinstance(layer, FactoredLayer):
            found = self._factored(layer, k)
            return _written_out(found) if self.spec.dense and isinstance(found, FactoredLayer) else found
        raise TypeError(f"no sketch for {type(layer).__name__}")

    def _dense(self, layer: DenseLayer, k: int) -> DenseLayer:
        """Each parameter inside the layer's columns by itself."""
        parts = self._inside(layer.columns)
        columns = slice(parts[0].after.start, parts[-1].after.stop)
        if all(part.k == part.width for part in parts):
            return DenseLayer(layer.name, columns, layer.values)
        pieces = layer.values.split([p.rows * p.width for p in parts], dim=2)
        sketched = [
            self._map(part, k).forward(piece.unflatten(2, (part.rows, part.width))).flatten(2)
            for part, piece in zip(parts, pieces, strict=True)
        ]
        return DenseLayer(layer.name, columns, sketched[0] if len(sketched) == 1 else torch.cat(sketched, 2))

    def _factored(self, layer: FactoredLayer, k: int) -> LayerJacobian:
        """axis: (g (x) a) P = g (x) (a P). A flat sketch mixes the outputs, so nothing is left to factor."""
        (weight,) = self._inside(layer.weight)
        bias = None if layer.bias is None else self._inside(layer.bias)[0].after
        sketch = self._map(weight, k)
        if self.spec.kind == "flat" and not isinstance(sketch, IdentityMap):
            return DenseLayer(layer.name, _side_by_side(weight.after, bias), _flattened(layer, sketch))
        inputs = sketch.forward(layer.inputs) if self.spec.kind == "axis" else layer.inputs
        return FactoredLayer(layer.name, weight.after, bias, inputs, layer.signals)


def _seen_as(shape: tuple[int, ...], spec: ProjectionSpec) -> tuple[int, int, int]:
    """(rows, width, k): P takes the width to k."""
    size = math.prod(shape)
    if spec.kind == "none" or len(shape) < 2:
        return 1, size, size
    rows = shape[0] if spec.kind == "axis" else 1
    return rows, size // rows, min(size // rows, spec.k)


def _sketched_shape(shape: tuple[int, ...], spec: ProjectionSpec) -> tuple[int, ...]:
    rows, width, k = _seen_as(shape, spec)
    if k == width:
        return shape
    return (rows, k) if spec.kind == "axis" else (k,)


def _side_by_side(weight: slice, bias: slice | None) -> slice:
    """The columns of a layer whose bias follows its weight."""
    if bias is None:
        return weight
    if bias.start != weight.stop:
        raise ValueError("a layer is written out with its bias after its weight; this model's order is another")
    return slice(weight.start, bias.stop)


def _written_out(layer: FactoredLayer) -> DenseLayer:
    return DenseLayer(layer.name, _side_by_side(layer.weight, layer.bias), layer.dense(0, layer.samples))


def _flattened(layer: FactoredLayer, sketch: LinearMap) -> Tensor:
    """[N, C, k (+ O)]: the weight's Jacobian times P and the bias's as it is, with bounded temporary memory."""
    n, classes, positions, outputs = layer.signals.shape
    bias = 0 if layer.bias is None else outputs
    values = layer.inputs.new_zeros(n, classes, sketch.k + bias)
    entries = _PRODUCT_BYTES // values.element_size()
    if positions == 1 and isinstance(sketch, MatrixMap):
        for start, stop in _ranges(n, entries // max(sketch.k, classes * outputs)):
            g = layer.signals.narrow(start, stop).explicit()[:, :, 0]
            _contract(layer.inputs[start:stop, 0], g, sketch, values[start:stop, :, : sketch.k])
            values[start:stop, :, sketch.k :] = g[:, :, :bias]
        return values
    for start, stop in _ranges(n, entries // (classes * layer.parameters)):
        rows = layer.dense(start, stop)
        values[start:stop, :, : sketch.k] = sketch.forward(rows[:, :, : sketch.width])
        values[start:stop, :, sketch.k :] = rows[:, :, sketch.width :]
    return values


def _contract(a: Tensor, g: Tensor, sketch: MatrixMap, into: Tensor) -> None:
    """into[n, c] += sum_o g[n, c, o] (a[n] P[o]) with P seen as [O, fan_in, k]: no [C, O fan_in] is ever written."""
    n, width = a.shape
    group = _PRODUCT_BYTES // (max(1, n) * sketch.k * a.element_size())
    for first, last in _ranges(g.shape[2], group):
        products = a.new_zeros(last - first, n, sketch.k)
        for output in range(first, last):
            for start, stop in _ranges(width, sketch.step(a)):
                block = sketch.rows(output * width + start, output * width + stop, a)
                products[output - first].addmm_(a[:, start:stop], block)
        into.baddbmm_(g[:, :, first:last], products.transpose(0, 1))
