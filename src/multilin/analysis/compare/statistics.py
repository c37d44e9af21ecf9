"""Statistics of a few seeds: mean, standard deviation, and Welch's t-test between two rows."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

LEVEL = 0.05  # a difference with a larger p is within noise


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (None for one value) and number of values."""

    mean: float
    deviation: float | None
    count: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two rows: mean of one minus mean of the other.

    p: probability of a difference at least this large between rows that do not differ; None where a row has one seed.
    """

    one: str
    other: str
    difference: float
    p: float | None

    @property
    def within_noise(self) -> bool | None:
        """Whether the seeds alone may make such a difference; None where one seed says nothing about that."""
        return None if self.p is None else self.p > LEVEL


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation of at least one value."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, len(values))


def welch_p(one: Spread, other: Spread) -> float | None:
    """Two-sided p of Welch's t-test, which does not assume equal variances; None where a side has one value.

        t = (m1 - m2) / sqrt(v1 + v2)      v = s^2 / n      df = (v1 + v2)^2 / (v1^2 / (n1 - 1) + v2^2 / (n2 - 1))

    and p is the area of Student's density beyond +-t, integrated over the angle a with cot a = t / sqrt(df).
    """
    if one.deviation is None or other.deviation is None:
        return None
    first, second = one.deviation**2 / one.count, other.deviation**2 / other.count
    if first + second == 0:
        return float(one.mean == other.mean)
    freedom = (first + second) ** 2 / (first**2 / (one.count - 1) + second**2 / (other.count - 1))
    beyond = math.atan2(math.sqrt(freedom * (first + second)), abs(one.mean - other.mean))
    nodes, weights = np.polynomial.legendre.leggauss(64)
    # The angle as a fourth power, because the density has no slope at the end where freedom is below 2.
    powers = (nodes + 1) / 2
    area = float(weights @ (np.sin(beyond * powers**4) ** (freedom - 1) * 2 * beyond * powers**3))
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return min(1.0, 2 * scale * area)
