"""The first thing to try: a small model learns text that is already on this machine, and generates more."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from multilin.cli.export import export_trained
from multilin.cli.messages import loading, read_recipe, say_next
from multilin.cli.tables import make_console, print_table
from multilin.errors import InputError
from multilin.inference.settings import GenerationSettings
from multilin.training.recipe import Changes

if TYPE_CHECKING:
    from multilin.training.outcomes import RunResult

RECIPE = "demo"
NGRAMS = {"unigram": 1, "bigram": 2, "trigram": 3}
# Enough for a paragraph; the prompt is how a documented function of the built-in text begins.
SAMPLE = GenerationSettings(temperature=0.7, seed=1, stop_at_end=False)
PROMPT = "Return a"


def demo(changes: Changes) -> None:
    """Train a small model on text that is already on this machine, score it, and show text that it generates.

    The demo takes about two minutes on two cores. It replaces the result of an earlier demo.
    Fields that the recipe `demo` leaves out have the defaults below.
    """
    recipe = read_recipe(RECIPE, changes)
    with loading():
        from multilin.cli.progress import TrainingDisplay
        from multilin.data.tasks import is_task
        from multilin.inference.generate_run import generate_text
        from multilin.runs.load import Run
        from multilin.training.assemble import read_text
        from multilin.training.loop import train
        from multilin.training.ngrams import NgramModel
        from multilin.training.report import draw_bits_per_byte
        from multilin.training.run_folder import RunFolder
    if is_task(recipe.data.name):
        raise InputError(f"data.source: {recipe.data.name} is a task, which has no text; name a text")
    console = make_console()
    console.print(
        f"Training a small {recipe.model.kind} model from scratch on {recipe.data.name} "
        f"for {recipe.training.length}, saved in {recipe.output}",
        soft_wrap=True,
        markup=False,
    )
    with TrainingDisplay() as display:
        result = train(recipe, overwrite=True, progress=display)
        text = read_text(recipe, display.prepare)
    export_trained(result)
    counted = {name: NgramModel(text.train, order).bits_per_byte(text.validation) for name, order in NGRAMS.items()}
    console.print()
    _print_scores(counted, result)
    folder = RunFolder(result.output)
    picture = folder.path / "demo.png"
    draw_bits_per_byte(folder.read_metrics(), counted, picture)
    console.print("(Lower is better. Counting models count which tokens follow each other in the text.)", style="dim")
    console.print("\nGenerated text, after the prompt in bold:\n")
    console.print(PROMPT, style="bold", end="")
    run, write = Run(result.output, result.model, result.tokenizer), functools.partial(print, end="", flush=True)
    generate_text(run, PROMPT, SAMPLE, write=write)
    console.print(f"\n\nPlot of the training: {picture}", soft_wrap=True, markup=False)
    say_next(["multilin", "generate", result.output, "--prompt", PROMPT], ["multilin", "info", result.output])


def _print_scores(counted: Mapping[str, float], result: "RunResult") -> None:
    rows = [(f"{name} counting model", f"{bits:.3f}") for name, bits in counted.items()]
    model = f"this model ({result.model.num_parameters() / 1e6:.1f} M parameters)"
    rows.append((model, f"{result.validation_bits_per_byte:.3f}"))
    print_table("lr", rows, head=("validation text", "bits per byte"), bold={len(counted)})
