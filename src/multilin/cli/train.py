"""The verb that trains a model."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from multilin.cli.arguments import POSITIONAL
from multilin.cli.export import export_trained
from multilin.cli.messages import loading, read_recipe, say_next
from multilin.cli.tables import make_console, print_table
from multilin.errors import InputError, plural
from multilin.settings import settings
from multilin.settings.bounds import Minutes, PathText
from multilin.training.recipe import Changes

if TYPE_CHECKING:
    from multilin.analysis.minutes import Pick


@settings
class TrainArguments:
    """The recipe to train, and the run in its output folder."""

    recipe: Annotated[PathText | None, POSITIONAL] = None  # built-in recipe, YAML file or run folder; else the defaults
    minutes: Minutes | None = None  # total minutes; options not given are picked for this time, machine and text
    resume: bool = False  # continue the run in the output folder at its last checkpoint
    overwrite: bool = False  # replace the run in the output folder


def train(arguments: TrainArguments, changes: Changes) -> None:
    """Train a language model.

    A recipe sets all options; flags change its fields: `multilin train demo --training.max_steps 50`.
    Fields that the recipe leaves out have the defaults below, or the defaults of the architecture.
    `multilin info ARCHITECTURE` lists the options of an architecture
    (--model.options.num_heads 8, or --model.options '{"num_heads": 8}').
    `--minutes 20` alone picks architecture, size, vocabulary and everything else for this machine and the text.
    """
    began = time.monotonic()
    if arguments.minutes is not None and arguments.resume:
        raise InputError("--minutes: given with --resume, but a run keeps its original time limit; leave it out")
    check_minutes(arguments.minutes, changes)
    recipe = read_recipe(arguments.recipe, changes)
    with loading():
        from multilin.cli.progress import TrainingDisplay
        from multilin.data.tasks import is_task, task_text
        from multilin.training.loop import train
        from multilin.training.run_folder import RunFolder
    with TrainingDisplay() as display:
        if arguments.minutes is not None:
            from multilin.analysis.minutes import pick

            RunFolder(recipe.output).check(recipe, resume=False, overwrite=arguments.overwrite)
            picked = pick(arguments.recipe, changes, arguments.minutes, began, display)
            print_pick(picked)
            recipe = picked.recipe
        if recipe.training.minutes is not None and recipe.schedule.name == "linear":
            display.forecast_of = Path(recipe.output)
        result = train(recipe, resume=arguments.resume, overwrite=arguments.overwrite, progress=display, began=began)
    export_trained(result)
    if is_task(recipe.data.name):
        print(f"Random guessing gets {100 * task_text(recipe.data.name).train.task.chance:.1f} % of the answers right.")
        say_next(["multilin", "generate", result.output])
    else:
        say_next(["multilin", "generate", result.output, "--prompt", "The"], ["multilin", "evaluate", result.output])


def check_minutes(minutes: float | None, changes: Changes) -> None:
    """Refuse fields that contradict the minutes."""
    if minutes is None:
        return
    for name in ("max_steps", "minutes"):
        if (given := changes.get(f"training.{name}")) is not None:
            raise InputError(f"--training.{name}: {given} given together with --minutes {minutes:g}; give one of them")


def print_pick(picked: "Pick") -> None:
    """Print what was measured and what was picked."""
    recipe, size = picked.recipe, picked.candidate.size
    plan, tokens = recipe.training, picked.tokens
    blocks, decay = plan.global_batch_size or plan.batch_size, recipe.optimizer.weight_decay
    rate = recipe.optimizer.learning_rate or "(default of the architecture)"
    rows = {
        "text": f"{picked.train_bytes / 1e6:,.1f} MB to train on; a trigram model reaches "
        f"{picked.trigram:.3f} bits per byte",
        "this machine": f"{picked.candidate.tokens_per_second:,.0f} tokens/s when training this model",
        "model": f"{recipe.model.kind}, width {size.hidden_size}, {plural(size.num_layers, 'layer')}, "
        f"vocabulary {size.vocab_size:,}",
        "training": f"about {tokens / 1e6:,.2f} M tokens ({tokens / picked.train_tokens:.2g} passes), "
        f"{blocks} x {recipe.model.n_positions} tokens per step, learning rate {rate}"
        + ("" if decay is None else f", weight decay {decay:g}"),
        "time": f"at most {plan.minutes:.3g} {'minute' if plan.minutes == 1 else 'minutes'} in all",
    }
    print_table("lw", rows.items())
    for remark in picked.remarks:
        make_console().print(remark, style="yellow", soft_wrap=True, markup=False)
