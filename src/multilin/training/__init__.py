"""Training: recipes, the training loop, optimizers, checkpoints and run folders."""
