"""Measure generation with the models: tokens per second, bytes of state after prompts, and a sample of text."""

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from multilin.analysis.compare.record import FAILED, FINISHED, NOT_FINITE, Decoding, RowRecord, RunRecord
from multilin.analysis.costs import state_bytes
from multilin.errors import InputError
from multilin.inference.generate_run import generate_text, text_codec
from multilin.inference.settings import GenerationSettings
from multilin.model.factory import create_model
from multilin.runs.load import Run, load_run, longest_text
from multilin.training.assemble import read_text
from multilin.training.losses import evaluate
from multilin.training.recipe import Recipe, load_recipe
from multilin.training.settings import ModelRecipe

CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
TOKENS_PER_TURN, TURNS = 16, 5
PROMPT_TOKENS, SAMPLE_TOKENS = 12, 120


class Prefilled:
    """A model after a prompt of random tokens, from which it can generate repeatedly."""

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(context)
        ids = torch.randint(model.config.vocab_size, (1, context), generator=generator).to(model.device)
        with torch.inference_mode():
            self.cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        self.last_id = ids[:, -1:]
        self.bytes = sum(state_bytes(self.cache))

    def generate(self, num_tokens: int) -> float:
        """Generate tokens after the prompt, and return the seconds per token."""
        cache, ids = copy.deepcopy(self.cache), self.last_id
        ids.item()  # waits for the device, as at the end
        begin = time.perf_counter()
        with torch.inference_mode():
            for _ in range(num_tokens):
                ids = self.model(ids, past_key_values=cache, use_cache=True).logits.argmax(dim=-1)
            ids.item()
        return (time.perf_counter() - begin) / num_tokens


def measure_rows(rows: Sequence[RowRecord], output: Path, prompt: str | None) -> list[RowRecord]:
    """Return the rows with generation speed, bytes of state and a sample, measured on each row's first finished run.

    Args:
        rows: rows with runs in folders below `output`; a row without a finished run is not changed.
        output: folder of the comparison.
        prompt: the text that the samples continue; None generates no samples.
    """
    folders = {row.name: output / row.finished[0].folder for row in rows if row.finished}
    runs = {name: load_run(folder) for name, folder in folders.items()}
    recipes = {name: load_recipe(folder).model for name, folder in folders.items()}
    decoding = _measure_decoding(runs, recipes)
    return [
        dataclasses.replace(
            row,
            decoding=decoding[row.name],
            memory=Prefilled(run.model, recipes[row.name].n_positions).bytes,
            sample=None if prompt is None else _sample(run, prompt),
            remarks=row.remarks + _remarks(run.model, decoding[row.name]),
        )
        if (run := runs.get(row.name)) is not None
        else row
        for row in rows
    ]


def final_score(run: RunRecord, output: Path, recipe: Recipe) -> RunRecord:
    """Return the run with its final score, which is measured on all validation documents that tuning did not use.

    Args:
        run: a run in its folder below `output`; a failed run is not changed.
        output: folder of the comparison.
        recipe: recipe of the run.
    """
    if run.status != FINISHED:
        return run
    data = dataclasses.replace(recipe.data, validation_part="final")
    text = read_text(dataclasses.replace(recipe, data=data)).validation
    sizes = {"block_size": recipe.model.n_positions, "batch_size": recipe.training.batch_size}
    result = evaluate(load_run(output / run.folder).model, text, **sizes)
    if not math.isfinite(result.loss):
        return dataclasses.replace(run, status=FAILED, failure=NOT_FINITE)
    final = dataclasses.replace(run.last, loss=result.loss, bits_per_byte=result.bits_per_byte)
    return dataclasses.replace(run, final=final)


def prompt_of(recipe: Recipe) -> str:
    """The first words of a recipe's validation text."""
    text = read_text(recipe)
    beginning: str = text.tokenizer.decode(text.validation.opening(0, PROMPT_TOKENS))
    return beginning.rstrip("\ufffd")


def _measure_decoding(runs: Mapping[str, Run], recipes: Mapping[str, ModelRecipe]) -> dict[str, list[Decoding]]:
    """Measure tokens per second and bytes of state after each context; the models take turns.

    If a model cannot read a context, a model with the same sizes, a higher limit and random weights is measured
    instead.
    """
    figures: dict[str, list[Decoding]] = {name: [] for name in runs}
    for context in CONTEXTS:
        models = {name: _long_enough(context, recipes[name], run.model) for name, run in runs.items()}
        prefilled = {name: Prefilled(model, context) for name, model in models.items() if model is not None}
        for model in prefilled.values():
            model.generate(2)  # warms up
        turns = [{name: model.generate(TOKENS_PER_TURN) for name, model in prefilled.items()} for _ in range(TURNS)]
        for name, model in prefilled.items():
            seconds = statistics.median(turn[name] for turn in turns)
            figures[name].append(Decoding(context, round(1 / seconds, 1), model.bytes))
    return figures


def _is_long_enough(model: PreTrainedModel, context: int) -> bool:
    limit = longest_text(model.config)
    return limit is None or limit >= context + TOKENS_PER_TURN


def _long_enough(context: int, recipe: ModelRecipe, trained: PreTrainedModel) -> PreTrainedModel | None:
    """The trained model if it can read `context` tokens, else a new model of the same sizes that can, else None."""
    if _is_long_enough(trained, context):
        return trained
    try:
        longer = create_model(
            recipe.architecture, hidden_size=recipe.hidden_size, num_layers=recipe.num_layers,
            vocab_size=trained.config.vocab_size, n_positions=context + TOKENS_PER_TURN, options=recipe.options,
            layers=recipe.layers, **recipe.config,
        )  # fmt: skip
    except InputError:
        return None
    return longer.eval().to(trained.device) if _is_long_enough(longer, context) else None


def _remarks(trained: PreTrainedModel, decoding: list[Decoding]) -> list[str]:
    limit = longest_text(trained.config)
    if _is_long_enough(trained, CONTEXTS[-1]):
        return []
    if not decoding or decoding[-1].context < CONTEXTS[-1]:
        return [f"reads at most {limit:,} tokens, so generation was measured up to this length"]
    return [
        f"was trained to read at most {limit:,} tokens; generation after more tokens was measured with models of the "
        "same sizes with a higher limit and random weights"
    ]


def _sample(run: Run, prompt: str) -> str | None:
    """The text that a model generates after a prompt, with a fixed seed; None if there is no room after the prompt."""
    room = SAMPLE_TOKENS
    if run.longest_text is not None:
        room = min(room, run.longest_text + 1 - len(text_codec(run.tokenizer).encode(prompt, is_start=True)))
    if room < 1:
        return None
    settings = GenerationSettings(max_new_tokens=room, temperature=0.7, seed=1, stop_at_end=False)
    with torch.random.fork_rng():
        return generate_text(run, prompt, settings).text
