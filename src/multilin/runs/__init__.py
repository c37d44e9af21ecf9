"""Folders of models: finding, loading and saving models, their adapters and their checkpoints."""
