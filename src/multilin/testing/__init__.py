"""Checks of a layer for tests: `check_layer` runs all; each function of `multilin.testing.laws` is one."""

from multilin.testing.check import ROWS, Report, check_layer
from multilin.testing.laws import Finding, Subject

__all__ = ["ROWS", "Finding", "Report", "Subject", "check_layer"]
