"""Finds and checks the files of a model, without importing PyTorch, which would take long."""

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from multilin.errors import InputError, as_input_error, prefixed, shown
from multilin.files import checksum, is_path
from multilin.settings.inputs import read_json, read_yaml

MANIFEST = "multilin.json"
"""The file that describes an exported model."""
RECIPE_FILE = "recipe.yaml"
"""The file with all settings of a run."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The settings and the weights of adapters, as PEFT writes them; the base model is in another folder."""


def is_export(folder: str | Path) -> bool:
    """True if a folder is an exported model and not a run."""
    folder = Path(folder)
    return (folder / MANIFEST).is_file() and not (folder / "config.json").is_file()


def model_type(folder: Path) -> str | None:
    """The `model_type` of the config.json of a model; None if it cannot be read."""
    try:
        content = json.loads((below_adapters(folder) / "config.json").read_text(encoding="utf-8"))
        return str(content["model_type"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def is_adapter(folder: Path) -> bool:
    """True if a folder holds the adapters of a model and not the model itself."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """The model that the adapters in a folder belong to: a folder, or a name on the hub.

    A relative path is looked up in the current folder, then in the folders above the adapters.

    Raises:
        InputError: adapter_config.json is damaged or names no model.
    """
    values = read_json(folder / ADAPTER_CONFIG, "run")
    base = values.get("base_model_name_or_path") if isinstance(values, dict) else None
    if not isinstance(base, str) or not base:
        raise InputError(f"run: {folder / ADAPTER_CONFIG} names no model (base_model_name_or_path)")
    near = (parent / base for parent in (Path(), *folder.resolve().parents))
    return str(next((path for path in near if path.is_dir()), base))


def below_adapters(folder: Path) -> Path:
    """The folder or name of the model below all adapters in a folder; without adapters, the folder itself.

    Raises:
        InputError: see `base_of`; or adapters name themselves as their base model.
    """
    seen: set[Path] = set()
    while is_adapter(folder):
        if folder.resolve() in seen:
            raise InputError(f"run: the adapters in {folder} name themselves as their base model")
        seen.add(folder.resolve())
        folder = Path(base_of(folder))
    return folder


def recipe_sections(folder: Path) -> dict[str, dict[str, Any]]:
    """The sections of the recipe in a folder, unchanged; empty if there is no recipe.

    Raises:
        InputError: the recipe is not YAML.
    """
    values = read_yaml(folder / RECIPE_FILE, "run") if (folder / RECIPE_FILE).is_file() else None
    sections = values if isinstance(values, dict) else {}
    return {name: section for name, section in sections.items() if isinstance(section, dict)}


def find_model(name: str, field: str) -> Path:
    """The folder of a model; a model on the hub is downloaded.

    Args:
        name: a folder, or a name on the hub.
        field: the field that gave the name; messages begin with it.

    Raises:
        InputError: the name is neither a folder with a model nor known to the hub.
    """
    folder = Path(name)
    if not folder.exists():
        if is_path(name):
            raise InputError(f"{field}: {shown(name)} does not exist; give a run, a folder or a name on the hub")
        folder = _fetch(name, field)
    with prefixed(f"{field}: ", "run: "):
        check_run_files(folder)
    return folder


def _fetch(name: str, field: str) -> Path:
    """Download the files of a model that multilin reads, without code and pickles."""
    import huggingface_hub

    from multilin.data.tokenizers import TOKENIZER_FILES

    with as_input_error(
        lambda reason: f"{field}: {shown(name)} is neither a folder nor a model that the hub provides ({reason})"
    ):
        try:
            # One request first: without a connection, downloads would retry for minutes.
            revision = huggingface_hub.HfApi().model_info(name, timeout=20).sha
        except Exception:
            if not isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
                raise
            return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        patterns = [ADAPTER_CONFIG, "config.json", "generation_config.json", "*.safetensors*", *TOKENIZER_FILES]
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))


def check_run_files(folder: str | Path) -> None:
    """Refuse a folder without a model.

    Raises:
        InputError: there is no such folder, or the folder has no config or no .safetensors files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"run: there is no folder {str(folder)!r}; give the folder of a run, such as runs/demo")
    if not (folder / "config.json").is_file() and not is_adapter(folder):
        unfinished = (folder / RECIPE_FILE).is_file()
        again = shlex.join(["multilin", "train", str(folder), "--resume"])
        hint = f"; finish its training with `{again}`" if unfinished else ""
        raise InputError(f"run: {folder} holds no model (no config.json){hint}")
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"run: {folder} holds no weights (no .safetensors file)")


def weights_hash(folder: Path) -> str:
    """SHA-256 of the names and contents of the .safetensors files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode() + bytes.fromhex(checksum(path)))
    return digest.hexdigest()


def check_weights_hash(folder: Path, expected: str | None, field: str) -> None:
    """Refuse a model whose weights have changed since a run started from them.

    Args:
        folder: the folder of the model.
        expected: the result of `weights_hash` when the run began.
        field: the setting that named the model; messages begin with it.

    Raises:
        InputError: the weights have changed.
    """
    if weights_hash(folder) != expected:
        raise InputError(
            f"{field}: the weights in {folder} do not have the hash in the recipe (model.start_hash); put the old "
            "weights back, or give model.start again to begin with the present weights"
        )


def source_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the files from which a run is exported, including the base model's files if the run has adapters."""
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    names = ["config.json", ADAPTER_CONFIG, "tokenizer.json", *weights]
    hashes = {name: checksum(folder / name) for name in names if (folder / name).is_file()}
    if is_adapter(folder) and (base := Path(base_of(folder))).is_dir():
        hashes |= {f"base/{name}": found for name, found in source_hashes(base).items()}
    return hashes
