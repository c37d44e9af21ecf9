"""Modules shared by architectures. A layer is a causal map `y, state = layer(x, state)`; see `layers.base`."""
