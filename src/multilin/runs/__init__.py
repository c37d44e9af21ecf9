"""A folder of a model: what is in it, loading and saving it, its adapters, its checkpoints."""
