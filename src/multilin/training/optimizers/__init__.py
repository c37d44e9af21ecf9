"""Optimizers beside PyTorch's own, and the table from which recipes choose one."""

from multilin.training.optimizers.build import (
    OPTIMIZERS,
    OptimizerKind,
    build_optimizer,
    matrix_parameters,
    parameter_groups,
    row_parameters,
)
from multilin.training.optimizers.matrix_moment import MatrixMoment
from multilin.training.optimizers.muon import Muon
from multilin.training.optimizers.normalized_sgd import NormalizedSGD

__all__ = [
    "OPTIMIZERS",
    "MatrixMoment",
    "Muon",
    "NormalizedSGD",
    "OptimizerKind",
    "build_optimizer",
    "matrix_parameters",
    "parameter_groups",
    "row_parameters",
]
