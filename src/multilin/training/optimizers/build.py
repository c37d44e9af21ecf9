"""The optimizers a recipe can name: their own defaults, and how one is built for a model."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from multilin.architectures.base import TrainingDefaults
from multilin.errors import InputError
from multilin.training.optimizers.matrix_moment import MatrixMoment
from multilin.training.optimizers.normalized_sgd import NormalizedSGD
from multilin.training.recipe import OptimizerRecipe

COMMON = ("learning_rate", "weight_decay", "clip_norm")


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer.

    build: (parameter groups, resolved recipe) to the optimizer.
    learning_rate, weight_decay, clip_norm: its own, for an architecture whose source trains with another one.
    state_numbers: what it keeps for every number of a matrix.
    options: its further fields of the recipe with their defaults.
    normalizes: whether its update is free of the scale of each tensor's gradient; then it treats rows by themselves.
    """

    build: Callable[[list[dict[str, Any]], OptimizerRecipe], torch.optim.Optimizer]
    learning_rate: float
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    state_numbers: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    normalizes: bool = True


def _adamw(groups: list[dict[str, Any]], recipe: OptimizerRecipe) -> torch.optim.Optimizer:
    assert recipe.learning_rate is not None
    assert recipe.betas is not None
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas, fused=True)


def _normalized_sgd(groups: list[dict[str, Any]], recipe: OptimizerRecipe) -> torch.optim.Optimizer:
    assert recipe.learning_rate is not None
    assert recipe.row_average is not None
    assert recipe.row_order is not None
    return NormalizedSGD(groups, lr=recipe.learning_rate, row_average=recipe.row_average, row_order=recipe.row_order)


def _matrix_moment(groups: list[dict[str, Any]], recipe: OptimizerRecipe) -> torch.optim.Optimizer:
    assert recipe.learning_rate is not None
    return MatrixMoment(groups, lr=recipe.learning_rate)


_PLAIN = TrainingDefaults()

OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind(
        _adamw,
        learning_rate=_PLAIN.learning_rate,
        weight_decay=_PLAIN.weight_decay,
        clip_norm=_PLAIN.clip_norm,
        state_numbers=2,
        options={"betas": _PLAIN.betas},
        normalizes=False,
    ),
    "normalized_sgd": OptimizerKind(
        _normalized_sgd,
        learning_rate=0.1,
        options={"row_average": 0.9, "row_order": "normalize_then_average"},
    ),
    "matrix_moment": OptimizerKind(_matrix_moment, learning_rate=0.01, state_numbers=1),
}
"""Every optimizer by the name recipes give it."""


def resolve_optimizer(recipe: OptimizerRecipe, defaults: TrainingDefaults) -> OptimizerRecipe:
    """The same section with the defaults filled in: the architecture's, or the optimizer's own if it is another one.

    Raises:
        InputError: a value is given that the optimizer does not use.
    """
    name = recipe.name or defaults.optimizer
    kind = OPTIMIZERS[name]
    source: Any = defaults if name == defaults.optimizer else kind
    values = {"name": name, **{field: getattr(source, field) for field in COMMON}, **kind.options}
    if "betas" in kind.options and source is defaults:
        values["betas"] = defaults.betas
    for field_name in {option for other in OPTIMIZERS.values() for option in other.options} - kind.options.keys():
        if (given := getattr(recipe, field_name)) is not None:
            used = ", ".join([*COMMON, *kind.options])
            raise InputError(
                f"optimizer.{field_name}: {given!r} given, but {name} does not use it; it uses {used}; "
                f"optimizer.name is one of {', '.join(OPTIMIZERS)}"
            )
    missing = {key: value for key, value in values.items() if getattr(recipe, key) is None}
    return dataclasses.replace(recipe, **missing)


def row_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters whose rows belong to single tokens: what the model says, else its input and output embeddings."""
    own: Any = getattr(model, "row_parameters", None)
    if own is not None:
        return list(own())
    if not isinstance(model, PreTrainedModel):
        return []
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    return [module.weight for module in modules if module is not None]


def parameter_groups(
    model: nn.Module, *, decayed: Collection[str], weight_decay: float, by_rows: bool
) -> list[dict[str, Any]]:
    """The parameters of a model in groups: with and without weight decay, and by rows if asked for.

    Args:
        model: the network, or a wrapper with the same parameters.
        decayed: names of the parameters that decay.
        weight_decay: of these.
        by_rows: put `rows` into every group, true for the model's row parameters.
    """
    rows = {id(parameter) for parameter in row_parameters(model)} if by_rows else set()
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {
        (decays, by_row): [] for by_row in (False, True) for decays in (True, False)
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[name in decayed, id(parameter) in rows].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay * decays, **({"rows": by_row} if by_rows else {})}
        for (decays, by_row), parameters in groups.items()
        if parameters
    ]


def build_optimizer(recipe: OptimizerRecipe, model: nn.Module, *, decayed: Collection[str]) -> torch.optim.Optimizer:
    """The optimizer of a resolved recipe for a model.

    Args:
        recipe: with every default filled in.
        model: the network.
        decayed: names of the parameters that weight decay is for.
    """
    assert recipe.name is not None, "an optimizer needs a recipe that was resolved"
    assert recipe.weight_decay is not None
    kind = OPTIMIZERS[recipe.name]
    groups = parameter_groups(model, decayed=decayed, weight_decay=recipe.weight_decay, by_rows=kind.normalizes)
    return kind.build(groups, recipe)
