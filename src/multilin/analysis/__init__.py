"""What a model has learned: losses in bits per byte, beside simple models of the same text."""
