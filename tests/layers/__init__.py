"""Modules that architectures share."""
