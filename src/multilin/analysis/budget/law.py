"""The bits per byte that a model reaches, as a law that is fitted to measured runs.

For a model of N parameters outside embeddings and output projection, trained on B bytes of text, those that were read
again included, with g the bits per byte of a trigram model of the same text and h its repetition,

    bits per byte = g h^p c (e + a N^-0.3 + b E^-0.3) (2 - exp(-d x))

where E <= B counts what is read again for less. With U bytes of text, E = B up to one pass, and after that

    E = U (1 + R (1 - exp(-(B / U - 1) / R))),        x = N (B / U - 1) / U,        R = 3

h is at most 1: trigrams do not see what a text said some lines before, and the models do (`scoring.ngrams.repetition`),
the better the more they have read: p = 0.3 ln(E / 1 MB), and 0 before the first MB.
x is the parameters there are for each byte, as often as it is read again: a model that has enough learns the text by
heart, and is then worse on any other, at most twice as bad. x is 0 up to one pass.

c is 1 for the architecture with most runs; for another one it is the mean ratio of its runs to the law, and 1 with no
runs. The constants are fitted by least squares of relative errors.

Under way more is known: a run that is validated with v' bits per byte after a share s' of it, and with v after s, ends
with about

    v (v / v')^(k(s) (1 - s) / (s - s'))

It goes on as before, k times as fast. k is fitted for each share to the measured runs that were validated on the way,
and is a straight line between them. It holds for learning rates that fall linearly to 0, as theirs did, and for
validations about as far apart as theirs. Its errors hardly go along with those of the law, so the forecast is the
mean of the logarithms of both, each with one over the square of its error as its weight.

Sources: Hoffmann et al. 2022, "Training compute-optimal large language models", for the sum of powers; Muennighoff et
al. 2023, "Scaling data-constrained language models", for E. The factor with d is our own.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np

LAW = Path(str(resources.files("multilin"))) / "analysis" / "budget" / "law.json"
# From fits with a factor for every text, in which only runs on the same one are compared.
ALPHA, BETA = 0.3, 0.3
REPEATING = 0.3  # by how much p grows where E is e times as large
UNREPEATED = 1e6  # E in bytes up to which p is 0; of 3e5 to 3e6, that with which the other texts are predicted best
REPEATS = 3.0  # R; the source has 15. 3 to 8 predict other texts alike; with more the rule makes too many passes
LEAST_ERROR = 0.02  # relative, of a prediction, however well the runs fit
FIRST_SHARE, SPACING = 0.35, 0.15  # of a run: the earliest forecast, and the least between the validations behind it

Validation = tuple[float, float]
"""The share of a run that is over, from 0 to 1, and bits per byte."""


@dataclasses.dataclass(frozen=True)
class Law:
    """A fitted law.

    e, a, b, memory: its constants, the last one is d.
    main: the architecture with c = 1. factors: c of the others that have runs.
    error: relative, of a run that is predicted from those on other texts: the root of the mean square.
    runs: that it was fitted to. most_flops, fewest_tokens: of the largest and of the shortest of them.
    ends: (s, k(s), error) for each share s, rising to 1; the error is that of going on from s, taken as `error` is.
    """

    e: float
    a: float
    b: float
    memory: float = 0.0
    main: str = ""
    factors: dict[str, float] = dataclasses.field(default_factory=dict)
    error: float = LEAST_ERROR
    runs: int = 0
    most_flops: float = 0.0
    fewest_tokens: int = 0
    ends: tuple[tuple[float, float, float], ...] = ((1.0, 1.0, 0.0),)

    def ratio(self, parameters: float, bytes_read: float, train_bytes: float, repetition: float = 1.0) -> float:
        """The factors of the law that the model and its passes decide, not g and c: what the rule makes least."""
        effective = effective_bytes(bytes_read, train_bytes)
        learned = self.e + self.a * parameters**-ALPHA + self.b * effective**-BETA
        known = by_heart(parameters, train_bytes, bytes_read / train_bytes)
        return float(repeated(repetition, effective) * learned * (2 - math.exp(-self.memory * known)))

    def predict(self, architecture: str, trigram: float, ratio: float) -> float:
        """Bits per byte to expect of an architecture on a text, from `ratio`."""
        return trigram * self.factors.get(architecture, 1.0) * ratio

    def forecast(self, validations: Sequence[Validation], predicted: float) -> tuple[float, float] | None:
        """Bits per byte to expect at the end of a run, and their error, from its validations and what was predicted.

        Of the validations the last one counts, and the last one `SPACING` before it: those of the measured runs were a
        fifth of the run apart. None before `FIRST_SHARE` of the run, or without two that are so far apart.
        """
        later = validations[-1]
        earlier = next((v for v in reversed(validations) if v[0] <= later[0] - SPACING), None)
        if earlier is None or later[0] < FIRST_SHARE:
            return None
        shares, factors, errors = zip(*self.ends, strict=True)
        expected = later[1] * math.exp(float(np.interp(later[0], shares, factors)) * straight_on(earlier, later))
        error = float(np.interp(later[0], shares, errors))
        weight = error**2 / (error**2 + self.error**2)  # of the prediction
        expected *= (predicted / expected) ** weight
        return expected, expected * error * math.sqrt(1 - weight)


def effective_bytes(bytes_read: float, train_bytes: float) -> float:
    """E: the bytes of new text that as many bytes, some of them read again, are worth."""
    again = max(bytes_read / train_bytes - 1, 0.0)
    return min(bytes_read, train_bytes) + train_bytes * REPEATS * (1 - math.exp(-again / REPEATS))


def repeated(repetition: float, effective: float) -> float:
    """h^p: the share of the bits that is left to a model that has read so many bytes and sees what was said before."""
    return float(repetition ** (REPEATING * max(math.log(effective / UNREPEATED), 0.0)))


def by_heart(parameters: float, train_bytes: float, passes: float) -> float:
    """x: parameters for each byte of text, times how often it is read again."""
    return parameters / train_bytes * max(passes - 1, 0.0)


def straight_on(earlier: Validation, later: Validation) -> float:
    """log(end / later) of a run whose log bits per byte go on along a straight line."""
    return math.log(later[1] / earlier[1]) * (1 - later[0]) / (later[0] - earlier[0])


@functools.cache
def shipped_law() -> Law:
    """The law that comes with the package, fitted to the runs in `analysis/budget/runs.jsonl`."""
    fields = json.loads(LAW.read_text(encoding="utf-8"))
    return Law(**{**fields, "ends": tuple(map(tuple, fields["ends"]))})
