"""The layers of which architectures are made: causal maps `y, state = layer(x, state, layout)` (see `layers.base`)."""

from multilin.layers.base import Layer, Layout, ParameterHolder, head_width
from multilin.layers.blocks import GeluFeedForward, ResidualBlock, TileNorm, rotary_angles, rotate, standardize
from multilin.layers.linear import Linear, multiply_pairs, multiply_scaled
from multilin.layers.reading import Reader, Reading
from multilin.layers.short_convolution import ShortConvolution

__all__ = [
    "GeluFeedForward", "Layer", "Layout", "Linear", "ParameterHolder", "Reader", "Reading", "ResidualBlock",
    "ShortConvolution", "TileNorm", "head_width", "multiply_pairs", "multiply_scaled", "rotary_angles", "rotate",
    "standardize",
]  # fmt: skip
