"""Training: recipes, the training entry, checkpoints and what a run leaves behind."""
