"""What a recipe leaves open, filled in with the defaults of the architecture and of this machine."""

import dataclasses
from typing import Any

from multilin.model.factory import DEFAULT_NUM_LAYERS, training_defaults
from multilin.training.optimizers.build import resolve_optimizer
from multilin.training.precision import resolve_precision
from multilin.training.recipe import DEFAULT_VOCAB_SIZE, Recipe
from multilin.training.schedules import resolve_schedule


def resolve_recipe(recipe: Recipe) -> Recipe:
    """The same recipe with every default of the architecture and of this machine filled in.

    Raises:
        InputError: an unknown architecture, or a value that the chosen optimizer or schedule does not use.
    """
    defaults = training_defaults(recipe.model.architecture)
    training = dataclasses.replace(
        _fill(recipe.training, label_smoothing=defaults.label_smoothing),
        precision=resolve_precision(recipe.training.precision),
    )
    optimizer = resolve_optimizer(recipe.optimizer, defaults)
    schedule = resolve_schedule(recipe.schedule, defaults)
    tokenizer = recipe.tokenizer
    if tokenizer.kind != "byte" and tokenizer.path is None:
        tokenizer = _fill(tokenizer, vocab_size=DEFAULT_VOCAB_SIZE)
    layers = recipe.model.layers
    model = _fill(recipe.model, num_layers=DEFAULT_NUM_LAYERS if layers is None else len(layers))
    return dataclasses.replace(
        recipe, model=model, tokenizer=tokenizer, training=training, optimizer=optimizer, schedule=schedule
    )


def _fill(section: Any, **defaults: Any) -> Any:
    missing = {name: value for name, value in defaults.items() if getattr(section, name) is None}
    return dataclasses.replace(section, **missing)
