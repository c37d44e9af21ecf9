"""Readers of files that are not at hand, on files of the same layout."""

from pathlib import Path

import numpy as np
import pytest

from tests.golden.families import TOLERANCE, compare
from tests.golden.written import write


@pytest.mark.parametrize(
    ("family", "arrays"),
    [
        ("threelin_optimizer", ["matrix.W3", "combiner.W3", *(f"rows.{o}_then_{p}.W3" for o, p in
            (("normalize", "average"), ("average", "normalize")))]),
        ("threelin_train", ["normalize_then_average.w2.layer1.Combiner", "average_then_normalize.w2.embed",
            "normalize_then_average.loss1", "grad0.layer0.QK"]),
        ("tscale_train", ["train.step1.W.layer1.MP_ATT_COMBINER", "train.step1.W.MP_MODEL_EMBED",
            "train.step1.W.layer0.MP_ATT_QV", "train.step1.prob", "train.step1.score"]),
    ],
)  # fmt: skip
def test_a_file_written_from_the_description_is_reproduced(tmp_path: Path, family: str, arrays: list[str]) -> None:
    errors = {comparison.array: comparison.error for comparison in compare(write(tmp_path, family))}
    assert set(arrays) <= errors.keys()
    assert max(errors.values()) <= TOLERANCE


def test_a_wrong_trajectory_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, "threelin_optimizer")
    with np.load(path) as file:
        arrays = dict(file)
    arrays["matrix.G1"] = arrays["matrix.G1"] + 1e-3
    np.savez(path, **arrays)
    errors = {comparison.array: comparison.error for comparison in compare(path)}
    assert errors["matrix.W1"] <= TOLERANCE
    assert errors["matrix.W2"] > TOLERANCE
