"""The verb that trains a model."""

from typing import Annotated

from multilin.cli.arguments import POSITIONAL
from multilin.cli.messages import loading, say_next
from multilin.settings import settings
from multilin.settings.bounds import PathText
from multilin.training.recipe import Changes, load_recipe


@settings
class TrainArguments:
    """The recipe to train, and the run in its output folder."""

    recipe: Annotated[PathText | None, POSITIONAL] = None  # built-in recipe, YAML file or run folder; else the defaults
    resume: bool = False  # continue the run in the output folder at its last checkpoint
    overwrite: bool = False  # replace the run in the output folder


def train(arguments: TrainArguments, changes: Changes) -> None:
    """Train a language model.

    A recipe decides everything; any of its fields can be changed: `multilin train demo --training.max_steps 50`.
    `multilin info ARCHITECTURE` lists the options of an architecture
    (--model.options.num_heads 8, or --model.options '{"num_heads": 8}').
    """
    recipe = load_recipe(arguments.recipe, changes)
    with loading():
        from multilin.cli.progress import TrainingDisplay
        from multilin.training.trainer import train
    with TrainingDisplay() as display:
        result = train(recipe, resume=arguments.resume, overwrite=arguments.overwrite, progress=display)
    say_next(f"multilin generate {result.output} --prompt 'The'", f"multilin evaluate {result.output}")
