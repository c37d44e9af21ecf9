"""Small language models with linear-time and multilinear layers: train, run, explain and compare them."""
