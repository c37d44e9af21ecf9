"""The choice between PyTorch and ONNX Runtime for a model, and the export that is kept beside a run."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from multilin.files import beside, checksum
from multilin.inference.engine import Engine
from multilin.inference.manifest import FORMAT
from multilin.inference.run_files import ADAPTER_CONFIG, MANIFEST, base_of, is_adapter, is_export
from multilin.inference.text import TextCodec

if TYPE_CHECKING:
    from multilin.inference.runs import Run


def open_model(
    folder: Path, load: "Callable[[Path], Run] | None" = None, *, num_threads: int | None = None, spins: bool = False
) -> tuple[Engine, TextCodec]:
    """The engine of a folder and its tokenizer: ONNX Runtime for an export, PyTorch for a run.

    Args:
        folder: the export or the run.
        load: loads the run; `load_run` by default.
        num_threads, spins: of an export, see `OnnxEngine`.
    """
    if is_export(folder):
        from multilin.inference.onnx_engine import OnnxEngine

        engine = OnnxEngine(folder, num_threads, spins=spins)
        return engine, engine.codec
    from multilin.inference.generate_run import text_codec
    from multilin.inference.runs import load_run
    from multilin.inference.torch_engine import TorchEngine

    run = (load or load_run)(folder)
    return TorchEngine(run.model), text_codec(run.tokenizer)


def cache_folder(run: Path) -> Path:
    """Where the export of a run is kept: RUN.cache/onnx."""
    return beside(run, ".cache") / "onnx"


def is_current(run: Path) -> bool:
    """True if the export beside a run was made by this version, from the files that the run has now."""
    try:
        manifest = json.loads((cache_folder(run) / MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest["format"] == FORMAT and manifest["source"] == source_hashes(run))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def source_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the files of a run from which its export is made, those of the model below its adapters included."""
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    names = ["config.json", ADAPTER_CONFIG, "tokenizer.json", *weights]
    hashes = {name: checksum(folder / name) for name in names if (folder / name).is_file()}
    if is_adapter(folder) and (base := Path(base_of(folder))).is_dir():
        hashes |= {f"base/{name}": found for name, found in source_hashes(base).items()}
    return hashes


def why_torch(run: Path) -> str | None:
    """The reason why `auto` takes PyTorch for this run; None if it takes ONNX Runtime."""
    missing = [name for name in ("onnxruntime", "onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if "onnxruntime" in missing or (missing and not is_current(run)):
        return f"{missing[0]} is not installed (pip install 'multilin[export]')"
    if shutil.which("nvidia-smi"):
        return "there is a GPU"
    return None
