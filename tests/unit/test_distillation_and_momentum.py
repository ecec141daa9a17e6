"""Algorithm 2's schedule, Nesterov's sequence, the learning rate."""

import math

import pytest
import torch

from spark_node.config import DistillationSettings, LearningSettings
from spark_node.learning.distillation import schedule, target
from spark_node.learning.momentum import follow, step
from spark_node.learning.schedules import kernel, learning_rate

SETTINGS = DistillationSettings(r_warm=10, alpha_init=0.9, alpha_final=0.3, tau_init=1.5, tau_final=4.0)


@pytest.mark.parametrize("k", [1, 5, 10])
def test_the_warm_up_uses_hard_labels_only(k: int) -> None:
    assert schedule(SETTINGS, k, rounds=30) == (1.0, 1.0)


def test_the_schedule_meets_its_end_points_and_its_middle() -> None:
    alpha, tau = schedule(SETTINGS, 30, rounds=30)
    assert (alpha, tau) == (pytest.approx(0.3), pytest.approx(4.0))
    alpha, tau = schedule(SETTINGS, 20, rounds=30)
    assert (alpha, tau) == (pytest.approx(0.6), pytest.approx(2.75))
    alpha, tau = schedule(SETTINGS, 11, rounds=30)
    assert alpha == pytest.approx(0.3 + 0.3 * (1 + math.cos(math.pi / 20)))
    assert tau == pytest.approx(1.5 + 2.5 / 20)


def test_the_schedule_stays_at_its_end_after_the_last_round_and_survives_a_warm_up_of_all_rounds() -> None:
    assert schedule(SETTINGS, 99, rounds=30) == (pytest.approx(0.3), pytest.approx(4.0))
    assert schedule(SETTINGS, 10, rounds=10) == (1.0, 1.0)


def test_off_means_hard_labels_in_every_round() -> None:
    assert schedule(DistillationSettings(enabled=False), 29, rounds=30) == (1.0, 1.0)


def test_the_target_mixes_hard_labels_and_softened_predictions() -> None:
    hard = torch.tensor([[1.0, 0.0]])
    logits = torch.tensor([[0.0, 2 * math.log(3.0)]])
    assert torch.equal(target(hard, logits, 1.0, 1.0), hard)
    torch.testing.assert_close(target(hard, logits, 0.6, 2.0), torch.tensor([[0.6 + 0.4 * 0.25, 0.4 * 0.75]]))


def test_nesterov_follows_a_hand_written_sequence() -> None:
    """mu = 0.5, Delta = 1, 2, -1: v = 1, 2.5, 0.25; w = 0 + 0.5 + 1, + 1.25 + 2, + 0.125 - 1."""
    w, v = torch.zeros(1), torch.zeros(1)
    path = []
    for delta in (1.0, 2.0, -1.0):
        w, v = step("nesterov", 0.5, w, v, torch.tensor([delta]))
        path.append((float(w), float(v)))
    assert path == [(1.5, 1.0), (4.75, 2.5), (3.875, 0.25)]


def test_heavy_ball_and_off() -> None:
    w, v = step("heavy-ball", 0.5, torch.ones(1), torch.tensor([2.0]), torch.tensor([3.0]))
    assert (float(w), float(v)) == (5.0, 4.0)
    w, v = step("off", 0.5, torch.ones(1), torch.tensor([2.0]), torch.tensor([3.0]))
    assert (float(w), float(v)) == (4.0, 2.0)


def test_quasi_global_momentum_follows_a_hand_written_sequence() -> None:
    """mu = 0.5, consensus 1, 3, 4, Delta = 1: v = 0, 1, 1; w = 1 + 1, 3 + 0.5 + 1, 4 + 0.5 + 1."""
    v, before, path = torch.zeros(1), None, []
    for consensus in (1.0, 3.0, 4.0):
        now = torch.tensor([consensus])
        v = follow(0.5, v, before, now)
        w, same = step("quasi-global", 0.5, now, v, torch.ones(1))
        assert same is v
        path.append((float(w), float(v)))
        before = now
    assert path == [(2.0, 0.0), (4.5, 1.0), (5.5, 1.0)]


def test_quasi_global_momentum_of_a_lone_peer_ends_at_the_steps_of_heavy_ball() -> None:
    """Delta / (1 - mu) under a constant Delta, as v there; without neighbours the consensus is the peer's own model."""
    mu, delta = 0.9, torch.ones(1, dtype=torch.float64)
    w, v, before = torch.zeros_like(delta), torch.zeros_like(delta), None
    for _ in range(1500):
        v = follow(mu, v, before, w)
        before = w
        w, _ = step("quasi-global", mu, w, v, delta)
    assert float(w - before) == pytest.approx(1 / (1 - mu))


def test_the_learning_rate_decays_and_is_boosted_in_its_rounds() -> None:
    settings = LearningSettings(eta=0.01, eta_decay=0.07, eta_boost=2.0, eta_boost_rounds=(3,))
    assert learning_rate(settings, 1) == pytest.approx(0.01)
    assert learning_rate(settings, 3) == pytest.approx(0.02 * math.exp(-0.14))
    assert learning_rate(settings, 4) == pytest.approx(0.01 * math.exp(-0.21))


def test_the_decay_may_begin_later() -> None:
    settings = LearningSettings(eta=0.01, eta_decay=0.1, eta_hold=5)
    assert [learning_rate(settings, k) for k in (1, 6)] == [0.01, 0.01]
    assert learning_rate(settings, 8) == pytest.approx(0.01 * math.exp(-0.2))


def test_the_full_kernel_may_be_kept_for_the_first_rounds() -> None:
    settings = LearningSettings(kernel="trace", full_rounds=2)
    assert [kernel(settings, k) for k in (1, 2, 3)] == ["full", "full", "trace"]
