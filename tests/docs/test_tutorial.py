"""The tutorial runs from its first cell to its last, and lies in the repository without what it prints."""

import json
import os
from pathlib import Path

import pytest

from tests.processes import PYTHON, ROOT, run

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"
EXECUTE = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": sys.argv[2]}}).execute()
print("".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])))
"""


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    shown = run([*PYTHON, "-c", EXECUTE, str(NOTEBOOK), str(tmp_path)], environment=environment)
    assert "bits per byte of validation text" in shown
    assert shown.endswith("True\n\n")  # the exported model generates the same text
    assert (tmp_path / "runs" / "tutorial" / "explain" / "explain.html").is_file()


def test_it_holds_no_outputs() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
