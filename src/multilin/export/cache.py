"""The choice between PyTorch and ONNX Runtime for a model, and the cached export that is kept beside a run."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multilin.data.progress import Progress, no_progress
from multilin.errors import InputError
from multilin.files import atomic_folder, beside, remove_partials
from multilin.files.lock import locked_folder
from multilin.inference.engine import Engine
from multilin.inference.manifest import FORMAT
from multilin.inference.text import TextCodec
from multilin.runs.files import MANIFEST, below_adapters, is_export, source_hashes

if TYPE_CHECKING:
    from multilin.runs.load import Run


_IN_BACKGROUND: list[subprocess.Popen[bytes]] = []


def open_model(
    folder: Path, load: "Callable[[Path], Run] | None" = None, *, num_threads: int | None = None, spins: bool = False
) -> tuple[Engine, TextCodec]:
    """Return an engine for a folder, and the tokenizer: ONNX Runtime for an export, PyTorch for a run.

    Args:
        folder: the export or the run.
        load: the function that loads the run; `load_run` by default.
        num_threads, spins: for an export, the arguments of `OnnxEngine`.
    """
    if is_export(folder):
        from multilin.inference.onnx_engine import OnnxEngine

        engine = OnnxEngine(folder, num_threads, spins=spins)
        return engine, engine.codec
    run = _load(folder, load)
    from multilin.inference.generate_run import text_codec
    from multilin.inference.torch_engine import TorchEngine

    return TorchEngine(run.model), text_codec(run.tokenizer)


def _load(folder: Path, load: "Callable[[Path], Run] | None") -> "Run":
    if load is None:
        from multilin.runs.load import load_run

        return load_run(folder)
    return load(folder)


def cache_folder(run: Path) -> Path:
    """Where the export of a run is kept: RUN.cache/onnx."""
    return beside(run, ".cache") / "onnx"


def is_current(run: Path) -> bool:
    """True if this version made the export beside a run, from the files that the run has now."""
    return "files" in _kept(run)


def _kept(run: Path) -> dict[str, Any]:
    """The manifest of a current export, {"failure": reason} if the export failed, or {} if there was no export."""
    try:
        kept: dict[str, Any] = json.loads((cache_folder(run) / MANIFEST).read_text(encoding="utf-8"))
        return kept if kept["format"] == FORMAT and kept["source"] == source_hashes(run) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def keep_export(run: Path, load: "Callable[[Path], Run] | None" = None, progress: Progress = no_progress) -> None:
    """Export a run into its cache, or write the failure there; wait if another process is exporting the run.

    Args:
        run: the folder of the run.
        load, progress: see `open_model` and `export_run`.

    Raises:
        InputError: as `export_run`.
        OSError: the cache cannot be written.
    """
    folder = cache_folder(run)
    with locked_folder("export", folder.parent, waits=True):
        if is_current(run):
            return
        remove_partials(folder.parent, folder.name)
        source = source_hashes(run)  # before loading: a run that is trained again has other files
        try:
            model = _load(run, load)
            from multilin.export.folder import export_run

            export_run(model, folder, progress=progress, source=source)
        except InputError as error:
            with atomic_folder(folder) as partial:
                failure = {"format": FORMAT, "source": source, "failure": str(error)}
                (partial / MANIFEST).write_text(json.dumps(failure), encoding="utf-8")
            raise


def is_exporting(run: Path) -> bool:
    """True if another process exports a run into its cache."""
    try:
        with locked_folder("export", cache_folder(run).parent):
            return False
    except InputError:
        return True


def export_in_background(run: Path) -> None:
    """Call `keep_export` in a background process of the lowest priority, which outlives this process."""
    program = (
        "import os, pathlib, sys; getattr(os, 'nice', int)(19); from multilin.export.cache import keep_export; "
        "keep_export(pathlib.Path(sys.argv[1]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(run.resolve())], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _IN_BACKGROUND.append(process)  # Python warns if a running process is garbage collected


def why_torch(run: Path) -> str | None:
    """The reason why `auto` takes PyTorch for this run; None if it takes ONNX Runtime."""
    kept = _kept(run)
    missing = [name for name in ("onnxruntime", "onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if "onnxruntime" in missing or (missing and "files" not in kept):
        return f"{missing[0]} is not installed (pip install 'multilin[export]')"
    if shutil.which("nvidia-smi"):
        return "there is a GPU"
    config = json.loads((below_adapters(run) / "config.json").read_text(encoding="utf-8"))
    if (config.get("arithmetic") or {}).get("products") == "int8" or config.get("dtype") not in (None, "float32"):
        return "graphs compute in float32 and this model does not, so the same seed would give another text"
    return str(kept["failure"]).removeprefix("run: ") if "failure" in kept else None
