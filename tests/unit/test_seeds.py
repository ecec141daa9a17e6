"""The streams every random choice of a run comes from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_node.seeds import derive, stream

names = st.lists(st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=8), max_size=3).map(tuple)


@pytest.mark.parametrize(
    ("seed", "path", "value"),
    [
        (0, (), 0x796C696D6C7852D9386FC8FF66EBEC5F),
        (0, ("topology", "regular", 0), 0x3599E55658EFB359381E2794306F85A0),
        (7, ("data", "peer", 3), 0x332194B669175EF086B8B3736B399D55),
        (2**63 - 1, ("model",), 0x919C13A6C7A6CFED1DB38EA086363CDE),
    ],
)
def test_derived_seeds_are_pinned(seed: int, path: tuple[str | int, ...], value: int) -> None:
    assert derive(seed, *path) == value


def test_words_of_a_stream_are_pinned() -> None:
    words = stream(7, "topology", "regular", 3).bit_generator.random_raw(4)
    assert [int(word) for word in words] == [
        0x3C1B0E4FFB8DC9E,
        0x19357E2CE6AE7F2D,
        0x46329F665F15D35,
        0x4E374E1B2359F948,
    ]


@given(st.integers(0, 2**63 - 1), names)
def test_same_name_gives_the_same_stream_from_its_start(seed: int, path: tuple[str, ...]) -> None:
    assert derive(seed, *path) < 2**128
    first, second = stream(seed, *path), stream(seed, *path)
    assert np.array_equal(first.bit_generator.random_raw(8), second.bit_generator.random_raw(8))


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), names, names)
def test_other_seeds_or_names_give_other_streams(
    seed: int, other_seed: int, path: tuple[str, ...], other_path: tuple[str, ...]
) -> None:
    same = (seed, path) == (other_seed, other_path)
    assert (derive(seed, *path) == derive(other_seed, *other_path)) == same


def test_neighbouring_rounds_are_uncorrelated() -> None:
    draws = np.array([stream(0, "topology", "regular", round).random(2000) for round in range(20)])
    correlations = np.corrcoef(draws)[np.triu_indices(20, k=1)]
    assert np.abs(correlations).max() < 0.1


def test_drawing_from_one_stream_leaves_the_others_alone() -> None:
    untouched = stream(1, "b").bit_generator.random_raw(8)
    one, other = stream(1, "a"), stream(1, "b")
    one.bit_generator.random_raw(1000)
    assert np.array_equal(other.bit_generator.random_raw(8), untouched)
