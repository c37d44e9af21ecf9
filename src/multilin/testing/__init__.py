"""Checks of a layer for tests: `check_layer` runs all, and each law is a function of its own."""

from multilin.testing.check import ROWS, Report, check_layer
from multilin.testing.laws import (
    Finding, Subject, causal, deterministic, finite, gradients, pieces_are_whole, rows_independent, state_size,
    training_is_evaluation,
)  # fmt: skip

__all__ = [
    "ROWS", "Finding", "Report", "Subject", "causal", "check_layer", "deterministic", "finite", "gradients",
    "pieces_are_whole", "rows_independent", "state_size", "training_is_evaluation",
]  # fmt: skip
