"""Partitions: who owns what, bounded, reproducible, and refused with a reason when they cannot be."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_node.data.datasets import Dataset, Samples
from spark_node.data.partitions import Partition, describe, partition
from spark_node.errors import DataError

FUZZ = settings(max_examples=60, deadline=None)


def dataset(size: int = 600, classes: int = 10, writers: list[int] | None = None) -> Dataset:
    """`size` samples without content; sample n has label n % classes."""
    labels = np.arange(size, dtype=np.int64) % classes
    who = None if writers is None else np.array(writers, np.int64)
    train = Samples(np.zeros((size, 1, 1, 1), np.uint8), labels, who)
    return Dataset("toy", train, train, classes, (1, 1, 1), (0.0,), (1.0,), 255.0)


def sizes(result: Partition) -> list[int]:
    return [len(own) for own in result.indices]


def same(one: Partition, other: Partition) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one.indices, other.indices, strict=True))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


def saved(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return f"file:{path}"


class TestIid:
    @FUZZ
    @given(size=st.integers(1, 200), nodes=st.integers(1, 50), most=st.integers(0, 20), seed=st.integers(0, 99))
    def test_shares_are_equal_disjoint_and_bounded(self, size: int, nodes: int, most: int, seed: int) -> None:
        if nodes > size:
            with pytest.raises(DataError, match=f"{nodes} peers are more than the {size} training samples"):
                partition("iid", dataset(size), nodes, samples_per_node=most, seed=seed)
            return
        result = partition("iid", dataset(size), nodes, samples_per_node=most, seed=seed)
        owned = np.concatenate(result.indices)
        assert len(result.indices) == nodes
        assert len(np.unique(owned)) == len(owned)
        assert max(sizes(result)) - min(sizes(result)) <= 1
        assert min(sizes(result)) == min(size // nodes, most or size)
        if most == 0:
            assert len(owned) == size

    def test_is_fixed_by_the_seed(self) -> None:
        data = dataset()
        assert same(partition("iid", data, 5, seed=1), partition("iid", data, 5, seed=1))
        assert not same(partition("iid", data, 5, seed=1), partition("iid", data, 5, seed=2))


class TestDirichlet:
    @FUZZ
    @given(
        alpha=st.floats(1e-8, 1e6),
        size=st.integers(20, 300),
        classes=st.integers(1, 12),
        nodes=st.integers(1, 20),
        budget=st.integers(0, 60),
        seed=st.integers(0, 99),
    )
    def test_each_node_draws_without_replacement_within_its_budget(
        self, alpha: float, size: int, classes: int, nodes: int, budget: int, seed: int
    ) -> None:
        data = dataset(size, classes)
        result = partition(f"dirichlet:{alpha}", data, nodes, samples_per_node=budget, seed=seed)
        assert len(result.indices) == nodes
        for own in result.indices:
            assert own.dtype == np.int64
            assert len(np.unique(own)) == len(own)
            assert 1 <= len(own) <= (budget or size // nodes)
            assert own.min() >= 0
            assert own.max() < size

    def test_counts_follow_the_paper(self) -> None:
        """About samples_per_node each, few classes where alpha is small, nodes overlapping."""
        data = dataset(60_000)
        result = partition("dirichlet:0.1", data, 300)
        figures = describe(result, data)
        assert 190 <= figures["samples_min"] <= figures["samples_max"] <= 200
        assert 3.5 < figures["classes_per_node_mean"] < 5
        assert 36_000 < figures["distinct_samples"] < 40_000

    def test_small_alpha_gives_fewer_classes_than_large(self) -> None:
        data = dataset(6000)
        few, many = (describe(partition(f"dirichlet:{a}", data, 30), data) for a in (0.05, 5))
        assert few["classes_per_node_mean"] < many["classes_per_node_mean"] - 3

    def test_what_a_node_owns_does_not_depend_on_how_many_there_are(self) -> None:
        data = dataset()
        few, many = (partition("dirichlet:0.5", data, nodes) for nodes in (3, 30))
        assert all(np.array_equal(a, b) for a, b in zip(few.indices, many.indices[:3], strict=True))

    def test_node_that_would_be_empty_gets_one_sample(self) -> None:
        assert sizes(partition("dirichlet:1e6", dataset(), 4, samples_per_node=5)) == [1, 1, 1, 1]

    def test_class_without_samples_is_passed_over(self) -> None:
        data = dataset(50, classes=2)
        wide = Dataset("wide", data.train, data.test, 10, data.shape, data.mean, data.std, data.scale)
        assert min(sizes(partition("dirichlet:0.01", wide, 40))) >= 1

    @FUZZ
    @given(
        alpha=st.floats(1e-8, 1e6),
        size=st.integers(1, 300),
        nodes=st.integers(1, 60),
        most=st.integers(0, 30),
        seed=st.integers(0, 99),
    )
    def test_disjoint_split_uses_no_sample_twice_and_leaves_no_node_empty(
        self, alpha: float, size: int, nodes: int, most: int, seed: int
    ) -> None:
        nodes = min(nodes, size)
        result = partition(f"dirichlet:{alpha}", dataset(size), nodes, samples_per_node=most, disjoint=True, seed=seed)
        owned = np.concatenate(result.indices)
        assert len(np.unique(owned)) == len(owned)
        assert min(sizes(result)) >= 1
        if most:
            assert max(sizes(result)) <= most
        else:
            assert len(owned) == size

    @pytest.mark.parametrize("disjoint", [True, False])
    def test_is_fixed_by_the_seed(self, disjoint: bool) -> None:
        one, again, other = (
            partition("dirichlet:0.3", dataset(), 6, disjoint=disjoint, seed=seed) for seed in (1, 1, 2)
        )
        assert same(one, again)
        assert not same(one, other)

    @pytest.mark.parametrize("alpha", ["0", "-1", "nan", "inf", "1e7", "a", "0.1:2", "०.०"])
    def test_alpha_that_is_no_positive_number_is_refused(self, alpha: str) -> None:
        with pytest.raises(DataError, match=f"'dirichlet:{alpha}': ALPHA is a number above 0"):
            partition(f"dirichlet:{alpha}", dataset(), 3)


class TestWriter:
    @FUZZ
    @given(writers=st.lists(st.integers(0, 30), min_size=1, max_size=200), nodes=st.integers(1, 31))
    def test_writers_stay_whole_and_are_all_dealt_out(self, writers: list[int], nodes: int) -> None:
        data = dataset(len(writers), writers=writers)
        if nodes > len(set(writers)):
            with pytest.raises(DataError, match=r"more than the \d+ (writers|training samples)"):
                partition("writer", data, nodes)
            return
        result = partition("writer", data, nodes)
        assert sorted(np.concatenate(result.indices).tolist()) == list(range(len(writers)))
        owners = [{writers[n] for n in own} for own in result.indices]
        assert sum(map(len, owners)) == len(set(writers))
        assert min(map(len, owners)) >= 1

    def test_loads_are_balanced(self) -> None:
        writers = [w for w in range(40) for _ in range(w + 1)]
        shares = sizes(partition("writer", dataset(len(writers), writers=writers), 8))
        assert max(shares) - min(shares) <= 10  # of 102 on average

    def test_seed_decides_between_writers_of_equal_size(self) -> None:
        data = dataset(60, writers=[n // 2 for n in range(60)])
        assert same(partition("writer", data, 5, seed=3), partition("writer", data, 5, seed=3))
        assert not same(partition("writer", data, 5, seed=3), partition("writer", data, 5, seed=4))

    def test_dataset_without_writers_is_refused(self) -> None:
        with pytest.raises(DataError, match="toy does not say who wrote what"):
            partition("writer", dataset(), 3)

    def test_more_peers_than_writers_says_how_many_there_are(self) -> None:
        with pytest.raises(DataError, match="5 peers are more than the 2 writers of toy"):
            partition("writer", dataset(6, writers=[1, 1, 1, 2, 2, 2]), 5)


class TestFile:
    def test_node_owns_its_slice_and_fewer_peers_take_the_first(self, tmp_path: Path) -> None:
        spec = saved(tmp_path / "p.npz", indices=np.array([5, 1, 5, 9], "u4"), offsets=np.array([0, 2, 3, 4], "u4"))
        assert [own.tolist() for own in partition(spec, dataset(10), 3).indices] == [[5, 1], [5], [9]]
        assert [own.tolist() for own in partition(spec, dataset(10), 2).indices] == [[5, 1], [5]]
        assert partition(spec, dataset(10), 1).indices[0].dtype == np.int64

    @pytest.mark.parametrize(
        ("indices", "offsets", "problem"),
        [
            ([1, 2, 3], [0, 1, 2, 3], "4 peers are more than the 3 in the file"),
            ([1, 2, 3, 10], [0, 1, 2, 3, 4], "index 10 is outside the training set of 10 samples"),
            ([1, 2, 3, -1], [0, 1, 2, 3, 4], "index -1 is outside"),
            ([1, 2, 3, 4], [0, 3, 2, 3, 4], "offsets fall after node 1"),
            ([1, 2, 3, 4], [0, 1, 2, 3, 5], "do not run from 0 to the 4 indices"),
            ([1, 2, 3, 4], [1, 1, 2, 3, 4], "do not run from 0"),
            ([1, 2, 3, 4], [0, 1, 1, 3, 4], "node 1 has no samples"),
            ([1.5, 2, 3, 4], [0, 1, 2, 3, 4], "indices is float64"),
            ([[1, 2], [3, 4]], [0, 1, 2, 3, 4], r"indices is int64 of shape \(2, 2\)"),
            (np.array([2**63], "u8"), [0, 1], "out of range"),
            (np.array([], int), [], "do not run"),
        ],
    )
    def test_bad_content_is_refused(self, tmp_path: Path, indices: Any, offsets: Any, problem: str) -> None:
        spec = saved(tmp_path / "p.npz", indices=np.array(indices), offsets=np.array(offsets, np.int64))
        with pytest.raises(DataError, match=problem) as caught:
            partition(spec, dataset(10), 4)
        assert "p.npz" in str(caught.value)

    def test_missing_file_or_array_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="cannot be read"):
            partition(f"file:{tmp_path}/none.npz", dataset(), 3)
        with pytest.raises(DataError, match="no array 'offsets'"):
            partition(saved(tmp_path / "p.npz", indices=np.arange(3)), dataset(), 3)

    def test_pickled_array_is_never_opened(self, tmp_path: Path) -> None:
        spec = saved(tmp_path / "p.npz", indices=np.array([{}], object), offsets=np.array([0, 1]))
        with pytest.raises(DataError, match="holds object"):
            partition(spec, dataset(), 1)

    @FUZZ
    @given(
        indices=st.lists(st.integers(-3, 12), max_size=6) | st.lists(st.floats(), max_size=3),
        offsets=st.lists(st.integers(-2, 7), max_size=6) | st.just([[0, 1]]),
        nodes=st.integers(1, 4),
    )
    def test_any_arrays_give_a_partition_or_a_data_error(
        self, scratch: Path, indices: Any, offsets: Any, nodes: int
    ) -> None:
        spec = saved(scratch / "p.npz", indices=np.array(indices), offsets=np.array(offsets))
        with suppress(DataError):
            result = partition(spec, dataset(10), nodes)
            assert len(result.indices) == nodes
            assert all(len(own) and 0 <= own.min() <= own.max() < 10 for own in result.indices)

    @FUZZ
    @given(content=st.binary(max_size=200), zipped=st.booleans())
    def test_any_bytes_give_a_partition_or_a_data_error(self, scratch: Path, content: bytes, zipped: bool) -> None:
        (scratch / "any.npz").write_bytes(b"PK\x03\x04" + content if zipped else content)
        with pytest.raises(DataError, match=r"any\.npz"):
            partition(f"file:{scratch}/any.npz", dataset(10), 2)


class TestRequest:
    @FUZZ
    @given(spec=st.text(max_size=12) | st.text(max_size=9).map("file:~".__add__) | st.text().map("dirichlet:".__add__))
    def test_any_text_gives_a_partition_or_a_data_error(self, spec: str) -> None:
        with suppress(DataError):
            assert len(partition(spec, dataset(), 3).indices) == 3

    @pytest.mark.parametrize(
        "spec", ["", "IID", "iid:", "dirichlet", "dirichlet:", "file:", "file:~\0", "writer:3", "shards"]
    )
    def test_unknown_spec_says_what_is_allowed(self, spec: str) -> None:
        with pytest.raises(DataError, match=r"unknown partition.* iid, dirichlet:ALPHA, writer or file:PATH"):
            partition(spec, dataset(), 3)

    @pytest.mark.parametrize("spec", ["iid", "dirichlet:1"])
    def test_counts_that_make_no_sense_are_refused(self, spec: str) -> None:
        with pytest.raises(DataError, match="needs at least one"):
            partition(spec, dataset(), 0)
        with pytest.raises(DataError, match="samples_per_node -1 is below 0"):
            partition(spec, dataset(), 3, samples_per_node=-1)
        with pytest.raises(DataError, match="7 peers are more than the 6 training samples of toy"):
            partition(spec, dataset(6), 7)


def test_describe_counts_samples_and_labels() -> None:
    data = dataset(20, classes=4)
    result = Partition("by hand", (np.array([0, 4, 8]), np.array([0, 1])))
    assert describe(result, data) == {
        "partition": "by hand",
        "nodes": 2,
        "samples_min": 2,
        "samples_mean": 2.5,
        "samples_max": 3,
        "distinct_samples": 4,
        "classes_per_node_mean": 1.5,
        "label_counts": [[3, 0, 0, 0], [1, 1, 0, 0]],
    }
