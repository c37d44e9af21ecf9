"""Which check serves which file: by the beginning of the file's name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden import (
    additive_ops,
    elita,
    fastformer,
    linear_lm,
    linear_mixer,
    optimizers,
    threelin,
    training,
    tscale,
)


@dataclass(frozen=True)
class Comparison:
    """One array of a golden file: the largest difference from ours, relative to the largest expected value."""

    array: str
    error: float


Check = Callable[[Any], Iterator[tuple[str, np.ndarray, np.ndarray]]]

FAMILIES: dict[str, Check] = {
    "additive": additive_ops.check,
    "elita": elita.check,
    "fastformer": fastformer.check,
    "linear": linear_lm.check,
    "mixer": linear_mixer.check,
    "threelin": threelin.check,
    "threelin_optimizer": optimizers.check_threelin,
    "threelin_train": training.check_threelin,
    "tscale": tscale.check,
    "tscale_optimizer": optimizers.check_tscale,
    "tscale_train": training.check_tscale,
}
"""The longest name that a file's name begins with decides."""


TOLERANCE = 1e-9
"""The largest relative error that an array may have."""


class NotRead(ValueError):
    """A file that belongs to no system of this project, in one sentence."""


def compare(path: Path) -> list[Comparison]:
    """Every array of the file that has an expected value.

    Raises:
        NotRead: a file of another system.
    """
    families = [family for family in FAMILIES if f"{path.stem}_".startswith(f"{family}_")]
    if not families:
        raise NotRead(f"{path.name}: belongs to none of the systems here, which are {', '.join(FAMILIES)}")
    with np.load(path, allow_pickle=False) as file:
        return [Comparison(name, relative_error(*pair)) for name, *pair in FAMILIES[max(families, key=len)](file)]


def relative_error(result: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest expected magnitude (at least 1e-6)."""
    if result.shape != expected.shape:
        return float("inf")
    result, expected = result.astype(np.float64), expected.astype(np.float64)
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-6)
    return float(np.abs(result - expected).max(initial=0.0)) / scale
