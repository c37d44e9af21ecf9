"""Explaining what a trained model reads in a text: the weights of its layers, checked by removing each token."""

from multilin.analysis.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
