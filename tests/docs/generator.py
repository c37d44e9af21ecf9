"""The modules that write the documentation; they are a script beside the pages, not a part of the package."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

data_flow, docstrings, flow_layout, flow_picture, formulas, generate, package_picture = map(
    importlib.import_module,
    ("data_flow", "docstrings", "flow_layout", "flow_picture", "formulas", "generate", "package_picture"),
)
