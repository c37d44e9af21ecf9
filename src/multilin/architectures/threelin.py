"""3Lin: attention over a window with decay; products with the current token replace the feed-forward.

N(v) = v / rms(v) over the whole vector, N(0) = 0. Let x = N(state). Each layer reads `window` tokens at positions j
before t:

    logit_tj = scale N(QK x_j) . (QV x_t) - slope (t - j) + hyper / (t - j)
    A_t      = N( sum_j softmax_j(logit) V x_j )        X_t = N(K x_t)        both of width ttdim
    state_t += C . [ A_t,i * X_t,(i xor b) ]            i < ttdim, b < 16      C: 16 ttdim -> D

The pairs (i, i xor b) are all pairs inside aligned blocks of 16, so each number is multiplied with 16 numbers, not with
all `value_size` numbers (ttdim in the formulas). With `query_on: current`, QK and QV swap roles: N(QK x_t) . (QV x_j).
At the first token, A_t = 0. Only the decay encodes positions. The layers cycle through six settings of (slope, hyper,
window): (0, 6.6, 64), (0, 0, wide), (0, 13.3, 64), (0.25, 0, 64), (0, 20, 64), (0.5, 0, 64).

State: each layer keeps keys and values of the last `window` tokens, in float32, with a flag that marks filled entries.

When to use: use 3Lin if the window should bound the cost of a token, and to study whether products of the attention's
result with the current token can replace feed-forwards. Five of six layers read 64 tokens. The wide layer reads as many
tokens as the training length and holds most of the state. Most parameters are in C: block * value_size * D per layer.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from multilin.architectures.base import Architecture, LayerOptions, Preset, Sizes, TrainingDefaults
from multilin.errors import InputError
from multilin.layers import Layer, Layout, Linear, ParameterHolder, Reader, TileNorm, multiply_pairs
from multilin.settings import settings
from multilin.settings.bounds import Factor, Multiple, PastWindow, Strength, Width

PATTERN = ((0.0, 6.6, 64), (0.0, 0.0, None), (0.0, 13.3, 64), (0.25, 0.0, 64), (0.0, 20.0, 64), (0.5, 0.0, 64))
"""Slope, hyper and window of the six layers that repeat; None is the wide window."""


@settings
class ThreeLinShared(LayerOptions):
    """Options that all layers of a model share."""

    query_size: Width | None = None  # width of QK x and QV x; null is half the hidden size
    value_size: Width | None = None  # ttdim, width of V x and K x, a multiple of the block; null is the hidden size
    block: Multiple = 16  # products per number in the combiner, a power of two
    query_on: Literal["past", "current"] = "past"  # tokens that the normalised QK maps: past or current
    scale: Factor | None = None  # factor on the logits; null is 1 / sqrt(query size); the document uses 1
    learn_decay: bool = False  # train slope and hyper


@settings
class ThreeLinOptions(ThreeLinShared):
    """Options of one layer."""

    window: PastWindow = 64  # number of past tokens that are read
    slope: Strength = 0.0  # decay of the logits per token of distance
    hyper: Factor = 0.0  # factor of 1 / distance in the logits


@settings
class ThreeLinPreset(ThreeLinShared):
    """Options of a whole model."""

    narrow: PastWindow = 64  # window of the narrow layers
    wide: PastWindow | None = None  # window of the wide layers; null is the training length


class ThreeLinLayer(Layer, ParameterHolder, Reader):
    """Attention over the window, then the products with the current token."""

    def __init__(self, hidden_size: int, options: ThreeLinOptions) -> None:
        super().__init__()
        query_size = options.query_size or max(hidden_size // 2, 1)
        value_size = options.value_size or hidden_size
        block = options.block
        if block & (block - 1) or value_size % block:
            raise InputError(
                f"block: {block} given, but it must be a power of two that divides value_size {value_size}"
            )
        self.options = options
        self.scale = query_size**-0.5 if options.scale is None else options.scale
        self.norm = TileNorm()
        self.query_key = Linear(hidden_size, query_size, bias=False)  # QK
        self.query_value = Linear(hidden_size, query_size, bias=False)  # QV
        self.key = Linear(hidden_size, value_size, bias=False)  # K
        self.value = Linear(hidden_size, value_size, bias=False)  # V
        # Every layer begins as the identity.
        self.combiner = Linear(value_size * block, hidden_size, bias=False, starts_at_zero=True)
        self.decay = nn.Parameter(torch.empty(2)) if options.learn_decay else None

    def forward(self, x_BTD: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """The output (B, T, D), and the state of the window."""
        h_BTD = self.norm(x_BTD)
        keys_BTQ, queries_BTQ = self.norm(self.query_key(h_BTD)), self.query_value(h_BTD)
        if self.options.query_on == "current":
            keys_BTQ, queries_BTQ = queries_BTQ, keys_BTQ
        slope, hyper = (self.options.slope, self.options.hyper) if self.decay is None else self.decay.unbind()
        queries_BT1Q, keys_BT1Q, values_BT1V = (x[:, :, None] for x in (queries_BTQ, keys_BTQ, self.value(h_BTD)))
        read_BT1V, state = self.windowed_attention(
            queries_BT1Q, keys_BT1Q, values_BT1V, state, layout,
            window=self.options.window, scale=self.scale, slope=slope, hyper=hyper,
        )  # fmt: skip
        both = self.norm(self.key(h_BTD)), self.norm(read_BT1V[:, :, 0])
        own_BTNK, read_BTNK = (x.unflatten(-1, (-1, self.options.block)) for x in both)
        return x_BTD + multiply_pairs(self.combiner, own_BTNK, read_BTNK), state

    def initialize(self, std: float) -> None:
        """Set the trained decay to the values of the options."""
        if self.decay is not None:
            with torch.no_grad():
                self.decay.copy_(torch.tensor([self.options.slope, self.options.hyper]))


def preset(sizes: Sizes, choices: ThreeLinPreset) -> Preset:
    """A model that repeats the six rows, without positions, so that texts have no limit; untied output, final N."""
    wide = (sizes.n_positions or 1024) if choices.wide is None else choices.wide
    rows = [PATTERN[layer % len(PATTERN)] for layer in range(sizes.num_layers)]
    return Preset(
        layers=[
            ThreeLinOptions.from_choices(
                choices, window=wide if window is None else choices.narrow, slope=slope, hyper=hyper
            )
            for slope, hyper, window in rows
        ],
        model={
            "n_positions": None,
            "tie_word_embeddings": False,
            "final_norm": "tile_norm",
            "embedding_range": 1.0,
            "initializer_range": sizes.hidden_size**-0.5,
        },
        training=TrainingDefaults(optimizer="normalized_sgd", learning_rate=0.1, weight_decay=0.0, clip_norm=0.0),
    )


architecture = Architecture(
    name="threelin",
    title="3Lin",
    source="3Lin, the triple-linear transformer (document of the author of TScale)",
    layer=ThreeLinLayer,
    options=ThreeLinOptions,
    preset_options=ThreeLinPreset,
    preset=preset,
    variants={
        "narrow": {"narrow": 7, "wide": 20, "query_on": "current", "learn_decay": True},
        "document": {"scale": 1.0, "value_size": 32, "query_size": 5, "block": 4},
    },
)
