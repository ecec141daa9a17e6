"""A dataset of one's own as an .npz: what it may hold, and what is refused in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_node import config as configuration
from spark_node.cli.main import main
from spark_node.data.datasets import load
from spark_node.data.own import moments
from spark_node.data.partitions import partition
from spark_node.errors import DataError
from spark_node.launch.samples import peer_samples

X = np.random.default_rng(0).normal(5, 3, (50, 4))
Y = np.arange(50) % 2


def written(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "mine.npz", **{"x": X, "y": Y, **arrays})
    return f"file:{folder / 'mine.npz'}"


def test_rows_are_standardised_by_feature_and_a_fifth_of_each_class_is_held_out(tmp_path: Path) -> None:
    found = load(written(tmp_path))
    assert (len(found.train), len(found.test), found.classes, found.shape) == (40, 10, 2, (4,))
    assert found.test.labels.sum() == 5
    x = found.standardise(found.train.pixels)
    assert np.allclose(x.mean(0), 0, atol=1e-5)
    assert np.allclose(x.std(0, correction=0), 1, atol=1e-5)


def test_a_test_set_of_ones_own_is_taken_as_it_is(tmp_path: Path) -> None:
    found = load(written(tmp_path, x_test=X[:7], y_test=Y[:7] + 1))
    assert (len(found.train), len(found.test), found.classes) == (50, 7, 3)
    assert np.array_equal(found.test.pixels, X[:7].astype(np.float32))


@pytest.mark.parametrize("shape", [(6, 6), (1, 6, 6), (3, 6, 6)])
def test_images_of_bytes_are_standardised_by_channel(tmp_path: Path, shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (50, *shape), dtype=np.uint8)
    found = load(written(tmp_path, x=pixels))
    channels = shape[0] if len(shape) == 3 else 1
    assert found.shape == (channels, 6, 6)
    assert (len(found.mean), found.scale) == (channels, 255.0)
    assert abs(float(found.standardise(found.train.pixels).mean())) < 1e-4


def test_moments_are_numpys_and_what_never_varies_is_left_as_it_is() -> None:
    x = np.concatenate([X, np.full((50, 1), 1e4)], 1).astype(np.float32)
    mean, std = moments(x, 2.0)
    assert np.allclose(mean, x.mean(0, dtype=np.float64) / 2)
    assert np.allclose(std[:4], x[:, :4].std(0, dtype=np.float64) / 2)
    assert std[4] == 1


def test_writers_make_a_partition(tmp_path: Path) -> None:
    found = load(written(tmp_path, writer=np.arange(50) // 5))
    dealt = partition("writer", found, 4)
    assert found.train.writers is not None
    owners = [set(found.train.writers[own]) for own in dealt.indices]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 10


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown array": ({"labels": Y}, "'labels' is not known"),
    "half a test set": ({"x_test": X}, "has no array 'y_test'"),
    "labels of another number": ({"y": Y[:9]}, "a whole number for each of 50"),
    "labels that are floats": ({"y": Y / 2}, "a whole number for each of 50"),
    "labels below 0": ({"y": Y - 1}, "whole numbers from 0 on"),
    "one class": ({"y": Y * 0}, "2 to 65536 classes"),
    "objects": ({"y": np.array([{}] * 50, object)}, "not a usable .npz"),
    "entries that are not finite": ({"x": X * np.inf}, "not finite"),
    "one axis": ({"x": X[:, 0]}, "expected [N, features]"),
    "nothing": ({"x": X[:0], "y": Y[:0]}, "expected [N, features]"),
    "a test set of another shape": ({"x_test": X[:, :2], "y_test": Y}, "make them alike"),
    "a deviation of nothing": ({"mean": 0.0, "std": 0.0}, "above 0"),
    "a mean of another length": ({"mean": [1.0, 2.0], "std": 1.0}, "1 or 4 finite numbers"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_wrong_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    arrays, said = WRONG[what]
    with pytest.raises(DataError) as caught:
        load(written(tmp_path, **arrays))
    assert said in str(caught.value)
    assert "mine.npz" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["file:nowhere.npz", "file:/dev/null", "file:."])
def test_what_is_no_file_is_bad_usage(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dataset", name, "--quiet", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_noise_with_a_guarantee_needs_constants_that_were_not_computed_from_the_samples(tmp_path: Path) -> None:
    config = configuration.load(flags={"privacy.noise": 1.0})
    with pytest.raises(DataError, match="put arrays `mean` and `std`"):
        peer_samples(config, "peer-000", load(written(tmp_path)), np.arange(3))
    given = load(written(tmp_path, mean=5.0, std=3.0))
    assert peer_samples(config, "peer-000", given, np.arange(3)).inputs.shape == (3, 4)


def test_it_trains_from_the_command_line(tmp_path: Path) -> None:
    words = ["--dataset", written(tmp_path), "--nodes", "4", "--degree", "2", "--rounds", "2", "--quiet"]
    assert main(["run", *words, "--out", str(tmp_path / "out"), "--no-report"]) == 0
    assert "mine.npz" in (tmp_path / "out" / "config.toml").read_text()
