"""Fields that a recipe leaves open are filled in with the defaults of the architecture and of this machine."""

import dataclasses
from typing import Any

from multilin.data.settings import DEFAULT_VOCAB_SIZE
from multilin.model.factory import DEFAULT_NUM_LAYERS, training_defaults
from multilin.training.optimizers import resolve_optimizer
from multilin.training.precision import resolve_precision
from multilin.training.processes import num_processes
from multilin.training.recipe import Recipe
from multilin.training.schedules import resolve_schedule
from multilin.training.settings import fill


def resolve_recipe(recipe: Recipe) -> Recipe:
    """The same recipe with every default of the architecture and of this machine filled in.

    Raises:
        InputError: an unknown architecture, or a value that the chosen optimizer or schedule does not use.
    """
    defaults = training_defaults(recipe.model.architecture)
    precision: Any = resolve_precision(recipe.training.precision)
    training = dataclasses.replace(recipe.training, precision=precision)
    training = fill(training, global_batch_size=training.batch_size * num_processes(), max_steps=training.num_steps)
    if training.lora is not None:
        training = dataclasses.replace(training, lora=fill(training.lora, alpha=2.0 * training.lora.rank))
    layers, tokenizer = recipe.model.layers, recipe.tokenizer
    is_trained = tokenizer.kind != "byte" and tokenizer.path is None
    return dataclasses.replace(
        recipe,
        model=fill(recipe.model, num_layers=DEFAULT_NUM_LAYERS if layers is None else len(layers)),
        tokenizer=fill(tokenizer, vocab_size=DEFAULT_VOCAB_SIZE) if is_trained else tokenizer,
        training=fill(training, label_smoothing=defaults.label_smoothing),
        optimizer=resolve_optimizer(recipe.optimizer, defaults),
        schedule=resolve_schedule(recipe.schedule, defaults),
    )
