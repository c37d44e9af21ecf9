"""The modules that write the documentation; they are a script beside the pages, not a part of the package."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

docstrings, generate = map(importlib.import_module, ("docstrings", "generate"))
