"""Score a trained model on a text, broken down by position, kind of token and document, or on lm-eval tasks."""
