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
validations about as far apart as theirs.

Sources: Hoffmann et al. 2022, "Training compute-optimal large language models", for the sum of powers; Muennighoff et
al. 2023, "Scaling data-constrained language models", for E. The factor with d is our own.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(str(resources.files("multilin"))) / "analysis" / "budget"
RUNS, LAW = FOLDER / "runs.jsonl", FOLDER / "law.json"  # the measured runs, and the law that `fit_law` makes of them
# From fits with a factor for every text, in which only runs on the same one are compared.
ALPHA, BETA = 0.3, 0.3
REPEATING = 0.3  # by how much p grows where E is e times as large
UNREPEATED = 1e6  # E in bytes up to which p is 0; of 3e5 to 3e6, that with which the other texts are predicted best
REPEATS = 3.0  # R; the source has 15. 3 to 8 predict other texts alike; with more the rule makes too many passes
MEMORIES = (0.0, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03)  # tried for d
LEAST_ERROR = 0.02  # relative, of a prediction, however well the runs fit
MOST_BY_HEART = 6.0  # x of a run whose prediction and forecast are judged; the rule picks none that goes beyond
FIRST_SHARE, SPACING = 0.35, 0.15  # of a run: the earliest forecast, and the least between the validations behind it

Validation = tuple[float, float]
"""The share of a run that is over, from 0 to 1, and bits per byte."""


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """One line of runs.jsonl: a run whose learning rate fell to 0 at its last token.

    text: a name of it. tokens: read in training, those that were read again included. flops_per_token: of training.
    parameters: outside the embeddings and the output projection. train_tokens, train_bytes: of the training text.
    trigram, repetition: see `TextMeasure`. bits_per_byte: of the model, on the validation text. commit: of multilin.
    validations: those before the last one.
    """

    text: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    n_positions: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    tokens: int
    flops_per_token: float
    parameters: int
    train_tokens: int
    train_bytes: int
    trigram: float
    repetition: float
    bits_per_byte: float
    commit: str
    validations: tuple[Validation, ...] = ()

    @property
    def bytes_read(self) -> float:
        """Bytes of text that the tokens stand for."""
        return self.tokens * self.train_bytes / self.train_tokens

    @property
    def by_heart(self) -> float:
        """x of the law."""
        return by_heart(self.parameters, self.train_bytes, self.tokens / self.train_tokens)


@dataclasses.dataclass(frozen=True)
class Law:
    """A fitted law.

    e, a, b, memory: its constants, the last one is d.
    main: the architecture with c = 1. factors: c of the others that have runs.
    error: relative, of a run that is predicted from those on other texts: the root of the mean square.
    runs: that it was fitted to. most_flops, fewest_tokens: of the largest and of the shortest of them.
    ends: (s, k(s), error) for each share s, rising to 1; the error is that of forecasts from s, taken as `error` is.
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

    def expected_of(self, run: MeasuredRun) -> float:
        """Bits per byte expected of a measured run."""
        ratio = self.ratio(run.parameters, run.bytes_read, run.train_bytes, run.repetition)
        return self.predict(run.architecture, run.trigram, ratio)

    def predict(self, architecture: str, trigram: float, ratio: float) -> float:
        """Bits per byte to expect of an architecture on a text, from `ratio`."""
        return trigram * self.factors.get(architecture, 1.0) * ratio

    def forecast(self, validations: Sequence[Validation]) -> tuple[float, float] | None:
        """Bits per byte to expect at the end of a run, and their error, from its validations so far.

        The last one counts, and the last one `SPACING` before it: those of the measured runs were a fifth of the run
        apart. None before `FIRST_SHARE` of the run, or without two that are so far apart.
        """
        later = validations[-1]
        earlier = next((v for v in reversed(validations) if v[0] <= later[0] - SPACING), None)
        if earlier is None or later[0] < FIRST_SHARE:
            return None
        shares, factors, errors = zip(*self.ends, strict=True)
        expected = later[1] * math.exp(float(np.interp(later[0], shares, factors)) * straight_on(earlier, later))
        return expected, expected * float(np.interp(later[0], shares, errors))


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


def load_runs(path: Path = RUNS) -> list[MeasuredRun]:
    """The measured runs of a file."""
    runs = (MeasuredRun(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())
    return [
        dataclasses.replace(run, validations=tuple((share, bits) for share, bits in run.validations)) for run in runs
    ]


def fit_law(runs: Sequence[MeasuredRun]) -> Law:
    """The law that fits the runs best, and how well it predicts those on each text from those on the others.

    Of runs that differ in the learning rate alone, the best counts.
    """
    runs = best_rates(runs)
    law = _fit(runs)
    error = max(LEAST_ERROR, float(np.sqrt(np.mean(np.square([error for _, error in left_out_errors(runs)])))))
    most = max(run.tokens * run.flops_per_token for run in runs)
    fewest = min(run.tokens for run in runs)
    return dataclasses.replace(
        law, error=error, runs=len(runs), most_flops=most, fewest_tokens=fewest, ends=_ends(runs)
    )


def straight_on(earlier: Validation, later: Validation) -> float:
    """log(end / later) of a run whose log bits per byte go on along a straight line."""
    return math.log(later[1] / earlier[1]) * (1 - later[0]) / (later[0] - earlier[0])


def _ends(runs: Sequence[MeasuredRun]) -> tuple[tuple[float, float, float], ...]:
    """`Law.ends`, for shares in tenths."""
    found: dict[float, list[tuple[str, float, float]]] = collections.defaultdict(list)
    for run in _judged(runs):
        for earlier, later in itertools.pairwise(run.validations):
            left = math.log(run.bits_per_byte / later[1])
            found[round(later[0], 1)].append((run.text, straight_on(earlier, later), left))
    ends = []
    for share, points in sorted(found.items()):
        errors = []
        for text, straight, left in points:
            others = [point for point in points if point[0] != text]
            errors.append(_slope(others or points) * straight - left)
        ends.append((share, _slope(points), float(np.sqrt(np.mean(np.square(errors))))))
    return (*ends, (1.0, 1.0, 0.0))


def _slope(points: Sequence[tuple[str, float, float]]) -> float:
    """The factor of the second numbers that is nearest to the third, by least squares."""
    return sum(x * y for _, x, y in points) / sum(x * x for _, x, _ in points)


@functools.cache
def shipped_law() -> Law:
    """The law of the runs that come with the package, which takes seconds to fit and is a file beside them."""
    fields = json.loads(LAW.read_text(encoding="utf-8"))
    return Law(**{**fields, "ends": tuple(map(tuple, fields["ends"]))})


def best_rates(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """The best of those runs that differ in the learning rate alone."""
    best: dict[MeasuredRun, MeasuredRun] = {}
    for run in sorted(runs, key=lambda run: run.bits_per_byte):
        best.setdefault(dataclasses.replace(run, learning_rate=0.0, bits_per_byte=0.0, commit="", validations=()), run)
    return list(best.values())


def left_out_errors(runs: Sequence[MeasuredRun]) -> list[tuple[MeasuredRun, float]]:
    """The main architecture's judged runs, and log(expected / measured) of each from a law of other texts' runs."""
    main, errors = _main(runs), []
    judged = [run for run in _judged(runs) if run.architecture == main]
    for text in {run.text for run in judged}:
        law = _fit([run for run in runs if run.text != text])
        own = [run for run in judged if run.text == text]
        errors += [(run, math.log(law.expected_of(run) / run.bits_per_byte)) for run in own]
    return errors


def _judged(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Runs of a kind that the rule might pick; the others show how models overfit."""
    return [run for run in runs if run.by_heart <= MOST_BY_HEART]


def _main(runs: Sequence[MeasuredRun]) -> str:
    """The architecture with most runs."""
    return collections.Counter(run.architecture for run in runs).most_common(1)[0][0]


def _fit(runs: Sequence[MeasuredRun]) -> Law:
    """d from its grid, the other constants by least squares."""
    main = _main(runs)
    own = [run for run in runs if run.architecture == main]
    parameters = np.array([run.parameters for run in own])
    measured, trigrams = (np.array([getattr(run, name) for run in own]) for name in ("bits_per_byte", "trigram"))
    found: list[tuple[float, Law]] = []
    again = np.array([run.by_heart for run in own])
    read = np.array([effective_bytes(run.bytes_read, run.train_bytes) for run in own])
    of_text = trigrams * [repeated(run.repetition, effective) for run, effective in zip(own, read, strict=True)]
    for memory in MEMORIES:
        scale = of_text * (2 - np.exp(-memory * again)) / measured
        terms = scale[:, None] * np.stack([np.ones(len(own)), parameters**-ALPHA, read**-BETA], axis=1)
        (e, a, b), error = _least_squares(terms)
        found.append((error, Law(e, a, b, memory, main)))
    law = min(found, key=lambda pair: pair[0])[1]
    logs: dict[str, list[float]] = collections.defaultdict(list)
    for run in runs:
        logs[run.architecture].append(math.log(run.bits_per_byte / law.expected_of(run)))
    factors = {name: math.exp(float(np.mean(values))) for name, values in logs.items() if name != main}
    return dataclasses.replace(law, factors=factors)


def _least_squares(terms: NDArray[np.float64]) -> tuple[list[float], float]:
    """The weights >= 0 of the columns whose weighted sum is nearest to 1 in every row, and the error."""
    best, least = [0.0] * terms.shape[1], math.inf
    for number in range(1, terms.shape[1] + 1):
        for columns in itertools.combinations(range(terms.shape[1]), number):
            chosen = terms[:, columns]
            weights = np.linalg.lstsq(chosen, np.ones(len(terms)), rcond=None)[0]
            error = float(np.sum((chosen @ weights - 1) ** 2))
            if error < least and (weights >= 0).all():
                placed = dict(zip(columns, map(float, weights), strict=True))
                best, least = [placed.get(column, 0.0) for column in range(terms.shape[1])], error
    return best, least
