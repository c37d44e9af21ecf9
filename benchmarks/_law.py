"""The law of `multilin train --minutes`, fitted to measured runs; `multilin.analysis.budget.law` says what it is."""

import collections
import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multilin.analysis import budget
from multilin.analysis.budget.law import (
    ALPHA,
    BETA,
    LEAST_ERROR,
    Law,
    Validation,
    by_heart,
    effective_bytes,
    repeated,
    straight_on,
)

RUNS = Path(budget.__file__).with_name("runs.jsonl")  # those of the law that comes with the package
MEMORIES = (0.0, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03)  # tried for d
MOST_BY_HEART = 6.0  # x of a run whose prediction and forecast are judged; the rule picks none that goes beyond


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """One line of a file of runs: a run whose learning rate fell to 0 at its last token.

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


def expected_of(law: Law, run: MeasuredRun) -> float:
    """Bits per byte expected of a measured run."""
    ratio = law.ratio(run.parameters, run.bytes_read, run.train_bytes, run.repetition)
    return law.predict(run.architecture, run.trigram, ratio)


def load_runs(path: Path) -> list[MeasuredRun]:
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
        errors += [(run, math.log(expected_of(law, run) / run.bits_per_byte)) for run in own]
    return errors


def prediction_errors(runs: Sequence[MeasuredRun]) -> dict[float, list[tuple[MeasuredRun, float]]]:
    """`left_out_errors` as 0.0, and the same of the forecasts after other shares of a run."""
    found = collections.defaultdict(list, {0.0: left_out_errors(best_rates(runs))})
    judged = [run for run in _judged(best_rates(runs)) if run.validations]
    for text in sorted({run.text for run in judged}):
        law = fit_law([run for run in runs if run.text != text])
        for run in (run for run in judged if run.text == text):
            for validations in itertools.pairwise(run.validations):
                forecast = law.forecast(validations, expected_of(law, run))
                if forecast is not None:
                    share = round(validations[-1][0], 1)
                    found[share].append((run, math.log(forecast[0] / run.bits_per_byte)))
    return found


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
        logs[run.architecture].append(math.log(run.bits_per_byte / expected_of(law, run)))
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
