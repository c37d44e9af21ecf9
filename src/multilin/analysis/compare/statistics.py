"""Statistics of a few seeds: mean, standard deviation, Welch's t-test between two rows, and a test against chance."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from scipy import special

LEVEL = 0.05  # a difference with a larger p is within noise
FEWEST_SEEDS = 3  # that a test needs


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (None for one value) and number of values."""

    mean: float
    deviation: float | None
    count: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of two rows: the mean score of `one` minus the mean of `other`, which is better or equal.

    share: the difference divided by the bits per byte, or the share of wrong answers, of `one`; None if that is 0.
    interval: the 95 % confidence interval of the difference.
    p: probability of a difference at least this large between rows that do not differ, corrected by Holm's method for
        the number of tested pairs.
    unknown: why there is no interval and no p; empty if there are both.
    """

    one: str
    other: str
    difference: float
    share: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    unknown: str = ""

    @property
    def within_noise(self) -> bool | None:
        """Whether different seeds alone may cause such a difference; None if that is unknown."""
        return None if self.p is None else self.p > LEVEL


def spread(values: Sequence[float]) -> Spread:
    """The mean and standard deviation of at least one value."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, len(values))


def pairwise(scores: Mapping[str, Spread], measure: str, guessing: Sequence[str] = ()) -> list[Difference]:
    """Compare every row with every better one.

    Args:
        scores: the scores of rows by name, the best first.
        measure: "bits_per_byte" or "accuracy".
        guessing: rows that are no better than chance; two such rows are not tested against each other.
    """
    found = []
    for place, (one, worse) in enumerate(scores.items()):
        for other, better in itertools.islice(scores.items(), place):
            lost, kept = (score.mean if measure == "bits_per_byte" else 1 - score.mean for score in (worse, better))
            difference = Difference(one, other, worse.mean - better.mean, (lost - kept) / lost if lost else None)
            if one in guessing and other in guessing:
                found.append(dataclasses.replace(difference, unknown="both rows are at chance"))
            else:
                found.append(_tested(difference, worse, better))
    return _corrected(found)


def _tested(difference: Difference, one: Spread, other: Spread) -> Difference:
    """Add p and interval of Welch's two-sided t-test, which does not assume equal variances.

        t = (m1 - m2) / sqrt(v1 + v2)      v = s^2 / n      df = (v1 + v2)^2 / (v1^2 / (n1 - 1) + v2^2 / (n2 - 1))

    Rows with fewer than three values are not tested, nor are rows with equal values, whose true variance is unknown.
    """
    if min(one.count, other.count) < FEWEST_SEEDS:
        return dataclasses.replace(difference, unknown="too few seeds for a test")
    if not one.deviation or not other.deviation:
        return dataclasses.replace(difference, unknown="all seeds of a row have the same score")
    first, second = one.deviation**2 / one.count, other.deviation**2 / other.count
    freedom = (first + second) ** 2 / (first**2 / (one.count - 1) + second**2 / (other.count - 1))
    error, mean = math.sqrt(first + second), difference.difference
    reach = error * float(special.stdtrit(freedom, 1 - LEVEL / 2))
    p = 2 * float(special.stdtr(freedom, -abs(mean) / error))
    return dataclasses.replace(difference, p=p, interval=(mean - reach, mean + reach))


def _corrected(differences: list[Difference]) -> list[Difference]:
    """Correct p by Holm's method: multiply the smallest of m values by m, the next by m - 1, ..., keeping the order."""
    tested = sorted((d.p, place) for place, d in enumerate(differences) if d.p is not None)
    largest = 0.0
    for rank, (p, place) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        differences[place] = dataclasses.replace(differences[place], p=largest)
    return differences


def is_above_chance(accuracy: float, chance: float, num_answers: int, num_rows: int) -> bool:
    """Whether an accuracy is above chance, by a binomial test that is corrected for the number of rows.

    All seeds answer the same questions, so their mean is tested like the accuracy of a single seed.
    """
    num_right = round(accuracy * num_answers)
    return bool(num_right > 0 and special.bdtrc(num_right - 1, num_answers, chance) <= LEVEL / num_rows)
