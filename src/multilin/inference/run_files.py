"""Whether a folder holds a model: a quick look before PyTorch is imported to load it."""

from pathlib import Path

from multilin.errors import InputError


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
