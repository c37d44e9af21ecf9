"""The optimizers that a recipe can name: their defaults, and functions that build an optimizer for a model."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from multilin.architectures.base import TrainingDefaults
from multilin.errors import InputError
from multilin.layers import ParameterHolder
from multilin.model.match import MatchEmbedding
from multilin.model.memory import FLOAT_BYTES
from multilin.training.optimizers.matrix_moment import MatrixMoment
from multilin.training.optimizers.muon import Muon
from multilin.training.optimizers.normalized_sgd import NormalizedSGD
from multilin.training.settings import OptimizerRecipe, fill

COMMON = ("learning_rate", "weight_decay", "clip_norm")


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer.

    make: called with parameter groups, `lr`, and `options` by name.
    learning_rate, weight_decay, clip_norm: defaults if this is not the architecture's own optimizer.
    state_numbers: how many numbers of optimizer state a matrix element needs.
    options: the other fields of the recipe that this optimizer uses, with their defaults.
    normalizes: whether updates are independent of the scale of a gradient; embeddings are then updated by rows.
    by_matrices: whether the matrices of layers are updated in another way than other parameters.
    """

    make: Callable[..., torch.optim.Optimizer]
    learning_rate: float
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    state_numbers: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    normalizes: bool = True
    by_matrices: bool = False


_PLAIN = TrainingDefaults()

OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind(
        functools.partial(torch.optim.AdamW, fused=True),
        **{name: getattr(_PLAIN, name) for name in COMMON},
        state_numbers=2,
        options={"betas": _PLAIN.betas},
        normalizes=False,
    ),
    "normalized_sgd": OptimizerKind(NormalizedSGD, learning_rate=0.1, options={"row_average": 0.9}),
    "matrix_moment": OptimizerKind(MatrixMoment, learning_rate=0.01, state_numbers=1),
    "muon": OptimizerKind(
        Muon, learning_rate=5e-3, weight_decay=0.1, clip_norm=1.0, state_numbers=1, normalizes=False, by_matrices=True
    ),
}
"""Every optimizer by the name recipes give it."""


def resolve_optimizer(recipe: OptimizerRecipe, defaults: TrainingDefaults) -> OptimizerRecipe:
    """Fill in the defaults: the architecture's, or the optimizer's own if the recipe names another optimizer.

    Raises:
        InputError: a value is given that the optimizer does not use.
    """
    name = recipe.name or defaults.optimizer
    kind = OPTIMIZERS[name]
    values = {option: getattr(kind, option) for option in COMMON} | dict(kind.options)
    if name == defaults.optimizer:
        values |= {option: getattr(defaults, option) for option in values.keys() & vars(defaults).keys()}
    for option in {option for other in OPTIMIZERS.values() for option in other.options} - kind.options.keys():
        if (given := getattr(recipe, option)) is not None:
            raise InputError(
                f"optimizer.{option}: {given!r} given, but {name} does not use it; {name} uses {', '.join(values)}; "
                f"optimizer.name is one of {', '.join(OPTIMIZERS)}"
            )
    return fill(recipe, name=name, **values)


def row_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters that have a row for each token: embeddings of the input, of longest matches, and the output."""
    if not isinstance(model, PreTrainedModel):
        return []
    found = [module.predicted for module in model.modules() if isinstance(module, MatchEmbedding)]
    modules = (model.get_input_embeddings(), *found, model.get_output_embeddings())
    return [module.weight for module in modules if module is not None]


def matrix_parameters(model: nn.Module) -> list[Tensor]:
    """The weights of linear layers, except the output layer and the linear children of a `ParameterHolder`."""
    modules = list(model.modules())
    packed = [child for holder in modules if isinstance(holder, ParameterHolder) for child in holder.children()]
    others = {id(child.weight) for child in packed if type(child) is nn.Linear} | set(map(id, row_parameters(model)))
    weights = [module.weight for module in modules if isinstance(module, nn.Linear | Conv1D)]
    return [weight for weight in weights if id(weight) not in others]


def rate_factors(model: nn.Module) -> dict[int, float]:
    """The factors by which parameters' learning rates are multiplied, by the id of the parameter; 1 is left out.

    For a layer that sets `initializer_range`, the factor is this range divided by the model's. So in a hybrid the
    weights of all layers change in proportion to their size. With one rate for all, weights of size 0.5 would not learn
    beside weights of 0.02. If one of the two ranges is 0, the size is not known, and the factor is 1.
    """
    own = getattr(getattr(model, "config", None), "initializer_range", None)
    factors: dict[int, float] = {}
    for module in model.modules():
        if own and (factor := (getattr(module, "initializer_range", own) or own) / own) != 1:
            factors |= {id(parameter): factor for parameter in module.parameters(recurse=False)}
    return factors


def parameter_groups(
    model: nn.Module,
    *,
    decayed: Collection[str],
    weight_decay: float,
    by_rows: bool,
    by_matrices: bool = False,
    learning_rate: float | None = None,
) -> list[dict[str, Any]]:
    """The parameters of a model in groups. Only parameters named in `decayed` have the given `weight_decay`.

    If `by_rows`, every group has `rows`, which is True for the model's row parameters. If `by_matrices`, every group
    has `matrices`, which is True for the weights of linear layers. If a `learning_rate` is given, groups with another
    rate (see `rate_factors`) come last, and their `lr` is this other rate.
    """
    mark = "rows" if by_rows else "matrices" if by_matrices else None
    special = row_parameters(model) if by_rows else matrix_parameters(model) if by_matrices else []
    marked = {id(parameter) for parameter in special}
    factors = rate_factors(model) if learning_rate else {}
    groups: dict[tuple[float, bool, bool], list[nn.Parameter]] = {
        (factor, decays, is_marked): []
        for factor in [1.0, *sorted({*factors.values()})]
        for is_marked in (False, True)
        for decays in (True, False)
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[factors.get(id(parameter), 1.0), name in decayed, id(parameter) in marked].append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": weight_decay * decays,
            **({mark: is_marked} if mark else {}),
            **({"lr": factor * learning_rate} if learning_rate and factor != 1 else {}),
        }
        for (factor, decays, is_marked), parameters in groups.items()
        if parameters
    ]


def optimizer_bytes(recipe: OptimizerRecipe, model: nn.Module) -> int:
    """Bytes that the optimizer of a resolved recipe keeps for the trained parameters of a model.

    The few numbers per tensor are not counted.
    """
    assert recipe.name is not None, "an optimizer needs a recipe without open fields; see resolve_recipe"
    kind = OPTIMIZERS[recipe.name]
    trained = _trained_numbers(model.parameters())
    numbers = kind.state_numbers * trained
    if "row_average" in kind.options:
        numbers += _trained_numbers(row_parameters(model))
    if kind.by_matrices:  # AdamW, with two numbers, updates the other parameters
        numbers += trained - _trained_numbers(matrix_parameters(model))
    return FLOAT_BYTES * numbers


def _trained_numbers(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in set(parameters) if parameter.requires_grad)


def build_optimizer(recipe: OptimizerRecipe, model: nn.Module, *, decayed: Collection[str]) -> torch.optim.Optimizer:
    """The optimizer of a resolved recipe for a model, with weight decay for the parameters named in `decayed`."""
    assert recipe.name is not None, "an optimizer needs a recipe without open fields; see resolve_recipe"
    assert recipe.weight_decay is not None
    kind = OPTIMIZERS[recipe.name]
    groups = parameter_groups(
        model, decayed=decayed, weight_decay=recipe.weight_decay, by_rows=kind.normalizes, by_matrices=kind.by_matrices,
        learning_rate=recipe.learning_rate,
    )  # fmt: skip
    return kind.make(groups, lr=recipe.learning_rate, **{option: getattr(recipe, option) for option in kind.options})
