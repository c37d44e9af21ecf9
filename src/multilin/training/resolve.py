"""Fills in the fields that a recipe leaves open, with the defaults of the architecture and of this machine."""

import dataclasses
from typing import Any

from multilin.data.settings import DEFAULT_KIND, TokenizerRecipe
from multilin.data.tasks import is_task
from multilin.model.factory import DEFAULT_NUM_LAYERS, training_defaults
from multilin.training.environment import num_processes
from multilin.training.optimizers import resolve_optimizer
from multilin.training.precision import resolve_precision
from multilin.training.recipe import Recipe
from multilin.training.schedules import resolve_schedule
from multilin.training.settings import fill


def resolve_recipe(recipe: Recipe) -> Recipe:
    """The same recipe with every default of the architecture and of this machine filled in.

    Raises:
        InputError: the architecture is unknown, the chosen optimizer or schedule does not use a given value, or the
            blocks of a step cannot be shared out among the processes.
    """
    defaults = training_defaults(recipe.model.architecture)
    precision: Any = resolve_precision(recipe.training.precision)
    training = dataclasses.replace(recipe.training, precision=precision)
    training = fill(training, global_batch_size=training.batch_size * num_processes(), max_steps=training.num_steps)
    training.split(num_processes())  # raises if the blocks of a step cannot be shared out
    if training.lora is not None:
        training = dataclasses.replace(training, lora=fill(training.lora, alpha=2.0 * training.lora.rank))
    layers = recipe.model.layers
    return dataclasses.replace(
        recipe,
        model=fill(recipe.model, num_layers=DEFAULT_NUM_LAYERS if layers is None else len(layers)),
        tokenizer=_resolve_tokenizer(recipe),
        training=fill(training, label_smoothing=defaults.label_smoothing),
        optimizer=resolve_optimizer(recipe.optimizer, defaults),
        schedule=resolve_schedule(recipe.schedule, defaults),
    )


def _resolve_tokenizer(recipe: Recipe) -> TokenizerRecipe:
    """The complete section; kind and size are None if a tokenizer is loaded, or comes with prepared text or a task."""
    tokenizer = recipe.tokenizer
    if tokenizer.path is not None or recipe.data.is_prepared or is_task(recipe.data.name):
        return dataclasses.replace(tokenizer, kind=None, vocab_size=None)
    return fill(tokenizer, kind=DEFAULT_KIND)
