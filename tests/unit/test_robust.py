"""Averages that a few liars cannot bend, and packages that must agree with themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from spark_node.config import RobustSettings, load
from spark_node.learning.jacobian import jacobian
from spark_node.learning.layers import FactoredLayer
from spark_node.learning.messages import Package
from spark_node.learning.robust import AVERAGES, agrees, average, screen
from spark_node.learning.spark import Spark
from spark_node.model import flatten

ROBUST = ("median", "trimmed-mean", "clipped")
SETTINGS = RobustSettings(trim=0.34)


def honest(n: int = 6, d: int = 40) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"p{i}": 1 + 0.1 * torch.randn(d, generator=generator, dtype=torch.float64) for i in range(n)}


@given(st.integers(1, 9), st.floats(0, 0.49), st.integers(0, 5))
def test_trimmed_mean_and_median_are_those_of_numpy(n: int, trim: float, seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(n, 7))
    settings = RobustSettings(trim=trim)
    found = AVERAGES["median"](torch.from_numpy(rows), 0, settings)
    np.testing.assert_allclose(found.numpy(), np.median(rows, axis=0))
    cut = min(int(np.ceil(trim * n)), (n - 1) // 2)
    expected = np.sort(rows, axis=0)[cut : n - cut].mean(0)
    np.testing.assert_allclose(AVERAGES["trimmed-mean"](torch.from_numpy(rows), 0, settings).numpy(), expected)


def test_clipped_gossip_by_its_definition() -> None:
    everyone = honest()
    names = sorted(everyone)
    rows = np.stack([everyone[name].numpy() for name in names])
    steps = rows - rows[2]
    lengths = np.linalg.norm(steps, axis=1)
    radius = np.sort(np.delete(lengths, 2))[2]  # the median of five
    expected = rows[2] + np.mean([s * min(1, radius / max(n, 1e-30)) for s, n in zip(steps, lengths, strict=True)], 0)
    found = average(everyone, names[2], RobustSettings(weights="clipped"))
    np.testing.assert_allclose(found.numpy(), expected)


@pytest.mark.parametrize("kind", ROBUST)
@pytest.mark.parametrize("lie", [1e6, -1e6, 37.0])
def test_one_liar_moves_a_robust_average_no_further_than_the_honest_are_apart(kind: str, lie: float) -> None:
    everyone = honest()
    settings = replace(SETTINGS, weights=kind)
    truth = average(everyone, "p0", settings)
    bent = average({**everyone, "p3": torch.full_like(truth, lie)}, "p0", settings)
    spread = max(float((a - b).norm()) for a in everyone.values() for b in everyone.values())
    assert float((bent - truth).norm()) < spread
    moved = average({**everyone, "p3": torch.full_like(truth, lie)}, "p0", replace(settings, weights="mean"))
    assert float((moved - truth).norm()) > 10 * spread, "the plain mean is bent, so the test can fail"


@pytest.mark.parametrize("kind", AVERAGES)
def test_peers_that_agree_keep_their_weights(kind: str) -> None:
    same = torch.linspace(-1, 1, 9, dtype=torch.float64)
    for n in (1, 2, 5):
        found = average({f"p{i}": same for i in range(n)}, "p0", replace(SETTINGS, weights=kind))
        torch.testing.assert_close(found, same)


@pytest.fixture(scope="module")
def packages() -> dict[str, Package]:
    """Five peers of a model that knows its data."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    centres = 3 * torch.randn(4, 8)
    optimiser = torch.optim.Adam(module.parameters(), 0.02)
    for _ in range(150):
        y = torch.randint(4, (64,))
        loss = nn.functional.cross_entropy(module(centres[y] + torch.randn(64, 8)), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    w = flatten(module)
    found = {}
    for i in range(5):
        y = torch.randint(4, (30,))
        x = centres[y] + torch.randn(30, 8)
        found[f"p{i}"] = Package(jacobian(module, w, x), y, at=w)
    return found


CHECKED = RobustSettings(packages=True)


def test_honest_packages_pass(packages: dict[str, Package]) -> None:
    assert all(agrees(package, 1e-4) for package in packages.values())
    assert screen(packages, "p0", CHECKED, "cross-entropy") == {}


def test_logits_that_are_not_the_factors_contradict_themselves(packages: dict[str, Package]) -> None:
    one = packages["p2"]
    lies = replace(one, jacobian=replace(one.jacobian, logits=-one.jacobian.logits))
    assert screen({**packages, "p2": lies}, "p0", CHECKED, "cross-entropy") == {"p2": "inconsistent"}


def test_flipped_labels_fit_nothing_that_is_known(packages: dict[str, Package]) -> None:
    lies = replace(packages["p4"], labels=3 - packages["p4"].labels)
    found = screen({**packages, "p4": lies}, "p0", CHECKED, "cross-entropy")
    assert set(found) == {"p4"}
    assert found["p4"] in ("loss", "influence")


def test_scaled_factors_pull_too_hard(packages: dict[str, Package]) -> None:
    one = packages["p1"]
    first = one.jacobian.layers[0]
    assert isinstance(first, FactoredLayer)
    scaled = replace(first, inputs=100 * first.inputs)
    lies = replace(one, jacobian=replace(one.jacobian, layers=(scaled, *one.jacobian.layers[1:])))
    assert screen({**packages, "p1": lies}, "p0", CHECKED, "cross-entropy") == {"p1": "influence"}


def test_a_peer_never_leaves_itself_out(packages: dict[str, Package]) -> None:
    lies = replace(packages["p4"], labels=3 - packages["p4"].labels)
    assert "p4" not in screen({**packages, "p4": lies}, "p4", CHECKED, "cross-entropy")


def test_spark_updates_without_the_packages_it_left_out(packages: dict[str, Package]) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x, y = torch.randn(30, 8), torch.randint(4, (30,))
    config = load(flags={"robust.packages": True, "learning.timesteps": [50]}, environment={})

    def update(others: dict[str, Package], checked: bool) -> Spark:
        chosen = config if checked else config.replace(robust__packages=False)
        learner = Spark(chosen, "p0", module, x, y)
        learner.w = packages["p1"].at if packages["p1"].at is not None else learner.w
        learner.incorporate("package", 1, others)
        return learner

    neighbours = {peer: packages[peer] for peer in ("p1", "p2", "p3")}
    one = packages["p4"]
    lies = replace(one, jacobian=replace(one.jacobian, logits=-one.jacobian.logits))
    with_liar = update({**neighbours, "p4": lies}, checked=True)
    assert with_liar.facts()["left_out_inconsistent"] == 1
    torch.testing.assert_close(with_liar.w, update(neighbours, checked=True).w)
    assert not torch.allclose(update({**neighbours, "p4": lies}, checked=False).w, with_liar.w)
