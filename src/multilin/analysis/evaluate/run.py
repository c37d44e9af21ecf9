"""Scoring a trained model on a text: the validation text of its run, or another source."""

import dataclasses
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from multilin.analysis.evaluate.breakdown import Breakdown, break_down
from multilin.analysis.settings import EvaluationSettings
from multilin.data.corpora import read_documents
from multilin.data.packed_text import Blocks, PackedText, check_cuts, pack
from multilin.data.progress import Progress, no_progress
from multilin.data.tokenizers import tokenizer_hash, trained_end
from multilin.errors import InputError, prefixed
from multilin.model import MultilinForCausalLM
from multilin.model.factory import evaluation_mode
from multilin.model.memory import check_reading
from multilin.runs.files import RECIPE_FILE
from multilin.runs.load import Run
from multilin.settings.inputs import read_json
from multilin.training.assemble import read_text
from multilin.training.losses import Scored, chosen_blocks, read_blocks
from multilin.training.recipe import Recipe, load_recipe
from multilin.training.run_folder import RunFolder

BLOCK_SIZE = 1024  # tokens, for a model without a longest text and without a recipe
CHUNK_TOKENS = 512  # tokens in one forward pass, if documents are read whole

DEFAULTS = EvaluationSettings()


def break_down_run(
    run: Run, settings: EvaluationSettings = DEFAULTS, *, long: bool = False, progress: Progress = no_progress
) -> Breakdown:
    """Score a run on a text, as a whole and by groups of tokens.

    By default the text is read in blocks, see `block_size`.

    Args:
        run: the model and its tokenizer.
        settings: the text to score on.
        long: read every document whole, however long, instead of in blocks.
        progress: called at intervals.

    Raises:
        InputError: the text cannot be read; no text is given and the folder has no recipe that names a text; or `long`
            is given and the model cannot read texts of any length.
    """
    whole_model = check_reads_any_length(run) if long else None
    recipe, max_tokens = recipe_of(run), settings.max_tokens
    with tempfile.TemporaryDirectory(prefix="multilin-") as folder:
        if settings.source is None:
            packed = validation_text(run, recipe, progress)
        else:
            source, field, errors = settings.source, settings.text_field, settings.encoding_errors
            documents = read_documents(source, text_field=field, encoding_errors=errors)
            packed = pack(documents, run.tokenizer, Path(folder, "text"), partial(progress, "packing the text"))
        if whole_model is not None:
            report = partial(progress, "evaluating", total=min(packed.num_tokens, max_tokens or packed.num_tokens))
            scored = read_whole(whole_model, packed, max_tokens=max_tokens, progress=report)
        else:
            longest = block_size(run, recipe)
            if settings.source is not None:  # validation_text checks the run's own text
                check_cuts(packed, longest, "source")
            size = max(2, min(longest, packed.num_tokens))  # a short text is not padded
            batch_size = settings.batch_size
            num_blocks = len(chosen_blocks(len(Blocks(packed, size, partial=True)), size, max_tokens))
            num_rows = min(batch_size, num_blocks)
            check_reading(f"batch_size: {batch_size}", run.model, num_rows, size, all_logits=True)
            report = partial(progress, "evaluating", total=num_blocks)
            scored = read_blocks(
                run.model, packed, block_size=size, batch_size=batch_size, max_tokens=max_tokens, progress=report
            )
        return break_down(scored, packed, run.tokenizer)


def recipe_of(run: Run) -> Recipe | None:
    """The recipe in the folder of a run; None if the folder has no recipe."""
    return load_recipe(run.folder) if (run.folder / RECIPE_FILE).is_file() else None


def validation_text(run: Run, recipe: Recipe | None, progress: Progress = no_progress) -> PackedText:
    """Read the validation text of the run, which its recipe names.

    Raises:
        InputError: there is no recipe, or its text cannot be read.
    """
    if recipe is None:
        raise InputError(f"source: none given, and {run.folder} has no {RECIPE_FILE} that names a text; give a text")
    with prefixed(f"the text of {run.folder} (paths are relative to the folder where its training was started): "):
        text = read_text(recipe, progress, run.folder)
    of_text = tokenizer_hash(text.tokenizer)
    if trained_end(run.tokenizer, of_text) is None or _text_identity(run.folder) not in (None, text.identity):
        warnings.warn(
            f"{recipe.data.name} has changed since {run.folder} was trained: its validation text may now contain "
            "text that the run was trained on, which makes the score too good",
            stacklevel=2,
        )
    if of_text == tokenizer_hash(run.tokenizer):
        return text.validation
    tokenizer = dataclasses.replace(recipe.tokenizer, path=str(run.folder))
    return read_text(dataclasses.replace(recipe, tokenizer=tokenizer), progress).validation


def _text_identity(folder: Path) -> str | None:
    """The identity of a run's text, as recorded in the run's folder; None if it is not recorded."""
    path = RunFolder(folder).data
    content = read_json(path, "run") if path.is_file() else None
    return content.get("content") if isinstance(content, dict) else None


def block_size(run: Run, recipe: Recipe | None) -> int:
    """Tokens in a block: as in training; without a recipe, the longest text of the model; else `BLOCK_SIZE`."""
    return recipe.model.n_positions if recipe else run.longest_text or BLOCK_SIZE


def read_whole(
    model: MultilinForCausalLM,
    packed: PackedText,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    max_tokens: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[Scored]:
    """Score every document as a whole: each token is predicted from all earlier tokens of the document.

    In conversations only the tokens of answers are scored.

    The model's state is passed from chunk to chunk, so memory does not grow with the length of the document.

    Args:
        model: a model that reads texts of any length; its mode (training or evaluation) does not change.
        packed: the text, packed with the model's tokenizer.
        chunk_tokens: tokens in one forward pass; the losses do not depend on it.
        max_tokens: stop after about this many tokens.
        progress: called with the number of tokens read.
    """
    num_read = 0
    for start, end in itertools.pairwise([*packed.document_starts.tolist(), packed.num_tokens]):
        state = model.new_state()
        for first in range(start, end - 1, chunk_tokens):
            last = min(first + chunk_tokens, end - 1)
            row = torch.from_numpy(packed.tokens[first : last + 1].astype(np.int64)).to(model.device)
            with evaluation_mode(model), torch.inference_mode():
                logits = model(row[None, :-1], past_key_values=state).logits[0]
                losses = F.cross_entropy(logits.float(), row[1:], reduction="none")
            places, nats = np.arange(first + 1, last + 1), losses.double().cpu().numpy()
            if packed.is_answer is not None:
                is_scored = packed.is_answer[places]
                places, nats = places[is_scored], nats[is_scored]
            yield Scored(places, places - start, nats)
            num_read += last - first
            progress(num_read)
            if max_tokens is not None and num_read >= max_tokens:
                return


def check_reads_any_length(run: Run) -> MultilinForCausalLM:
    """Return the model of a run if the model reads texts of any length in constant memory; else fail.

    Raises:
        InputError: the model can read only texts up to some length, or is not a model of multilin.
    """
    if run.longest_text is not None:
        raise InputError(
            f"long: this model reads at most {run.longest_text} tokens; leave out --long to read in blocks"
        )
    if not isinstance(run.model, MultilinForCausalLM):
        raise InputError(f"long: the memory of {run.model.config.model_type} grows with the text; leave out --long")
    return run.model
