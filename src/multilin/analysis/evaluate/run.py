"""Scoring a trained model on a text: the validation text of its own run, or any source."""

import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from multilin.analysis.evaluate.breakdown import Breakdown, break_down
from multilin.analysis.evaluate.long_text import check_reads_any_length, read_whole
from multilin.analysis.settings import EvaluationSettings
from multilin.data.corpora import read_documents
from multilin.data.packing import Blocks, PackedText, pack
from multilin.data.progress import Progress, no_progress
from multilin.data.tokenizers import tokenizer_hash
from multilin.errors import InputError
from multilin.inference.runs import Run
from multilin.model.memory import check_reading
from multilin.scoring.losses import Evaluation, evaluate, read_blocks
from multilin.training.assemble import read_text
from multilin.training.recipe import RECIPE_FILE, load_recipe

# For a model without a longest text and without a recipe.
BLOCK_SIZE = 1024

DEFAULTS = EvaluationSettings()


def evaluate_run(run: Run, settings: EvaluationSettings = DEFAULTS, *, progress: Progress = no_progress) -> Evaluation:
    """Score a run.

    The text is read in blocks of the length the model was trained with, or the longest it can read.

    Raises:
        InputError: the text cannot be read, or none is given and the folder has no recipe that names one.
    """
    with _text(run, settings, progress) as packed:
        report = _counting(progress, "evaluating", _checked_num_blocks(run, packed, settings))
        return evaluate(run.model, packed, **_reading(run, settings), progress=report)


def break_down_run(
    run: Run, settings: EvaluationSettings = DEFAULTS, *, long: bool = False, progress: Progress = no_progress
) -> Breakdown:
    """Score a run as `evaluate_run` does, with the score of every group of tokens.

    Args:
        run: the model and its tokenizer.
        settings: what it is scored on.
        long: read every document whole, however long, instead of blocks.
        progress: called now and then.

    Raises:
        InputError: as `evaluate_run`; and with `long` a model that cannot read texts of any length.
    """
    if long:
        check_reads_any_length(run)
    with _text(run, settings, progress) as packed:
        if long:
            report = _counting(progress, "evaluating", min(packed.num_tokens, settings.max_tokens or packed.num_tokens))
            scored = read_whole(run, packed, max_tokens=settings.max_tokens, progress=report)
        else:
            report = _counting(progress, "evaluating", _checked_num_blocks(run, packed, settings))
            scored = read_blocks(run.model, packed, **_reading(run, settings), progress=report)
        return break_down(scored, packed, run.tokenizer)


def _counting(progress: Progress, stage: str, total: int) -> Callable[[int], None]:
    return lambda done: progress(stage, done, total)


@contextmanager
def _text(run: Run, settings: EvaluationSettings, progress: Progress) -> Iterator[PackedText]:
    """The text a run is scored on; what had to be packed for it is there until the block ends."""
    if settings.source is None:
        yield validation_text(run, progress)
        return
    with tempfile.TemporaryDirectory(prefix="multilin-") as folder:
        documents = read_documents(
            settings.source, text_field=settings.text_field, encoding_errors=settings.encoding_errors
        )
        yield pack(documents, run.tokenizer, Path(folder) / "text", partial(progress, "packing the text"))


def validation_text(run: Run, progress: Progress = no_progress) -> PackedText:
    """The text a run was validated on, which its recipe names; from the cache where training has left it there.

    Raises:
        InputError: the folder has no recipe, or its text cannot be read.
    """
    if not (run.folder / RECIPE_FILE).is_file():
        raise InputError(f"source: none given, and {run.folder} has no {RECIPE_FILE} that names a text; give one")
    recipe = load_recipe(run.folder)
    text = read_text(recipe, progress)
    if tokenizer_hash(text.tokenizer) == tokenizer_hash(run.tokenizer):
        return text.validation
    warnings.warn(
        f"{recipe.data.source} is not the text it was when {run.folder} was trained: what is validation text now "
        "may have been training text then",
        stacklevel=2,
    )
    tokenizer = dataclasses.replace(recipe.tokenizer, path=str(run.folder))
    return read_text(dataclasses.replace(recipe, tokenizer=tokenizer), progress).validation


def _reading(run: Run, settings: EvaluationSettings) -> dict[str, Any]:
    return {
        "block_size": block_size(run),
        "batch_size": settings.batch_size,
        "max_tokens": settings.max_tokens,
    }


def _checked_num_blocks(run: Run, packed: PackedText, settings: EvaluationSettings) -> int:
    """How many blocks are read.

    Raises:
        InputError: a batch of them does not fit into the memory.
    """
    blocks = len(Blocks(packed, block_size(run), partial=True))
    if settings.max_tokens is not None:
        blocks = min(blocks, -(-settings.max_tokens // (block_size(run) - 1)))
    num_rows = min(settings.batch_size, blocks)
    check_reading(f"batch_size: {settings.batch_size}", run.model, num_rows, block_size(run), all_logits=True)
    return blocks


def block_size(run: Run) -> int:
    """Tokens in a block: as in training, else the longest text the model can read."""
    if (run.folder / RECIPE_FILE).is_file():
        return load_recipe(run.folder).model.n_positions
    return run.longest_text or BLOCK_SIZE
