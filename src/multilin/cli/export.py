"""The verb that exports a model as graphs, and the choice of the engine that runs a model."""

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from multilin.cli.messages import check_installed, is_main_process, load, say_next
from multilin.cli.tables import make_console, print_table
from multilin.errors import InputError
from multilin.files import beside, check_folder
from multilin.inference.settings import EngineName
from multilin.runs.files import check_run_files, is_export, model_type
from multilin.settings import settings
from multilin.settings.bounds import PathText

if TYPE_CHECKING:
    from multilin.export.check import Comparison
    from multilin.export.weights import Precision
    from multilin.inference.engine import Engine
    from multilin.inference.text import TextCodec
    from multilin.training.outcomes import RunResult

EXPORT_SECONDS = 30.0
"""The approximate time of an export on two cores."""


@settings
class ExportArguments:
    """What to export."""

    run: PathText  # folder of a trained model
    output: PathText | None = None  # folder to write; RUN-onnx or RUN-web if not given
    format: Literal["onnx", "web"] = "onnx"  # graphs for ONNX Runtime, or a page that runs the graphs in a browser
    precision: Literal["float32", "8bit", "4bit"] | None = None  # of the matrices; default: 8bit for web, else float32
    runtime: PathText | None = None  # folder with the files of onnxruntime-web; fetched from npm if not given


def export(arguments: ExportArguments) -> None:
    """Write a model as ONNX graphs that run without multilin.

    Fails if the logits of the graphs differ from the logits of the model.
    """
    check_run_files(arguments.run)
    if (kind := model_type(Path(arguments.run))) not in ("multilin", None):
        raise InputError(f"run: a {kind} model given, but only models of multilin can be exported")
    output = Path(arguments.output or beside(arguments.run, f"-{arguments.format}"))
    check_folder("--output", output, must_be_new=True)
    if arguments.format == "onnx" and arguments.runtime is not None:
        raise InputError("runtime: given, but only --format web has a runtime; leave it out")
    if arguments.format == "web" and arguments.precision == "4bit":
        raise InputError("precision: 4bit given, but --format web takes float32 or 8bit")
    check_installed("export:", "export", "onnx", "onnxscript", "onnxruntime")
    run = load(arguments.run)
    run.model.cpu()  # the export also runs on the CPU
    from multilin.analysis.evaluate.run import recipe_of, validation_text
    from multilin.cli.progress import show_progress
    from multilin.export.check import compare_export
    from multilin.export.folder import export_run
    from multilin.export.web import export_web

    with show_progress() as progress:
        if arguments.format == "web":
            runtime = None if arguments.runtime is None else Path(arguments.runtime)
            precision: Precision = "float32" if arguments.precision == "float32" else "8bit"
            export_web(run, output, runtime, precision, progress)
        else:
            precision = arguments.precision or "float32"
            export_run(run, output, precision, progress)
        comparison, reason = None, f"{arguments.run} has no recipe.yaml"
        try:
            if (recipe := recipe_of(run)) is not None:
                text = validation_text(run, recipe, progress)
                progress("comparing with the original", 0, 1)
                comparison = compare_export(run, output / "model" if arguments.format == "web" else output, text)
        except InputError as error:  # the export is complete; only the text for its score may be missing
            reason = str(error)
    if comparison is None:
        print(f"multilin: warning: the export is complete, but it was not scored: {reason}", file=sys.stderr)
    else:
        _print_comparison(comparison, precision)
    if arguments.format == "web":
        print("\nServe the folder with the command below, then open http://localhost:8000", file=sys.stderr)
        say_next(["python", "-m", "http.server", "--directory", output])
    else:
        say_next(["multilin", "generate", output], ["less", output / "README.md"])


def _print_comparison(comparison: "Comparison", precision: str) -> None:
    original, exported = zip(comparison.bits_per_byte, comparison.num_bytes, comparison.tokens_per_second, strict=True)
    rows = [
        [name, f"{bits:.4f}", f"{size:,}", f"{speed:,.0f}"]
        for name, (bits, size, speed) in (("PyTorch", original), (f"ONNX, {precision}", exported))
    ]
    print_table("lrrr", rows, head=["", "bits per byte", "bytes", "tokens/s"])
    make_console().print(
        f"Bits per byte on {comparison.num_tokens:,} tokens of the validation text. Logits differ by at most "
        f"{comparison.largest_difference:.1e} (the largest logit is {comparison.largest_logit:.1f}). "
        f"The first {comparison.equal_tokens} of {comparison.num_greedy} greedy tokens are equal.",
        soft_wrap=True,
    )


def open_engine(
    folder: Path, name: EngineName, *, is_server: bool = False, waits: bool = True
) -> "tuple[Engine, TextCodec]":
    """The engine for a run or an export, and its tokenizer.

    Args:
        folder: the run or the export.
        name: the engine to open.
        is_server: True if other threads need the cores while the engine waits.
        waits: whether `auto` makes a missing export first; if False, PyTorch runs instead.

    Raises:
        InputError: the folder has no model, ONNX Runtime is not installed, or PyTorch is chosen for an export.
    """
    if not is_export(folder):
        check_run_files(folder)
    elif name == "torch":
        raise InputError(f"engine: torch given, but {folder} is an exported model; give the folder of the run")
    if name == "onnx" or is_export(folder):
        check_installed("engine: onnx", "export", "onnxruntime")
    from multilin.export.cache import cache_folder, is_current, open_model, why_torch

    open_folder = functools.partial(open_model, load=load, spins=not is_server)
    if is_export(folder) or name == "torch" or (name == "auto" and model_type(folder) != "multilin"):
        return open_folder(folder)
    reason = why_torch(folder) if name == "auto" else None
    if reason is None:
        if is_current(folder):
            with contextlib.suppress(InputError):  # files of the export are damaged or gone
                return open_folder(cache_folder(folder))
            shutil.rmtree(cache_folder(folder))
        if name == "auto" and not waits:
            return open_folder(folder)
        reason = _export_for(folder, may_fail=name == "auto")
    if reason is None:
        return open_folder(cache_folder(folder))
    print(f"multilin: using the engine torch, because {reason}", file=sys.stderr)
    return open_folder(folder)


@contextlib.contextmanager
def open_at_once(folder: Path, name: EngineName) -> "Iterator[tuple[Engine, TextCodec]]":
    """Like `open_engine`, but without waiting for an export if `auto` finds none.

    PyTorch then runs the model in the block. After the block the run is exported in the background, for later calls.
    """
    engine, codec = open_engine(folder, name, waits=False)
    yield engine, codec
    if name == "auto" and engine.name == "torch":
        export_later(folder)


def export_trained(result: "RunResult") -> None:
    """Export a new run in the background for `generate`, unless training took less time than an export."""
    if result.seconds > EXPORT_SECONDS and is_main_process():
        export_later(Path(result.output))


def export_later(folder: Path) -> None:
    """Begin to export a run in the background, for the next `generate`, if ONNX Runtime can run the model."""
    from multilin.export.cache import export_in_background, is_exporting, why_torch

    is_ours = model_type(folder) == "multilin"
    if not (is_ours and os.access(folder.resolve().parent, os.W_OK) and why_torch(folder) is None):
        return
    begins = not is_exporting(folder)
    verb = "exporting" if begins else "still exporting"
    print(f"multilin: {verb} {folder} in the background, for the faster engine onnx", file=sys.stderr)
    if begins:
        export_in_background(folder)


def _export_for(run_folder: Path, *, may_fail: bool) -> str | None:
    """Export a run into its cache folder. With `may_fail`, a failure is not raised, but its reason is returned."""
    from multilin.cli.progress import show_progress
    from multilin.export.cache import keep_export

    print(f"multilin: exporting {run_folder} once, for the engine onnx", file=sys.stderr)
    try:
        with show_progress() as progress:
            keep_export(run_folder, load, progress)
    except (InputError, OSError) as error:
        if not may_fail:
            raise
        return str(error)
    return None
