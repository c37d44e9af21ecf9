"""TScale: rotary attention over windows, whose result is multiplied with the current token, and ReLU feed-forwards.

Each of H heads has width d_h. N(x) divides each tile of d_h numbers by its root mean square (a zero tile stays 0).
lin(W, x) is W x / sqrt(width of x), without biases. `state` is the vector that each layer receives, adds to and passes
on. Let x = N(state). Each layer computes all lines but the last; the model computes the logits after its last layer:

    q = rope(N(lin(Q, x)))    r = rope(lin(R, x))    u = N(lin(U, x))    v = N(lin(V, x))
    logit_tj = 0.5 / sqrt(d_h) q_t . r_j - slope ln 2 (t - j)                     1 <= t - j <= width
    a_t      = (sum_j e^(logit_tj) v_j) / (1 + sum_j e^(logit_tj))                a null key of logit 0 and value 0
    state   += lin(C, [ u_t,(z xor b) * a_t,z ])                           b < 4   per head
    state   += lin(F, relu(N(lin(E, N(state)))))
    logits   = lin(W, N(state)) + bias                                     bias: log of the token counts, or none

Window widths: the first layers (an even number, about a sixth of all layers) read only the previous token. Then narrow
layers (64 tokens, slope 0.5) and full layers alternate. An odd number of layers is rounded up, as in the original code.

State: each layer keeps keys and values of the last `width` tokens, in float32, with a flag that marks filled entries.

When to use: TScale can look up recent tokens exactly, as a Transformer does, with a bounded state. At least half of the
layers read at most 64 tokens; the others read at most the training length. The norms and the unit variance of the
weights are meant for training in int8. Of multilin's architectures, only linear and masked mixers have a larger state.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from multilin.architectures.base import Architecture, LayerOptions, Preset, Sizes, TrainingDefaults
from multilin.errors import InputError
from multilin.layers import Layer, Layout, Linear, Reader, TileNorm, head_width, multiply_pairs, multiply_scaled
from multilin.layers.blocks import rotary_angles, rotate
from multilin.settings import settings
from multilin.settings.bounds import Factor, Multiple, PastWindow, Positive, Strength, Width

BLOCK = 4  # b < 4: all pairs inside aligned blocks of four
HEAD_SIZE = 128


@settings
class TScaleShared(LayerOptions):
    """Options that all layers of a model share."""

    num_heads: Multiple | None = None  # number of heads; null is hidden size / head size
    head_size: Width | None = None  # a multiple of 4 (of 64 if above 64); null: hidden size / heads, else at most 128
    expansion: Multiple = 1  # width of the feed-forward, in multiples of the width of all heads
    rotary_base: Positive = 500_000.0  # base of the rotary frequencies
    scale: Factor | None = None  # factor on the logits; null is 0.5 / sqrt(head size)
    combiner: Literal["bilinear", "linear"] = "bilinear"  # linear is lin(C, [u, a]), for comparisons; not in TScale

    def tile(self, hidden_size: int) -> int:
        """Width of a head."""
        if self.head_size:
            return self.head_size
        return head_width(hidden_size, self.num_heads) if self.num_heads else min(HEAD_SIZE, hidden_size)

    def count_heads(self, hidden_size: int) -> int:
        """Number of heads: as given, or as many as fill the hidden size."""
        return self.num_heads or hidden_size // self.tile(hidden_size)


@settings
class TScaleOptions(TScaleShared):
    """Options of one layer."""

    width: PastWindow = 64  # number of past tokens that are read; 0 reads the current token instead
    slope: Strength = 0.0  # decay per token of distance, as a power of two


@settings
class TScalePreset(TScaleShared):
    """Options of a whole model."""

    widths: Literal["schedule", "full"] = "schedule"  # window widths; full gives every layer full_width (not in TScale)
    full_width: PastWindow | None = None  # width of the full layers; null is the training length


class TScaleAttention(Reader):
    """lin(C, [products of u and a]), or lin(C, [u, a]): see the top of this file."""

    def __init__(self, hidden_size: int, head_size: int, options: TScaleOptions) -> None:
        super().__init__()
        self.options, self.heads = options, (options.count_heads(hidden_size), head_size)
        scale = 0.5 * head_size**-0.5 if options.scale is None else options.scale
        self.reach = {"window": options.width, "scale": scale, "slope": options.slope * math.log(2), "null_key": True}
        width = math.prod(self.heads)
        self.norm = TileNorm(head_size)
        self.query = Linear(hidden_size, width, bias=False)  # Q, of the current token
        self.remote = Linear(hidden_size, width, bias=False)  # R, of the tokens that are read
        self.own = Linear(hidden_size, width, bias=False)  # U
        self.value = Linear(hidden_size, width, bias=False)  # V
        num_products = width * BLOCK if options.combiner == "bilinear" else 2 * width
        # Every layer begins as the identity.
        self.combiner = Linear(num_products, hidden_size, bias=False, starts_at_zero=True)

    def forward(self, x_BTD: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """The term to add to the input (B, T, D), and the window's state."""
        angles = rotary_angles(layout.positions_BT, self.heads[1], self.options.rotary_base, x_BTD.dtype)
        q_BTHE = rotate(self.norm(multiply_scaled(self.query, x_BTD)).unflatten(-1, self.heads), angles)
        r_BTHE = rotate(multiply_scaled(self.remote, x_BTD).unflatten(-1, self.heads), angles)
        v_BTHE = self.norm(multiply_scaled(self.value, x_BTD)).unflatten(-1, self.heads)
        read_BTHE, state = self.windowed_attention(q_BTHE, r_BTHE, v_BTHE, state, layout, **self.reach)
        own_BTV, read_BTV = self.norm(multiply_scaled(self.own, x_BTD)), read_BTHE.flatten(2)
        if self.options.combiner == "linear":
            return multiply_scaled(self.combiner, torch.cat([own_BTV, read_BTV], dim=-1)), state
        own_BTNK, read_BTNK = (x.unflatten(-1, (-1, BLOCK)) for x in (own_BTV, read_BTV))
        return multiply_pairs(self.combiner, own_BTNK, read_BTNK, scaled=True), state


class TScaleLayer(Layer):
    """Attention with a bilinear combiner, then a ReLU feed-forward; each is added to the input."""

    def __init__(self, hidden_size: int, options: TScaleOptions) -> None:
        super().__init__()
        head_size = options.tile(hidden_size)
        if hidden_size % head_size or head_size % (BLOCK if head_size <= 64 else 64):
            needed = f"divide the hidden size {hidden_size} and be a multiple of 4, or of 64 if it is above 64"
            given = f"{head_size} given" if options.head_size else f"none given, so it is {head_size}"
            raise InputError(f"head_size: {given}, but it must {needed}")
        self.norm = TileNorm(head_size)
        self.attention = TScaleAttention(hidden_size, head_size, options)
        wide = options.expansion * math.prod(self.attention.heads)
        self.expand = Linear(hidden_size, wide, bias=False)
        self.contract = Linear(wide, hidden_size, bias=False, starts_at_zero=True)

    def forward(self, x_BTD: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """The output (B, T, D), and the window's state."""
        update_BTD, state = self.attention(self.norm(x_BTD), state, layout)
        x_BTD = x_BTD + update_BTD
        h_BTE = torch.relu(self.norm(multiply_scaled(self.expand, self.norm(x_BTD))))
        return x_BTD + multiply_scaled(self.contract, h_BTE), state


def layer_widths(depth: int, full_width: int) -> list[tuple[int, float]]:
    """The width and slope of each of `depth` layers, as in the source's schedule ALIBI_V3."""
    if depth == 1:
        return [(full_width, 0.1)]
    num_pairs = (depth + 1) // 2
    num_first = max(1, num_pairs // 6)
    return [(1, 0.0)] * (2 * num_first) + [(64, 0.5), (full_width, 0.0)] * (num_pairs - num_first)


def preset(sizes: Sizes, choices: TScalePreset) -> Preset:
    """A model with the width schedule and rotary positions, so that texts have no limit; untied output, final N."""
    full_width = (sizes.n_positions or 1024) if choices.full_width is None else choices.full_width
    schedule = layer_widths(sizes.num_layers, full_width)
    widths = schedule if choices.widths == "schedule" else [(full_width, 0.0)] * len(schedule)
    return Preset(
        layers=[TScaleOptions.from_choices(choices, width=width, slope=slope) for width, slope in widths],
        model={
            "n_positions": None,
            "tie_word_embeddings": False,
            "final_norm": "tile_norm",
            "final_norm_tile": choices.tile(sizes.hidden_size),
            "final_scale": sizes.hidden_size**-0.5,
            "embedding_range": 1.0,
            "initializer_range": 0.5,
        },
        training=TrainingDefaults(
            "matrix_moment", learning_rate=1e-2, weight_decay=0.0, schedule="constant", warmup_steps=1000, clip_norm=0.0
        ),
    )


architecture = Architecture(
    name="tscale",
    title="TScale",
    source="TScale (Foreseerr), document and code",
    layer=TScaleLayer,
    options=TScaleOptions,
    preset_options=TScalePreset,
    preset=preset,
    variants={
        "heads of four": {"head_size": 4, "expansion": 2, "full_width": 9},
        "linear combiner": {"head_size": 8, "combiner": "linear"},
    },
)
