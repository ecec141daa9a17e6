"""Means, deviations and paired tests, against formulas written out and against scipy."""

import math

import numpy as np
import pytest
from scipy import special, stats

from spark_node.compare.statistics import Mean, paired_test


def test_mean_and_sample_deviation() -> None:
    found = Mean.of([0.8, 0.9, 1.0, math.nan])
    assert found is not None
    assert found.count == 3
    assert found.mean == pytest.approx(0.9)
    assert found.deviation == pytest.approx(math.sqrt((0.01 + 0.0 + 0.01) / 2))
    one = Mean.of([0.5])
    assert one is not None
    assert math.isnan(one.deviation)
    assert Mean.of([]) is None
    assert Mean.of([math.nan]) is None


def test_the_paired_test_is_the_formula() -> None:
    one, other = [0.8678, 0.8681, 0.8674, 0.8690], [0.8542, 0.8540, 0.8545, 0.8561]
    found = paired_test(one, other)
    assert found is not None
    d = np.array(one) - np.array(other)
    n, mean, s = 4, d.mean(), math.sqrt(((d - d.mean()) ** 2).sum() / 3)
    t = mean / (s / math.sqrt(n))
    # Two-sided p of Student's t by the incomplete beta function, without scipy's own test.
    assert found.p == pytest.approx(special.betainc(1.5, 0.5, 3 / (3 + t * t)), rel=1e-9)
    half = 3.182446305284263 * s / math.sqrt(n)  # the table's t(0.975; 3)
    assert (found.low, found.high) == pytest.approx((mean - half, mean + half))
    assert found.effect == pytest.approx(mean / s)
    assert (found.count, found.significant) == (4, True)


def test_the_paired_test_agrees_with_scipy_on_random_pairs() -> None:
    generator = np.random.default_rng(0)
    for size in (2, 3, 10):
        one, other = generator.normal(0.86, 0.01, size), generator.normal(0.85, 0.01, size)
        found = paired_test(one.tolist(), other.tolist())
        assert found is not None
        expected = stats.ttest_1samp(one - other, 0.0)
        assert found.p == pytest.approx(expected.pvalue)
        assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_the_paper_s_effect_follows_from_its_gain_and_interval() -> None:
    """IID of Table 3: gain 1.35, interval [0.87, 1.82], p 0.0066, d_z 7.08, from three seeds."""
    half = (1.82 - 0.87) / 2
    deviation = half * math.sqrt(3) / 4.302652729911275
    spread = np.array([-1.0, 0.0, 1.0]) * deviation
    found = paired_test((1.35 + spread).tolist(), [0.0, 0.0, 0.0])
    assert found is not None
    assert found.effect == pytest.approx(7.08, abs=0.1)
    assert found.p == pytest.approx(0.0066, abs=2e-4)


def test_nothing_is_said_below_two_pairs_or_of_what_is_not_a_number() -> None:
    assert paired_test([0.9], [0.8]) is None
    assert paired_test([0.9, math.nan], [0.8, 0.8]) is None


def test_equal_differences_do_not_divide_by_zero() -> None:
    sure, same = paired_test([0.9, 0.8], [0.8, 0.7]), paired_test([0.9, 0.8], [0.9, 0.8])
    assert sure is not None
    assert same is not None
    assert (sure.p, same.p) == (0.0, 1.0)
    assert math.isnan(same.effect)
