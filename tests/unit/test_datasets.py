"""Datasets: found where they should be, read from every layout, refused with a reason when they are bad."""

import gzip
import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_node import config
from spark_node.data import catalogue, formats, lookup
from spark_node.data.catalogue import Download, File
from spark_node.data.datasets import NAMES, Dataset, load, locate, verify
from spark_node.errors import DataError

FUZZ = settings(max_examples=40, deadline=None)
HERE = Path("file")


@pytest.fixture(autouse=True)
def nothing_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No environment, no Debian package, an empty cache: each test makes what it needs."""
    monkeypatch.delenv("SPARK_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fashion = replace(catalogue.ENTRIES["fashion-mnist"], system_folder=str(tmp_path / "debian"))
    monkeypatch.setitem(catalogue.ENTRIES, "fashion-mnist", fashion)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


def idx(array: np.ndarray) -> bytes:
    code = {"uint8": 0x08, "int32": 0x0C}[array.dtype.name]
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def mnist_files(train: int = 12, test: int = 5) -> dict[str, bytes]:
    """Small files in MNIST's layout: sample n has label n % 10 and shows n everywhere."""
    files = {}
    for prefix, count in (("train", train), ("t10k", test)):
        numbers = np.arange(count, dtype=np.uint8)
        files[f"{prefix}-images-idx3-ubyte"] = idx(np.tile(numbers[:, None, None], (1, 28, 28)))
        files[f"{prefix}-labels-idx1-ubyte"] = idx(numbers % 10)
    return files


def qmnist_files(train: int = 12, test: int = 5, extra: int = 3) -> dict[str, bytes]:
    files = {}
    for part, count in (("train", train), ("test", test)):
        rows = np.zeros((count + extra, 8), np.int32)
        rows[:, 0] = np.arange(count + extra) % 10
        rows[:, 2] = 1000 + np.arange(count + extra) // 3
        files[f"qmnist-{part}-labels-idx2-int"] = idx(rows)
    return files


def cifar_files(each: int = 2) -> dict[str, bytes]:
    files = {}
    for number, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        records = np.full((each, 3073), number, np.uint8)
        records[:, 1:1025] = 200
        files[name] = records.tobytes()
    return files


def leaf(users: dict[str, list[int]], shade: float = 1.0) -> bytes:
    data = {user: {"x": [[shade] * 784 for _ in labels], "y": labels} for user, labels in users.items()}
    counts = [len(labels) for labels in users.values()]
    return json.dumps({"users": list(users), "num_samples": counts, "user_data": data}).encode()


def femnist_arrays(**changes: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {
        "x": np.full((4, 28, 28), 255, np.uint8),
        "y": np.array([0, 61, 5, 6], np.uint8),
        "writer": np.array([1, 0, 0, 1], np.uint16),
        "split": np.array([0, 0, 1, 0], np.uint8),
        "writer_ids": np.array(["f0001", "f0002"]),
    }
    return arrays | changes


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def load_small(name: str, folder: Path | None = None) -> Dataset:
    return load(name, folder, verify=False)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


class TestDigits:
    def test_are_embedded_and_split_by_class(self, digits: Dataset) -> None:
        assert digits.shape == (1, 8, 8)
        assert digits.scale == 16
        assert (len(digits.train), len(digits.test)) == (1438, 359)
        assert np.bincount(digits.test.labels).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
        assert digits.train.pixels.dtype == np.uint8
        assert digits.train.pixels.max() == 16

    def test_split_never_changes(self, digits: Dataset) -> None:
        digest = hashlib.sha256(digits.test.pixels.tobytes()).hexdigest()
        assert digest[:16] == "aff475b4f6819ac2"

    def test_standardise_to_zero_mean_and_unit_deviation(self, digits: Dataset) -> None:
        x = digits.standardise(digits.train.pixels)
        assert tuple(x.shape) == (1438, 1, 8, 8)
        assert str(x.dtype) == "torch.float32"
        assert abs(float(x.mean())) < 1e-3
        assert abs(float(x.std()) - 1) < 1e-3


class TestMnist:
    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize("dotted", [True, False])
    def test_is_read_under_each_of_its_names(self, tmp_path: Path, packed: bool, dotted: bool) -> None:
        for name, content in mnist_files().items():
            name = name.replace("-idx", ".idx") if dotted else name
            put(tmp_path, {f"{name}.gz": gzip.compress(content)} if packed else {name: content})
        mnist = load_small("mnist", tmp_path)
        assert mnist.train.pixels.shape == (12, 1, 28, 28)
        assert mnist.train.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
        assert mnist.train.labels.dtype == np.int64
        assert mnist.train.pixels[7].min() == mnist.train.pixels[7].max() == 7
        assert len(mnist.test) == 5
        assert mnist.train.writers is None

    def test_standardises_by_the_published_constants(self, tmp_path: Path) -> None:
        mnist = load_small("mnist", put(tmp_path, mnist_files()))
        x = mnist.standardise(mnist.train.pixels[[0, 11]])
        assert float(x[0].mean()) == pytest.approx(-0.1307 / 0.3081, rel=1e-5)
        assert float(x[1].mean()) == pytest.approx((11 / 255 - 0.1307) / 0.3081, rel=1e-5)

    def test_standardise_refuses_another_shape(self, tmp_path: Path) -> None:
        mnist = load_small("mnist", put(tmp_path, mnist_files()))
        with pytest.raises(ValueError, match="shape"):
            mnist.standardise(np.zeros((2, 28, 28), np.uint8))

    @pytest.mark.parametrize(
        ("name", "change", "problem"),
        [
            ("train-images-idx3-ubyte", lambda b: b[:-1], "bytes announced"),
            ("train-images-idx3-ubyte", lambda b: b + b"x", "bytes announced"),
            ("train-images-idx3-ubyte", lambda b: b[:9], "ends inside its header"),
            ("train-images-idx3-ubyte", lambda b: b"\0\0\x08\x01" + b[4:], "magic 00000803 wanted, 00000801"),
            ("train-images-idx3-ubyte", lambda b: idx(np.zeros((3, 27, 28), np.uint8)), r"\(27, 28\)"),
            ("train-images-idx3-ubyte", lambda b: idx(np.zeros((0, 28, 28), np.uint8)), "no samples"),
            ("train-labels-idx1-ubyte", lambda b: idx(np.array([1, 10], np.uint8)), "label 10 of sample 1"),
            ("t10k-labels-idx1-ubyte", lambda b: idx(np.zeros(6, np.uint8)), "6 labels for 5 images"),
            ("t10k-labels-idx1-ubyte", lambda b: gzip.compress(b)[:-9], "cut off or damaged"),
            ("t10k-labels-idx1-ubyte", lambda b: b"", "magic"),
        ],
    )
    def test_bad_file_is_named_with_the_command_that_mends_it(
        self, tmp_path: Path, name: str, change: Any, problem: str
    ) -> None:
        files = mnist_files()
        put(tmp_path, files | {name: change(files[name])})
        with pytest.raises(DataError, match=problem) as caught:
            load_small("mnist", tmp_path)
        assert str(tmp_path / name) in str(caught.value)
        assert f"run: spark-dfl data fetch mnist --folder {tmp_path}" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_unofficial_content_is_refused_with_both_digests(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"sha256 ba891046e650 expected, [0-9a-f]{12} found; 9424 of"):
            load("mnist", put(tmp_path, mnist_files()))

    def test_swollen_file_is_refused_before_it_is_held(self, tmp_path: Path) -> None:
        bomb = gzip.compress(bytes(60_000_000), 1)
        put(tmp_path, mnist_files() | {"train-images-idx3-ubyte.gz": bomb})
        with pytest.raises(DataError, match="more than the 47040016 bytes"):
            load("mnist", tmp_path)

    def test_mix_up_with_another_dataset_is_recognised(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        other = mnist_files()
        files = tuple(File(n, len(b), hashlib.sha256(b).hexdigest()) for n, b in other.items())
        entry = replace(catalogue.ENTRIES["fashion-mnist"], downloads=(Download("x", (), files),))
        monkeypatch.setitem(catalogue.ENTRIES, "fashion-mnist", entry)
        with pytest.raises(DataError, match="it is a file of fashion-mnist"):
            load("mnist", put(tmp_path, other))
        assert len(load("fashion-mnist", tmp_path).train) == 12
        assert [check.ok for check in verify("fashion-mnist", tmp_path)] == [True] * 4
        assert [check.ok for check in verify("mnist", tmp_path)] == [False] * 4

    def test_unreadable_file_is_a_data_error(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="cannot be read"):
            formats.read(tmp_path)


class TestMnistWriters:
    def test_writers_come_from_qmnist_beside_mnist(self, tmp_path: Path) -> None:
        put(tmp_path / "mnist", mnist_files())
        put(tmp_path / "mnist-writers", qmnist_files())
        for folder in (tmp_path, tmp_path / "mnist-writers"):
            dataset = load_small("mnist-writers", folder)
            assert dataset.train.writers is not None
            assert dataset.train.writers.tolist() == [1000 + n // 3 for n in range(12)]
            assert dataset.test.writers is not None
            assert len(dataset.test.writers) == 5

    def test_labels_that_do_not_align_are_refused(self, tmp_path: Path) -> None:
        files = qmnist_files()
        rows = np.zeros((12, 8), np.int32)
        put(tmp_path, mnist_files() | files | {"qmnist-train-labels-idx2-int": idx(rows)})
        with pytest.raises(DataError, match="class of sample 1 is not MNIST's label"):
            load_small("mnist-writers", tmp_path)

    def test_too_few_rows_are_refused(self, tmp_path: Path) -> None:
        put(tmp_path, mnist_files() | qmnist_files(extra=-1))
        with pytest.raises(DataError, match=r"\(11, 8\) instead of at least \(12, 8\)"):
            load_small("mnist-writers", tmp_path)


class TestCifar10:
    @pytest.mark.parametrize("inside", [".", "cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
    def test_is_read_from_its_binary_batches(self, tmp_path: Path, inside: str) -> None:
        put(tmp_path / inside, cifar_files())
        cifar = load_small("cifar10", tmp_path)
        assert cifar.train.pixels.shape == (10, 3, 32, 32)
        assert cifar.train.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert cifar.test.labels.tolist() == [5, 5]
        assert cifar.test.pixels[0, :, 0, 0].tolist() == [200, 5, 5]
        x = cifar.standardise(cifar.test.pixels)
        assert float(x[0, 0].mean()) == pytest.approx((200 / 255 - 0.4914) / 0.2470, rel=1e-5)
        assert float(x[0, 2].mean()) == pytest.approx((5 / 255 - 0.4465) / 0.2616, rel=1e-5)

    def test_broken_record_and_bad_label_are_refused(self, tmp_path: Path) -> None:
        files = cifar_files()
        put(tmp_path, files | {"data_batch_3.bin": files["data_batch_3.bin"][:-1]})
        with pytest.raises(DataError, match=r"data_batch_3.bin: 6145 bytes are not"):
            load_small("cifar10", tmp_path)
        put(tmp_path, files | {"test_batch.bin": bytes([10]) * 3073})
        with pytest.raises(DataError, match=r"label 10 of sample 0 is outside 0..9"):
            load_small("cifar10", tmp_path)

    def test_pickled_version_is_never_read(self, tmp_path: Path) -> None:
        put(tmp_path / "cifar-10-batches-py", {"data_batch_1": b"\x80\x04N."})
        with pytest.raises(DataError, match="cifar10 not found"):
            load("cifar10", tmp_path)


class TestFemnist:
    def test_is_read_from_leaf_json(self, tmp_path: Path) -> None:
        put(
            tmp_path / "data/train",
            {"a.json": leaf({"w2": [1, 2]}), "b.json": leaf({"w1": [3], "w0": []}, 0.2)},
        )
        put(tmp_path / "data/test", {"a.json": leaf({"w2": [61], "w3": [0]})})
        femnist = load("femnist", tmp_path)
        assert femnist.classes == 62
        assert femnist.train.labels.tolist() == [1, 2, 3]
        assert femnist.train.pixels[:, 0, 0, 0].tolist() == [255, 255, 51]
        assert femnist.train.writers is not None
        assert femnist.train.writers.tolist() == [2, 2, 1]
        assert femnist.test.writers is not None
        assert femnist.test.writers.tolist() == [2, 3]
        assert verify("femnist", tmp_path)[0].ok

    def test_is_read_from_an_npz(self, tmp_path: Path) -> None:
        np.savez_compressed(tmp_path / "femnist_small.npz", **femnist_arrays())
        femnist = load("femnist", tmp_path)
        assert femnist.train.labels.tolist() == [0, 61, 6]
        assert femnist.train.pixels.shape == (3, 1, 28, 28)
        assert femnist.train.writers is not None
        assert femnist.train.writers.tolist() == [1, 0, 1]
        assert femnist.test.labels.tolist() == [5]

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"y": np.array([0, 62, 5, 6])}, "label 62 of sample 1 is outside 0..61"),
            ({"y": np.array([0, -1, 5, 6])}, "label -1"),
            ({"y": np.zeros(3, np.uint8)}, "x is uint8 of shape"),
            ({"x": np.ones((4, 28, 28))}, "x is float64"),
            ({"writer": np.array([0, 1, 2, 0])}, "writer outside writer_ids, which has 2"),
            ({"writer": np.zeros(4)}, "writer is not one whole number a sample"),
            ({"split": np.array([0, 1, 2, 0])}, "split has values other than 0"),
            ({"split": np.zeros(4, int)}, "no sample has split 1"),
            ({"writer_ids": np.array([{}, {}], object)}, "not a usable .npz"),
        ],
    )
    def test_bad_npz_is_refused(self, tmp_path: Path, change: dict[str, Any], problem: str) -> None:
        np.savez(tmp_path / "femnist.npz", **femnist_arrays(**change))
        with pytest.raises(DataError, match=problem) as caught:
            load("femnist", tmp_path)
        assert "LEAF" in str(caught.value)

    def test_several_npz_are_ambiguous(self, tmp_path: Path) -> None:
        put(tmp_path, {"femnist_a.npz": b"", "femnist_b.npz": b""})
        with pytest.raises(DataError, match=r"several archives, femnist_a.npz, femnist_b.npz; keep one"):
            load("femnist", tmp_path)

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"[" * 100_000, "not JSON"),
            (b"\xff\xfe", "not JSON"),
            (b"[]", "not a LEAF file"),
            (b'{"users": ["a"], "user_data": {}}', "user 'a' has no entry"),
            (b'{"users": ["a"], "num_samples": [], "user_data": {}}', "one number for each of the 1 users"),
            (
                b'{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [], "y": []}}}',
                "2 samples and has 0",
            ),
            (b'{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [1]}}}', r"x of shape \(1, 1\)"),
            (b'{"users": ["a"], "user_data": {"a": {"x": [{}], "y": [1]}}}', "not arrays of numbers"),
            (leaf({"a": [1]}, 1.5), "pixels outside 0..1"),
            (leaf({"a": [62]}), "label 62"),
            (leaf({"a": [0.5]}), "no whole numbers"),  # type: ignore[list-item]
            (leaf({}), "holds no samples"),
        ],
    )
    def test_bad_leaf_file_is_refused(self, tmp_path: Path, content: bytes, problem: str) -> None:
        put(tmp_path / "train", {"a.json": content})
        put(tmp_path / "test", {"a.json": leaf({"a": [1]})})
        with pytest.raises(DataError, match=problem) as caught:
            load("femnist", tmp_path)
        assert str(tmp_path / "train") in str(caught.value)


class TestLookUp:
    def test_order_is_variable_then_package_then_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPARK_DATA", str(tmp_path / "root"))
        places = locate("fashion-mnist")
        assert [place.origin for place in places] == ["SPARK_DATA", "package dataset-fashion-mnist", "cache"]
        assert [place.path for place in places] == [
            tmp_path / "root",
            tmp_path / "debian",
            tmp_path / "cache/spark-dfl/data/fashion-mnist",
        ]
        assert not any(place.found for place in places)
        put(places[2].path, mnist_files(train=3))
        assert len(load_small("fashion-mnist").train) == 3
        put(places[1].path, mnist_files(train=2))
        assert len(load_small("fashion-mnist").train) == 2
        put(places[0].path / "fashion-mnist", mnist_files(train=1))
        assert len(load_small("fashion-mnist").train) == 1

    def test_variable_may_name_a_root_or_the_files_themselves(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SPARK_DATA", str(tmp_path))
        put(tmp_path, mnist_files(train=3))
        assert len(load_small("mnist").train) == 3
        put(tmp_path / "mnist", mnist_files(train=4))
        assert len(load_small("mnist").train) == 4

    def test_folder_given_is_the_only_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPARK_DATA", str(put(tmp_path / "good", mnist_files())))
        with pytest.raises(DataError, match=r"looked in .*/empty") as caught:
            load_small("mnist", tmp_path / "empty")
        assert "good" not in str(caught.value)

    def test_what_is_missing_says_where_it_looked_and_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(DataError) as caught:
            load("fashion-mnist")
        message = str(caught.value)
        assert str(tmp_path / "debian") in message
        assert str(tmp_path / "cache/spark-dfl/data/fashion-mnist") in message
        assert "spark-dfl data fetch fashion-mnist (or: apt-get install dataset-fashion-mnist)" in message

    def test_incomplete_place_says_what_it_lacks(self, tmp_path: Path) -> None:
        files = mnist_files()
        del files["t10k-labels-idx1-ubyte"]
        with pytest.raises(DataError, match="which lacks t10k-labels-idx1-ubyte"):
            load("mnist", put(tmp_path, files))

    def test_damage_in_the_package_is_mended_by_the_package_manager(self, tmp_path: Path) -> None:
        put(tmp_path / "debian", mnist_files())
        with pytest.raises(DataError, match="apt-get install --reinstall dataset-fashion-mnist"):
            load("fashion-mnist")

    def test_damage_in_the_cache_is_mended_by_a_plain_fetch(self, tmp_path: Path) -> None:
        put(lookup.cache_folder(catalogue.entry("mnist")), mnist_files())
        with pytest.raises(DataError, match=r"run: spark-dfl data fetch mnist$"):
            load("mnist")

    def test_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(DataError, match=r"unknown dataset 'minst'; did you mean mnist.*digits, fashion-mnist"):
            load("minst")

    def test_names_are_those_of_the_configuration(self) -> None:
        assert set(NAMES) == set(config.DATASETS)


class TestArbitraryBytes:
    """Whatever a file holds, the answer is a dataset or a DataError."""

    @FUZZ
    @given(data=st.binary(max_size=64), dims=st.integers(1, 3), of_int32=st.booleans(), headed=st.booleans())
    def test_idx(self, data: bytes, dims: int, of_int32: bool, headed: bool) -> None:
        head = bytes([0, 0, 0x0C if of_int32 else 0x08, dims]) if headed else b""
        with suppress(DataError):
            assert formats.parse_idx(head + data, HERE, dims, of_int32=of_int32).ndim == dims

    @FUZZ
    @given(shape=st.tuples(*[st.integers(0, 4)] * 3), cut=st.integers(-3, 3))
    def test_idx_round_trip(self, shape: tuple[int, int, int], cut: int) -> None:
        array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
        data = idx(array)
        data = data + bytes(cut) if cut >= 0 else data[:cut]
        if cut == 0 and array.size:
            assert np.array_equal(formats.parse_idx(data, HERE, 3), array)
        else:
            with pytest.raises(DataError):
                formats.parse_idx(data, HERE, 3)

    @FUZZ
    @given(data=st.binary(max_size=200), packed=st.booleans(), at=st.integers(0, 300), to=st.integers(0, 255))
    def test_gzip(self, scratch: Path, data: bytes, packed: bool, at: int, to: int) -> None:
        content = bytearray(gzip.compress(data) if packed else b"\x1f\x8b" + data)
        content[at % len(content)] = to
        (scratch / "file.gz").write_bytes(content)
        with suppress(DataError):
            assert len(formats.read(scratch / "file.gz", limit=1000)) <= 1000

    @FUZZ
    @given(
        changes=st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4),
        data=st.binary(max_size=99),
    )
    def test_npz(self, scratch: Path, changes: list[tuple[int, int]], data: bytes) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, indices=np.arange(5), offsets=np.array([0, 5]))
        content = bytearray(buffer.getvalue()) if changes else bytearray(data)
        for at, to in changes:
            content[at % len(content)] = to
        (scratch / "file.npz").write_bytes(content)
        with suppress(DataError):
            arrays = formats.read_npz(scratch / "file.npz", ("indices", "offsets"))
            assert set(arrays) == {"indices", "offsets"}

    def test_npz_that_announces_more_than_it_holds(self, tmp_path: Path) -> None:
        header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(117) + b"\n"
        with zipfile.ZipFile(tmp_path / "file.npz", "w") as archive:
            archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
        with pytest.raises(DataError, match="announces shape"):
            formats.read_npz(tmp_path / "file.npz", ("x",))

    def test_npz_larger_than_the_bound(self, tmp_path: Path) -> None:
        np.savez_compressed(tmp_path / "file.npz", x=np.zeros(10_000))
        with pytest.raises(DataError, match="more than 1000"):
            formats.read_npz(tmp_path / "file.npz", ("x",), limit=1000)

    @FUZZ
    @given(data=st.binary(max_size=40), repeats=st.integers(1, 200))
    def test_cifar(self, data: bytes, repeats: int) -> None:
        for content in (data * repeats, (data + bytes(3073))[:3073]):
            with suppress(DataError):
                pixels, labels = formats.parse_cifar(content, HERE, 10)
                assert len(pixels) == len(labels)

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xya"), inner, max_size=3),
        max_leaves=8,
    )

    @FUZZ
    @given(
        x=json_values,
        y=json_values,
        users=json_values | st.just(["a"]),
        user_data=json_values | st.none(),
        counts=json_values | st.just([1]),
    )
    def test_leaf(self, x: Any, y: Any, users: Any, user_data: Any, counts: Any) -> None:
        data = {"a": {"x": x, "y": y}} if user_data is None else user_data
        content = json.dumps({"users": users, "user_data": data, "num_samples": counts}).encode()
        with suppress(DataError):
            for _, pixels, labels in formats.parse_leaf(content, HERE, 62):
                assert len(pixels) == len(labels)

    arrays = st.builds(
        lambda dtype, shape, value: np.full(shape, value).astype(dtype),
        st.sampled_from(["u1", "i8", "u8", "f4", "U2", "O", "?", "c8"]),
        st.sampled_from([(), (0,), (4,), (3,), (2, 2), (4, 28, 28), (4, 784), (0, 28, 28)]),
        st.sampled_from([0, 1, 7, 100]),
    )

    @FUZZ
    @given(changes=st.dictionaries(st.sampled_from(["x", "y", "writer", "split", "writer_ids"]), arrays))
    def test_femnist_npz(self, scratch: Path, changes: dict[str, np.ndarray]) -> None:
        np.savez(scratch / "femnist.npz", **femnist_arrays(**changes))
        with suppress(DataError):
            dataset = load("femnist", scratch)
            assert len(dataset.train.pixels) == len(dataset.train.labels)

    @FUZZ
    @given(name=st.sampled_from(sorted(mnist_files())), at=st.integers(0), content=st.binary(max_size=20))
    def test_mnist(self, scratch: Path, name: str, at: int, content: bytes) -> None:
        files = mnist_files()
        at %= len(files[name])
        put(scratch / "mnist", files | {name: files[name][:at] + content + files[name][at + len(content) :]})
        with suppress(DataError):
            assert len(load_small("mnist", scratch).train) == 12


class TestRealFiles:
    """The official files, where this machine has them."""

    DEBIAN = Path("/usr/share/datasets/fashion-mnist")
    ROOT = os.environ.get("SPARK_DATA", "")

    def real(self, name: str) -> Dataset:
        if not self.ROOT or not any(place.found for place in locate(name, Path(self.ROOT))):
            pytest.skip(f"SPARK_DATA does not lead to {name}")
        return load(name, Path(self.ROOT))

    def measured(self, dataset: Dataset) -> None:
        """The constants are those of the whole training set, to four digits."""
        for channel, (mean, std) in enumerate(zip(dataset.mean, dataset.std, strict=True)):
            pixels = dataset.train.pixels[:, channel]
            first = pixels.sum(dtype=np.int64) / pixels.size
            second = np.square(pixels, dtype=np.uint16).sum(dtype=np.int64) / pixels.size
            assert first / dataset.scale == pytest.approx(mean, abs=1e-4)
            assert np.sqrt(second - first**2) / dataset.scale == pytest.approx(std, abs=1e-4)

    @pytest.mark.skipif(not DEBIAN.is_dir(), reason="dataset-fashion-mnist is not installed")
    def test_fashion_mnist_of_debian(self) -> None:
        dataset = load("fashion-mnist", self.DEBIAN)
        assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
        self.measured(dataset)

    def test_mnist_with_writers(self) -> None:
        dataset = self.real("mnist-writers")
        assert dataset.train.writers is not None
        assert len(np.unique(dataset.train.writers)) == 539
        self.measured(dataset)

    def test_cifar10(self) -> None:
        dataset = self.real("cifar10")
        assert np.bincount(dataset.train.labels).tolist() == [5000] * 10
        self.measured(dataset)

    def test_femnist(self) -> None:
        dataset = self.real("femnist")
        assert dataset.classes == 62
        assert dataset.train.pixels.mean() > 200  # a white background, as LEAF has it


def test_digits_are_those_of_scikit_learn_and_do_not_import_it() -> None:
    loaded = "import sys; from spark_node.data.datasets import load; load('digits'); print('sklearn' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "False"
    from sklearn.datasets import load_digits

    expected, dataset = load_digits(), load("digits")
    pixels = np.concatenate([dataset.train.pixels, dataset.test.pixels]).reshape(-1, 64)
    labels = np.concatenate([dataset.train.labels, dataset.test.labels])
    ours = sorted(map(tuple, np.column_stack([pixels, labels]).tolist()))
    assert ours == sorted(map(tuple, np.column_stack([expected.data, expected.target]).astype(int).tolist()))
