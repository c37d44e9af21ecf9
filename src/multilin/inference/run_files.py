"""Whether a folder holds a model: a quick look before PyTorch is imported to load it."""

import hashlib
import json
from pathlib import Path

from multilin.errors import InputError

MANIFEST = "multilin.json"
"""Describes an exported model."""


def is_export(folder: str | Path) -> bool:
    """Whether a folder is an exported model and no run."""
    folder = Path(folder)
    return (folder / MANIFEST).is_file() and not (folder / "config.json").is_file()


def model_type(folder: Path) -> str | None:
    """The kind of model in a folder, as its config.json names it; None where that cannot be read."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return str(content["model_type"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def check_run_files(folder: str | Path) -> None:
    """Refuse a folder without a model.

    Raises:
        InputError: no folder, or one without config.json or .safetensors files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"run: {str(folder)!r} is no folder; give the folder of a run, such as runs/demo")
    if not (folder / "config.json").is_file():
        unfinished = (folder / "recipe.yaml").is_file()
        hint = f"; finish its training with `multilin train {folder} --resume`" if unfinished else ""
        raise InputError(f"run: {folder} holds no model (no config.json){hint}")
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"run: {folder} holds no weights (no .safetensors file)")


def weights_hash(folder: Path) -> str:
    """SHA-256 of the weights in a folder: of the names and contents of its .safetensors files."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            digest.update(path.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
