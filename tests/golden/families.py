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
    "leap": fastformer.check_leap,
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
    check = find_check(path)
    with np.load(path, allow_pickle=False) as file:
        return [Comparison(name, relative_error(*pair)) for name, *pair in check(file)]


def find_check(path: Path) -> Check:
    """The check of the family that the file's name begins with.

    Raises:
        NotRead: a file of another system.
    """
    families = [family for family in FAMILIES if f"{path.stem}_".startswith(f"{family}_")]
    if not families:
        raise NotRead(f"{path.name}: belongs to none of the systems here, which are {', '.join(FAMILIES)}")
    return FAMILIES[max(families, key=len)]


def relative_error(result: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest expected magnitude (at least 1e-6), where the expected value is no nan.

    Small files have nan in place of most expected values; a file without any expected value is an error.
    """
    if result.shape != expected.shape:
        return float("inf")
    kept = ~np.isnan(expected.astype(np.float64))
    if expected.size and not kept.any():
        return float("inf")
    result, expected = result.astype(np.float64)[kept], expected.astype(np.float64)[kept]
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-6)
    return float(np.abs(result - expected).max(initial=0.0)) / scale
