"""Training: recipes, the training entry, checkpoints and run folders."""
