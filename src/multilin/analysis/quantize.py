"""Round to int8 after training: make a smaller copy of a run, and score the run and the copy."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from multilin.analysis.evaluate.run import break_down_run
from multilin.analysis.settings import EvaluationSettings
from multilin.data.progress import Progress
from multilin.errors import InputError
from multilin.files import beside, check_folder
from multilin.layers.linear import matrix_modules
from multilin.model import MultilinForCausalLM
from multilin.runs.load import Run, load_run, save_run
from multilin.training.losses import Evaluation


@dataclass(frozen=True)
class Quantized:
    """A run and its int8 copy.

    folder, int8_folder: folders of the run and of the copy.
    weight_bytes: bytes of the run's weights, adapters included.
    int8_weight_bytes: bytes of the copy's .safetensors files.
    evaluation, int8_evaluation: scores of the run and of the copy on the same text.
    """

    folder: Path
    int8_folder: Path
    weight_bytes: int
    int8_weight_bytes: int
    evaluation: Evaluation
    int8_evaluation: Evaluation


def quantize_run(
    path: str | Path, output: str | Path | None, settings: EvaluationSettings, progress: Progress
) -> Quantized:
    """Save a copy of a run with the matrices of all layers rounded to int8; score the run and the copy.

    Each matrix has one scale. Embedding, output, norms and biases are not changed. The copy always
    multiplies in int8; it cannot be trained.

    Args:
        path: folder of a trained model.
        output: folder of the copy, new or empty; None makes one beside the run, with "-int8" added to its name.
        settings: the text to score on.
        progress: called at intervals while run and copy are scored.

    Raises:
        InputError: `path` has no model of multilin or holds an int8 model, or `output` is not empty.
        OSError: the copy cannot be written.
    """
    folder = Path(path)
    target = beside(folder, "-int8") if output is None else Path(output)
    check_folder("output", target if output is None else output, must_be_new=True)
    run = load_run(folder)
    _check(run)
    before = break_down_run(run, settings, progress=progress).evaluation
    weights = {weight.data_ptr(): weight.nbytes for weight in run.model.state_dict().values()}  # no tied one twice
    arithmetic = dataclasses.replace(run.model.arithmetic, products="int8", backward="float", stored_as_int8=True)
    run.model.set_arithmetic(arithmetic)
    save_run(run, target)
    after = break_down_run(load_run(target), settings, progress=progress).evaluation
    int8_bytes = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    return Quantized(folder, target, sum(weights.values()), int8_bytes, before, after)


def _check(run: Run) -> None:
    if not isinstance(run.model, MultilinForCausalLM):
        raise InputError(
            f"run: {run.folder} holds a {type(run.model).__name__}; only models of multilin can be rounded to int8"
        )
    if run.model.arithmetic.stored_as_int8:
        raise InputError(f"run: the weights in {run.folder} are int8 already; give the run before rounding")
    if next(matrix_modules(run.model.model.layers), None) is None:
        raise InputError(f"run: the layers of {run.folder} have no matrices to round to int8")
