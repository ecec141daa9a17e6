"""The statistics of a comparison: mean and deviation over seeds, and the paired t-test between two methods."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEW_SEEDS = 3
"""Fewer pairs than this and a test says next to nothing; the tables say so."""


@dataclass(frozen=True)
class Mean:
    """Mean and sample deviation (n - 1) of what some seeds gave."""

    mean: float
    deviation: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean | None":
        """None without a value; the deviation of one value is not a number."""
        known = np.array([value for value in values if not math.isnan(value)], dtype=float)
        if not known.size:
            return None
        deviation = float(known.std(ddof=1)) if known.size > 1 else math.nan
        return cls(float(known.mean()), deviation, int(known.size))


@dataclass(frozen=True)
class PairedTest:
    """A two-sided paired t-test over shared seeds, as the paper's Table 3 has it."""

    count: int
    gain: float
    low: float
    high: float
    p: float
    effect: float
    """d_z: the mean difference over the deviation of the differences. Not Cohen's d between groups."""

    @property
    def significant(self) -> bool:
        return self.p < 0.05


def paired_test(one: Sequence[float], other: Sequence[float], confidence: float = 0.95) -> PairedTest | None:
    """Whether `one` is above `other`, pair by pair; None below two pairs, where nothing can be said."""
    differences = np.asarray(one, dtype=float) - np.asarray(other, dtype=float)
    if differences.size < 2 or not np.isfinite(differences).all():
        return None
    gain, deviation = float(differences.mean()), float(differences.std(ddof=1))
    if deviation <= 1e-12:
        # Equal differences leave the test without a scale; scipy would divide by zero.
        sure = abs(gain) > 1e-12
        return PairedTest(differences.size, gain, gain, gain, 0.0 if sure else 1.0, math.nan)
    from scipy import stats

    result = stats.ttest_rel(one, other)
    interval = result.confidence_interval(confidence)
    return PairedTest(
        int(differences.size), gain, float(interval.low), float(interval.high), float(result.pvalue), gain / deviation
    )
