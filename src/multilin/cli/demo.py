"""The first thing to try: a small model learns text that is already on this machine, and writes some of its own."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from multilin.analysis.ngrams import ngram_bits_per_byte
from multilin.cli.progress import staged
from multilin.inference.generate import GenerationSettings, generate_text
from multilin.inference.runs import Run
from multilin.training.assemble import read_text
from multilin.training.outcomes import RunResult
from multilin.training.recipe import load_recipe
from multilin.training.report import draw_bits_per_byte
from multilin.training.run_folder import RunFolder
from multilin.training.trainer import train

RECIPE = "demo"
NGRAMS = {"unigram": 1, "bigram": 2, "trigram": 3}
# Enough for a paragraph; the prompt is how a documented function of the built-in text begins.
SAMPLE = GenerationSettings(max_new_tokens=160, temperature=0.7, seed=1, stop_at_end=False)
PROMPT = "Return a"


def run_demo(changes: Mapping[str, Any] | None = None) -> RunResult:
    """Train the built-in demo recipe, compare the model with counted n-grams, and let it write. An earlier demo goes.

    Args:
        changes: dotted fields of the recipe to their values.
    """
    console = Console(highlight=False)
    recipe = load_recipe(RECIPE, changes)
    console.print(
        f"Training a small {recipe.model.architecture} model from scratch on {recipe.data.source} "
        f"({recipe.training.max_steps} steps, into {recipe.output})",
        soft_wrap=True,
    )
    result = train(recipe, overwrite=True)
    with staged() as progress:
        text = read_text(recipe, progress)
    counted = {name: ngram_bits_per_byte(text.train, text.validation, order) for name, order in NGRAMS.items()}
    console.print()
    console.print(_table(counted, result))
    folder = RunFolder(result.output)
    picture = folder.path / "demo.png"
    folder.replace(picture, lambda path: draw_bits_per_byte(folder.read_metrics(), counted, path))
    console.print("(less is better; the counted ones are interpolated n-grams of the same training text)", style="dim")
    console.print("\nWhat it writes, after the words in bold:\n")
    console.print(PROMPT, style="bold", end="")
    room = max(recipe.model.n_positions - len(PROMPT), 1)
    settings = dataclasses.replace(SAMPLE, max_new_tokens=min(SAMPLE.max_new_tokens, room))
    generate_text(Run(result.output, result.model, result.tokenizer), PROMPT, settings, write=_write)
    console.print(f"\n\nThe course of the training: {picture}", soft_wrap=True)
    return result


def _table(counted: Mapping[str, float], result: RunResult) -> Table:
    parameters = sum(parameter.numel() for parameter in result.model.parameters())
    table = Table(box=None, pad_edge=False)
    table.add_column("validation text")
    table.add_column("bits per byte", justify="right")
    for name, bits in counted.items():
        table.add_row(f"{name}, counted", f"{bits:.3f}")
    table.add_row(
        f"this model ({parameters / 1e6:.1f} M parameters)", f"{result.validation_bits_per_byte:.3f}", style="bold"
    )
    return table


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
