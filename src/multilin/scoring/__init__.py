"""How well a model predicts a text: losses, bits per byte, answers of recall tasks, counted n-grams beside them."""
