"""Scores of a trained model: on a text, broken down by position, kind of token and document; and on lm-eval tasks."""
