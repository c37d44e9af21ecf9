"""Numbers of the original implementations, where the files are at hand."""

from pathlib import Path

import pytest

from tests.golden.__main__ import main
from tests.golden.families import FAMILIES, TOLERANCE, compare

FOLDER = Path(__file__).parents[3] / "shared" / "golden"
FILES = sorted({path for family in FAMILIES for path in FOLDER.glob(f"{family}*.npz")})


@pytest.mark.skipif(not FILES, reason="the golden files are not beside the project")
def test_every_array_is_reproduced() -> None:
    for path in FILES:
        comparisons = compare(path)
        assert comparisons, path.name
        for comparison in comparisons:
            assert comparison.error <= TOLERANCE, f"{path.name}: {comparison}"


@pytest.mark.skipif(not FILES, reason="the golden files are not beside the project")
def test_the_command_prints_every_array(capsys) -> None:
    assert main([str(FILES[0])]) == 0
    assert "all arrays within" in capsys.readouterr().out
