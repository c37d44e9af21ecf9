"""What a trained model read of a text, by the weights of its layers, checked by removing every token."""

from multilin.analysis.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
