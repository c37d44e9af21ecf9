"""A file in the folder of a saved model, with which transformers finds out that the model needs the package multilin.

transformers knows a model type of another package after this package is imported. Otherwise `auto_map` in `config.json`
names a file in the model's folder, which imports multilin and is run with `trust_remote_code=True`. If multilin is not
installed, transformers says so.
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
