"""Checks of numbers from the original implementations: `python -m tests.golden FILE...`."""
