"""Equivalence of two ways to train: two one-sided tests against a margin stated before."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np
from scipy import stats

from benchmarks.claims import BETTER, NOT, SAME, UNDECIDED

LEVEL = 0.05  # of each of the two tests: together an interval of 90 %


@dataclasses.dataclass(frozen=True)
class Margin:
    """Largest distance of a mean difference from the one that is claimed."""

    size: float
    unit: str = "% of the loss"  # for example: a difference as a share of the baseline's mean
    claimed: float = 0.0  # the difference that the paper itself finds

    def __str__(self) -> str:
        about = f"{self.claimed:+.2f} " if self.claimed else ""
        return f"{about}± {self.size:g} {self.unit}"


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and the interval of 90 % around it, in the unit of a margin.

    One difference has no interval of its own: `low` and `high` are infinite.
    """

    mean: float
    low: float
    high: float

    @staticmethod
    def of(differences: Sequence[float]) -> "Interval":
        """Student's interval of independent differences, of one pair each."""
        count, mean = len(differences), statistics.mean(differences)
        if not all(map(math.isfinite, differences)):
            return Interval(math.nan, math.nan, math.nan)
        if count < 2:
            return Interval(mean, -math.inf, math.inf)
        factor = float(stats.t.ppf(1 - LEVEL, count - 1))
        half = factor * statistics.stdev(differences) / math.sqrt(count)
        return Interval(mean, mean - half, mean + half)

    def verdict(self, margin: Margin, lower_is_better: bool = True) -> str:
        """Decide: the same if the interval is within the margin, another if it is outside of it.

        Not a number, on any side, is another. What is neither is undecided: more pairs are needed.
        """
        least, most = margin.claimed - margin.size, margin.claimed + margin.size
        if math.isnan(self.mean):
            return NOT
        if least <= self.low and self.high <= most:
            return SAME
        if self.low > most:
            return NOT if lower_is_better else BETTER
        if self.high < least:
            return BETTER if lower_is_better else NOT
        return UNDECIDED

    def no_worse(self, margin: Margin, lower_is_better: bool = True) -> bool:
        """Return whether the interval's worse end is within the margin, or better than that."""
        if lower_is_better:
            return self.high <= margin.claimed + margin.size
        return self.low >= margin.claimed - margin.size

    def __str__(self) -> str:
        if math.isinf(self.low):
            return f"{self.mean:+.2f} %, one pair"
        return f"{self.mean:+.2f} % ({self.low:+.2f} to {self.high:+.2f})"


def power(count: int, deviation: float, margin: Margin) -> float:
    """Probability that n = `count` pairs are found the same, if their true mean is the claimed one.

    The differences of pairs have a standard `deviation`, in the margin's unit. Both tests reject
    where |mean| <= margin - t s / sqrt(n): of a normal mean, and of a deviation s of the sample,
    independent of it, with (s / deviation)^2 (n - 1) of chi^2. The mean over 512 quantiles of s;
    that of one standard normal is exact.
    """
    quantiles = (np.arange(512) + 0.5) / 512
    found = np.sqrt(stats.chi2.ppf(quantiles, count - 1) / (count - 1))
    factor = stats.t.ppf(1 - LEVEL, count - 1)
    most = margin.size * math.sqrt(count) / deviation - factor * found
    return float(np.maximum(0, 2 * stats.norm.cdf(most) - 1).mean())


def pairs_needed(deviation: float, margin: Margin, wanted: float) -> int:
    """Return how many pairs are found the same with the wanted power, if their mean is 0.

    With z the quantiles of a normal distribution it is ((z(0.95) + z((1 + wanted) / 2)) deviation /
    margin)^2, and one or two more by Student's t, since the deviation is estimated. Where the true
    difference is not 0, more.
    """
    ends = stats.norm.ppf(1 - LEVEL) + stats.norm.ppf((1 + wanted) / 2)
    least = max(2, math.ceil((ends * deviation / margin.size) ** 2))
    return next(n for n in itertools.count(least) if power(n, deviation, margin) >= wanted)
