"""Weights to int8 after training: a smaller copy of a run, and what the rounding costs."""

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from multilin.analysis.evaluate import Evaluation
from multilin.analysis.evaluate_run import DEFAULTS, EvaluationSettings, evaluate_run
from multilin.cli.messages import no_progress_bars
from multilin.errors import InputError
from multilin.inference.runs import Run, load_run
from multilin.layers.linear import matrix_modules
from multilin.model import MultilinForCausalLM
from multilin.training.recipe import RECIPE_FILE


@dataclass(frozen=True)
class Quantized:
    """A run and its int8 copy.

    folder, int8_folder: where they lie.
    weight_bytes, int8_weight_bytes: size of their .safetensors files.
    evaluation, int8_evaluation: both on the same text.
    """

    folder: Path
    int8_folder: Path
    weight_bytes: int
    int8_weight_bytes: int
    evaluation: Evaluation
    int8_evaluation: Evaluation


def quantize_run(
    path: str | Path, output: str | Path | None = None, settings: EvaluationSettings = DEFAULTS
) -> Quantized:
    """Round the matrices of all layers to int8 with one scale each, save that as a model of its own, and score both.

    Embedding, output, norms and biases stay as they are. The copy multiplies in int8, in `evaluate_run` and
    `generate_text` as everywhere; it cannot be trained.

    Args:
        path: folder of a trained model.
        output: folder of the copy, new or empty; by default beside the run, with "-int8" at the end of its name.
        settings: the text to score on.

    Raises:
        InputError: no model of multilin there, one that is int8 already, or a folder that holds something.
    """
    folder = Path(path)
    target = Path(output) if output is not None else folder.with_name(f"{folder.resolve().name}-int8")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"output: {target} exists already; name a new folder")
    run = load_run(folder)
    _check(run)
    before = evaluate_run(run, settings)
    arithmetic = dataclasses.replace(run.model.arithmetic, products="int8", backward="float", stored_as_int8=True)
    run.model.set_arithmetic(arithmetic)
    try:
        _save(run, target)
    except OSError as error:
        raise InputError(f"output: {target} cannot be written: {error.strerror}") from None
    after = evaluate_run(load_run(target), settings)
    return Quantized(folder, target, _weight_bytes(folder), _weight_bytes(target), before, after)


def print_quantized(found: Quantized, console: Console) -> None:
    """Both side by side."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "trained", "int8", "change"):
        table.add_column(column, justify="left" if not column else "right")
    before, after = found.evaluation, found.int8_evaluation
    for name, old, new, form in (
        ("weights on disk, MB", found.weight_bytes / 1e6, found.int8_weight_bytes / 1e6, ",.2f"),
        ("loss, nats per token", before.loss, after.loss, ".4f"),
        ("bits per byte", before.bits_per_byte, after.bits_per_byte, ".4f"),
    ):
        table.add_row(name, f"{old:{form}}", f"{new:{form}}", f"{100 * (new / old - 1):+.2f} %")
    console.print(table)


def _check(run: Run) -> None:
    if not isinstance(run.model, MultilinForCausalLM):
        raise InputError(
            f"run: {run.folder} holds a {type(run.model).__name__} of transformers; int8 is for our models"
        )
    if run.model.arithmetic.stored_as_int8:
        raise InputError(f"run: the weights in {run.folder} are int8 already; give the run they were made from")
    if next(matrix_modules(run.model.layers), None) is None:
        raise InputError(f"run: the layers of {run.folder} have no matrices that could be int8")


def _save(run: Run, target: Path) -> None:
    beside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        with no_progress_bars():
            run.model.save_pretrained(beside)
        run.tokenizer.save_pretrained(beside)
        if (run.folder / RECIPE_FILE).is_file():
            shutil.copy(run.folder / RECIPE_FILE, beside / RECIPE_FILE)
        if target.exists():
            target.rmdir()
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
