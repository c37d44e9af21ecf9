"""What lies beside a saved model, so that transformers alone can say what it needs: the package multilin.

transformers knows a model type of another package once that is imported. Without it, `config.json` points by `auto_map`
to a file in the model's folder, which is run where `trust_remote_code=True` is given, and imports multilin; where that
is not installed, transformers names it and how to install it.
"""

from pathlib import Path

AUTO_FILE = "modeling_multilin.py"

AUTO_MAP = {
    "AutoConfig": "modeling_multilin.MultilinConfig",
    "AutoModel": "modeling_multilin.MultilinModel",
    "AutoModelForCausalLM": "modeling_multilin.MultilinForCausalLM",
}
"""Auto classes of transformers to ours, as `config.json` has them."""

_TEXT = '''"""A model that needs the package multilin: `pip install multilin`, and `import multilin` to load it."""

from multilin import MultilinConfig, MultilinForCausalLM, MultilinModel
'''


def write_auto_file(folder: Path) -> None:
    """Write the file that `AUTO_MAP` names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / AUTO_FILE).write_text(_TEXT, encoding="utf-8")
