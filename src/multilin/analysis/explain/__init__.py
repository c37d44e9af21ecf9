"""Explain what a trained model reads in a text: show the weights of its layers, and check them by removing tokens."""

from multilin.analysis.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
