"""The bits per byte that a model reaches, as a law that is fitted to measured runs.

For a model of N parameters outside embeddings and output projection, trained on B bytes of text, those that were read
again included, with g the bits per byte of a trigram model of the same text,

    bits per byte = g^gamma c (e + a N^-alpha + b E^-beta)

where E <= B counts what is read again for less. With U bytes of text, E = B up to one pass, and after that

    E = U (1 + R (1 - exp(-(B / U - 1) / R)))

c is 1 for the architecture with most runs; for another one it is the mean ratio of its runs to the law, and 1 with no
runs. All constants are fitted by least squares of relative errors.

Sources: Hoffmann et al. 2022, "Training compute-optimal large language models", for the sum of powers; Muennighoff et
al. 2023, "Scaling data-constrained language models", for E.
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

RUNS = Path(str(resources.files("multilin") / "analysis" / "budget" / "runs.jsonl"))
EXPONENTS = (0.1, 0.2, 0.3, 0.4)  # tried for alpha and beta
GAMMAS = (0.25, 0.5, 0.75, 1.0)  # tried for gamma
REPEATS = (4.0, 15.0, 40.0)  # tried for R
LEAST_ERROR = 0.02  # relative, of a prediction, however well the runs fit


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """One line of runs.jsonl: a run whose learning rate fell to 0 at its last token.

    text: a name of it. tokens: read in training, those that were read again included. flops_per_token: of training.
    parameters: outside the embeddings and the output projection. train_tokens, train_bytes: of the training text.
    trigram: see `TextMeasure`. bits_per_byte: of the model, on the validation text. commit: of multilin.
    """

    text: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    n_positions: int
    batch_size: int
    learning_rate: float
    tokens: int
    flops_per_token: float
    parameters: int
    train_tokens: int
    train_bytes: int
    trigram: float
    bits_per_byte: float
    commit: str

    @property
    def bytes_read(self) -> float:
        """Bytes of text that the tokens stand for."""
        return self.tokens * self.train_bytes / self.train_tokens


@dataclasses.dataclass(frozen=True)
class Law:
    """A fitted law.

    e, a, alpha, b, beta, gamma, repeats: its constants, the last is R. main: the architecture with c = 1.
    factors: c of the others that have runs.
    error: relative, of a run that is predicted from those on other texts: the root of the mean square.
    runs: that it was fitted to. most_flops: of the largest of them.
    """

    e: float
    a: float
    alpha: float
    b: float
    beta: float
    gamma: float
    repeats: float
    main: str = ""
    factors: dict[str, float] = dataclasses.field(default_factory=dict)
    error: float = LEAST_ERROR
    runs: int = 0
    most_flops: float = 0.0

    def ratio(self, parameters: float, bytes_read: float, train_bytes: float) -> float:
        """What stands in the brackets: what the rule makes least."""
        effective = effective_bytes(bytes_read, train_bytes, self.repeats)
        return float(self.e + self.a * parameters**-self.alpha + self.b * effective**-self.beta)

    def expected_of(self, run: MeasuredRun) -> float:
        """Bits per byte expected of a measured run."""
        ratio = self.ratio(run.parameters, run.bytes_read, run.train_bytes)
        return self.predict(run.architecture, run.trigram, ratio)

    def predict(self, architecture: str, trigram: float, ratio: float) -> float:
        """Bits per byte to expect of an architecture, from `ratio`."""
        return float(trigram**self.gamma * self.factors.get(architecture, 1.0) * ratio)


def effective_bytes(bytes_read: float, train_bytes: float, repeats: float) -> float:
    """E: the bytes of new text that as many bytes, some of them read again, are worth."""
    again = max(bytes_read / train_bytes - 1, 0.0)
    return min(bytes_read, train_bytes) + train_bytes * repeats * (1 - math.exp(-again / repeats))


def load_runs(path: Path = RUNS) -> list[MeasuredRun]:
    """The measured runs of a file."""
    return [MeasuredRun(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def fit_law(runs: Sequence[MeasuredRun]) -> Law:
    """The law that fits the runs best, and how well it predicts those on each text from those on the others.

    Of runs that differ in the learning rate alone, the best counts.
    """
    runs = best_rates(runs)
    law = _fit(runs)
    error = max(LEAST_ERROR, float(np.sqrt(np.mean(np.square([error for _, error in left_out_errors(runs)])))))
    most = max(run.tokens * run.flops_per_token for run in runs)
    return dataclasses.replace(law, error=error, runs=len(runs), most_flops=most)


@functools.cache
def shipped_law() -> Law:
    """The law of the runs that come with the package."""
    return fit_law(load_runs())


def best_rates(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """The best of those runs that differ in the learning rate alone."""
    best: dict[MeasuredRun, MeasuredRun] = {}
    for run in sorted(runs, key=lambda run: run.bits_per_byte):
        best.setdefault(dataclasses.replace(run, learning_rate=0.0, bits_per_byte=0.0, commit=""), run)
    return list(best.values())


def left_out_errors(runs: Sequence[MeasuredRun]) -> list[tuple[MeasuredRun, float]]:
    """The runs of the main architecture, and log(expected / measured) of each from a law of the other texts' runs."""
    main, errors = _main(runs), []
    for text in {run.text for run in runs}:
        law = _fit([run for run in runs if run.text != text])
        own = [run for run in runs if (run.text, run.architecture) == (text, main)]
        errors += [(run, math.log(law.expected_of(run) / run.bits_per_byte)) for run in own]
    return errors


def _main(runs: Sequence[MeasuredRun]) -> str:
    """The architecture with most runs."""
    return collections.Counter(run.architecture for run in runs).most_common(1)[0][0]


def _fit(runs: Sequence[MeasuredRun]) -> Law:
    """Exponents and R from their grids, the other constants by least squares."""
    main = _main(runs)
    own = [run for run in runs if run.architecture == main]
    parameters = np.array([run.parameters for run in own])
    measured, trigrams = (np.array([getattr(run, name) for run in own]) for name in ("bits_per_byte", "trigram"))
    found: list[tuple[float, Law]] = []
    for repeats in REPEATS:
        read = np.array([effective_bytes(run.bytes_read, run.train_bytes, repeats) for run in own])
        for alpha, beta, gamma in itertools.product(EXPONENTS, EXPONENTS, GAMMAS):
            scale = trigrams**gamma / measured
            terms = scale[:, None] * np.stack([np.ones(len(own)), parameters**-alpha, read**-beta], axis=1)
            (e, a, b), error = _least_squares(terms)
            found.append((error, Law(e, a, alpha, b, beta, gamma, repeats, main)))
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
