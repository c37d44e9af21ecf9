"""What a trained model is worth: scores, explanations of what it read, and comparisons of several models."""
