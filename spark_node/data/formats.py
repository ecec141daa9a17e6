"""The file formats, parsed strictly: any bytes give arrays or a DataError that names the file. No pickle."""

import gzip
import hashlib
import io
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_node.data.catalogue import File, owners
from spark_node.errors import DataError

Pixels = npt.NDArray[np.uint8]
Inputs = Pixels | npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

LARGEST_FILE = 1 << 31
_CHUNK = 1 << 20
_CIFAR_RECORD = 1 + 3 * 32 * 32
_LEAF_PIXELS = 28 * 28


def read(path: Path, limit: int = LARGEST_FILE) -> bytes:
    """The file's bytes, decompressed where it is gzip; never holds more than `limit` and a chunk of them."""
    chunks, size = [], 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            while chunk := stream.read(_CHUNK):
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    raise DataError(f"{path}: holds more than the {limit} bytes expected")
    except (EOFError, gzip.BadGzipFile, zlib.error, struct.error) as error:
        raise DataError(f"{path}: its gzip stream is cut off or damaged ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return b"".join(chunks)


def read_official(path: Path, file: File) -> bytes:
    """The decompressed bytes of an official file, proven to be it by their sha256."""
    data = read(path, limit=file.size)
    found = hashlib.sha256(data).hexdigest()
    if found == file.sha256:
        return data
    whose = ", ".join(dict.fromkeys(owners(found)))
    hint = f"; it is a file of {whose}" if whose else f"; {len(data)} of {file.size} bytes are there"
    raise DataError(
        f"{path}: not the official {file.name}: sha256 {file.sha256[:12]} expected, {found[:12]} found{hint}"
    )


def parse_idx(data: bytes, path: Path, dims: int, *, of_int32: bool = False) -> npt.NDArray[Any]:
    """The array of an IDX file with `dims` axes of unsigned bytes, or of big-endian 32-bit integers."""
    magic = bytes([0, 0, 0x0C if of_int32 else 0x08, dims])
    if data[:4] != magic:
        raise DataError(f"{path}: not the IDX file expected: magic {magic.hex()} wanted, {data[:4].hex()} found")
    header = 4 + 4 * dims
    if len(data) < header:
        raise DataError(f"{path}: ends inside its header")
    shape = struct.unpack(f">{dims}I", data[4:header])
    wanted = math.prod(shape) * (4 if of_int32 else 1)
    if len(data) - header != wanted:
        raise DataError(f"{path}: {wanted} bytes announced for shape {shape}, {len(data) - header} found")
    if wanted == 0:
        raise DataError(f"{path}: holds no samples")
    return np.frombuffer(data, ">i4" if of_int32 else np.uint8, offset=header).reshape(shape)


def parse_images(data: bytes, path: Path, shape: tuple[int, ...]) -> Pixels:
    """IDX images as [N, *shape]."""
    images = parse_idx(data, path, 3)
    if images.shape[1:] != shape[1:]:
        raise DataError(f"{path}: images of {images.shape[1:]} instead of {shape[1:]} pixels")
    return images.reshape(-1, *shape)


def parse_labels(data: bytes, path: Path, classes: int) -> Integers:
    """IDX labels, each within 0..classes-1."""
    return check_labels(parse_idx(data, path, 1), path, classes)


def check_labels(labels: npt.NDArray[Any], path: Path, classes: int) -> Integers:
    """The labels as int64, or a DataError that names the first one out of range."""
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        at = int(wrong.argmax())
        raise DataError(f"{path}: label {labels[at]} of sample {at} is outside 0..{classes - 1}")
    return labels.astype(np.int64)


def parse_cifar(data: bytes, path: Path, classes: int) -> tuple[Pixels, Integers]:
    """One batch of CIFAR-10's binary version: records of a label and 3 x 32 x 32 bytes."""
    if not data or len(data) % _CIFAR_RECORD:
        raise DataError(f"{path}: {len(data)} bytes are not a whole number of {_CIFAR_RECORD}-byte records")
    records = np.frombuffer(data, np.uint8).reshape(-1, _CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), check_labels(records[:, 0], path, classes)


def parse_leaf(data: bytes, path: Path, classes: int) -> Iterator[tuple[str, Pixels, Integers]]:
    """The users of one LEAF JSON file: name, pixels [n, 1, 28, 28] and labels of each."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    users = content.get("users") if isinstance(content, dict) else None
    user_data = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(users, list) or not isinstance(user_data, dict):
        raise DataError(f"{path}: not a LEAF file: it has no `users` and `user_data`")
    counts = content.get("num_samples", [None] * len(users))
    if not isinstance(counts, list) or len(counts) != len(users):
        raise DataError(f"{path}: `num_samples` does not have one number for each of the {len(users)} users")
    for user, count in zip(users, counts, strict=True):
        if not isinstance(user, str) or not isinstance(user_data.get(user), dict):
            raise DataError(f"{path}: user {user!r} has no entry in `user_data`")
        pixels, labels = _leaf_user(user_data[user], f"{path}: user {user!r}")
        if count is not None and count != len(labels):
            raise DataError(f"{path}: user {user!r} should have {count} samples and has {len(labels)}")
        yield user, pixels, check_labels(labels, path, classes)


def _leaf_user(sample: dict[str, Any], where: str) -> tuple[Pixels, Integers]:
    """One user's x (numbers in 0..1, 784 a sample) as bytes, and y."""
    try:
        x = np.asarray(sample.get("x"), np.float64)
        y = np.asarray(sample.get("y"), np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{where}: x and y are not arrays of numbers ({error})") from error
    if y.ndim != 1 or (x.shape != (len(y), _LEAF_PIXELS) and x.size + y.size):
        raise DataError(f"{where}: x of shape {x.shape} and y of shape {y.shape}; (n, {_LEAF_PIXELS}) and (n,) wanted")
    if not ((x >= 0) & (x <= 1)).all():
        raise DataError(f"{where}: pixels outside 0..1")
    if not ((np.abs(y) < 1 << 31) & (y == np.rint(y))).all():
        raise DataError(f"{where}: labels that are no whole numbers")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28), y.astype(np.int64)


def npz_names(path: Path) -> list[str]:
    """The names of the arrays in an .npz."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # zipfile raises a dozen kinds of errors for damaged bytes
        raise DataError(f"{path}: not a usable .npz ({str(error) or type(error).__name__})") from error


def read_npz(path: Path, names: tuple[str, ...], limit: int = LARGEST_FILE) -> dict[str, npt.NDArray[Any]]:
    """The named arrays of an .npz, each at most `limit` bytes."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name: _npz_member(archive, f"{name}.npy", limit) for name in names}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # zipfile and numpy raise a dozen kinds of errors for damaged bytes
        raise DataError(f"{path}: not a usable .npz ({str(error) or type(error).__name__})") from error


def _npz_member(archive: zipfile.ZipFile, name: str, limit: int) -> npt.NDArray[Any]:
    """One array, built from its header and bytes alone: no object, and no size that is not really there."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise ValueError(f"it has no array {name.removesuffix('.npy')!r}") from None
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed in a way that numpy does not write")
    if info.file_size > limit:
        raise ValueError(f"{name} has {info.file_size} bytes, more than {limit}")
    data = archive.read(info)
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = header(stream)
    if dtype.kind not in "iufU":
        raise ValueError(f"{name} holds {dtype}, not numbers or text")
    if math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise ValueError(f"{name} announces shape {shape} and has {len(data) - stream.tell()} bytes")
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape, order="F" if fortran else "C")
