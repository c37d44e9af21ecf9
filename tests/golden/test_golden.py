"""Numbers of the original implementations: the small files beside this one, and the large ones where they are at hand.

The environment variable MULTILIN_GOLDEN names the folder of the large files; they are in no clone.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.golden.__main__ import main
from tests.golden.families import FAMILIES, TOLERANCE, compare

HERE = Path(__file__).parent
SMALL = sorted(HERE.glob("*.npz"))
FOLDER = Path(os.environ.get("MULTILIN_GOLDEN", HERE.parents[2] / "shared" / "golden"))
LARGE = sorted({path for family in FAMILIES for path in FOLDER.glob(f"{family}*.npz")})


def name(path: Path) -> str:
    return f"{'small' if path in SMALL else 'large'}-{path.stem}"


@pytest.mark.parametrize("path", [*SMALL, *LARGE], ids=name)
def test_every_array_is_reproduced(path: Path) -> None:
    comparisons = compare(path)
    assert comparisons
    for comparison in comparisons:
        assert comparison.error <= TOLERANCE, comparison


@pytest.mark.parametrize(
    ("file", "weight"),
    [
        ("elita_base", "w.lins1.w3"),
        ("fastformer_global", "w.proj_logits.weight"),
        ("leap_base", "w.leap_model.decoders.1.leap.projections.weight"),
        ("mixer_language", "w_before_forward.mixerblocks.1.patch_ff.0.weight"),
        ("threelin_base", "w.layer2.QV"),
        ("tscale_small", "layer3.MP_ATT_COMBINER"),
        ("tscale_small", "layer2.qk"),
        ("tscale_optimizer", "row.delta1"),
    ],
)
def test_the_kept_values_notice_a_small_change(tmp_path: Path, file: str, weight: str) -> None:
    with np.load(HERE / f"{file}.npz") as arrays:
        changed = dict(arrays)
    changed[weight] = changed[weight].astype(np.float64) * (1 + 1e-6 * np.cos(np.arange(changed[weight].shape[-1])))
    np.savez(tmp_path / f"{file}.npz", **changed)
    assert any(comparison.error > TOLERANCE for comparison in compare(tmp_path / f"{file}.npz"))


def test_the_command_prints_every_array(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(SMALL[0])]) == 0
    assert "all arrays within" in capsys.readouterr().out
