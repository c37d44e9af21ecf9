"""LEAP: each head averages the values in its window, with one weight per token; the query gates the result.

Let h = LayerNorm(x), and let q, f, k, v be the four parts of W h. Each head of width e computes:

    a_j = elu(f_j . k_j / sqrt(e)) + 1
    K_t = (sum_j a_j k_j) / (sum_j a_j + eps)    V_t = (sum_j a_j v_j) / (sum_j a_j + eps)    j in (t - window, t]
    x  += sigmoid(q_t . K_t / sqrt(e)) V_t

Then x += W_2 gelu(W_1 LayerNorm(x) + b_1) + b_2. elu(u) + 1 is e^u for u <= 0 and u + 1 above; eps is 0.00001. The
original code computes a window's sum as the difference of two sums over the whole past, which loses digits. multilin
computes K_t and V_t as running softmax means: the logits are log a_j, and eps is the weight of a null token.

The formulas follow the last version of the original code. The option `weights: exp` gives the package's release 1.0.1,
a_j = e^(f_j . k_j / sqrt(e)). The option `rescale: r` standardises q, f, k and v over each head, and replaces 1 /
sqrt(e) by r / e. `multilin convert leap` reads checkpoints of both versions.

State: for each head, a global layer keeps one summary token (the log of the total weight, and the means of k and v),
and a windowed layer keeps the last window - 1 tokens.

When to use: LEAP suits the same purposes as additive attention, its predecessor. LEAP averages once per layer instead
of twice, and the query gates the result. A token still has the same weight for every position that reads it. Learned
positions limit the text to n_positions.
"""

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from multilin.architectures.base import Architecture, LayerOptions, Preset, Sizes, TrainingDefaults, spread_windows
from multilin.layers import GeluFeedForward, Layout, Linear, Reader, ResidualBlock, head_width, standardize
from multilin.settings import settings
from multilin.settings.bounds import Fraction, LayerWindows, Multiple, Positive, Window

EPS = 1e-5  # the source adds it to the sum of the weights and to standard deviations
PACKAGE_WINDOWS = (None, 4, 8, 16)  # windows of the layers, repeated
Windows = Literal["package", "global"] | Window | LayerWindows


@settings
class LeapShared(LayerOptions):
    """Options that all layers of a model share."""

    num_heads: Multiple = 4  # number of heads; it must divide the hidden size
    weights: Literal["elu", "exp"] = "elu"  # a token's weight: elu(u) + 1, or e^u as in the package's release 1.0.1
    rescale: Positive | None = None  # standardise the heads, and scale products by rescale / e; null does neither
    dropout: Fraction = 0.1  # dropout of q, f, v, logits and feed-forward in training


@settings
class LeapOptions(LeapShared):
    """Options of one layer."""

    window: Window | None = None  # number of tokens read, with the current one; null reads the whole past


@settings
class LeapPreset(LeapShared):
    """Options of a whole model."""

    windows: Windows = "package"  # package (global, 4, 8, 16, repeated), global, one size or a list


class LeapAttention(Reader):
    """sigmoid(q_t . K_t / sqrt(e)) V_t: see the top of this file."""

    def __init__(self, hidden_size: int, options: LeapOptions) -> None:
        super().__init__()
        self.options = options
        width = head_width(hidden_size, options.num_heads, fewest=1 if options.rescale is None else 2)
        self.scale = width**-0.5 if options.rescale is None else options.rescale / width
        self.projections = Linear(hidden_size, 4 * hidden_size, bias=False)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x_BTD: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """The output (B, T, D), and the state of the means."""
        parts = self.projections(x_BTD).unflatten(-1, (4, self.options.num_heads, -1))
        if self.options.rescale is not None:
            parts = standardize(parts, EPS)
        q_BTHE, f_BTHE, k_BTHE, v_BTHE = parts.unbind(2)
        q_BTHE, f_BTHE, v_BTHE = map(self.dropout, (q_BTHE, f_BTHE, v_BTHE))
        logits_BTH = self.dropout(self.scale * (f_BTHE * k_BTHE).sum(dim=-1))
        if self.options.weights == "elu":  # the logarithm of elu(u) + 1
            logits_BTH = torch.where(logits_BTH > 0, torch.log1p(logits_BTH.relu()), logits_BTH)
        means_BTHF, state = self.prefix_softmax(
            logits_BTH,
            torch.cat([k_BTHE, v_BTHE], dim=-1),
            state,
            layout,
            window=self.options.window,
            null_logit=math.log(EPS),
        )
        keys_BTHE, values_BTHE = means_BTHF.chunk(2, dim=-1)
        gates_BTH1 = torch.sigmoid(self.scale * (q_BTHE * keys_BTHE).sum(dim=-1, keepdim=True))
        return (gates_BTH1 * values_BTHE).flatten(2), state


class LeapLayer(ResidualBlock):
    """LEAP, then a GELU feed-forward of width 4 D; each reads a LayerNorm of x and is added to x."""

    def __init__(self, hidden_size: int, options: LeapOptions) -> None:
        attention = LeapAttention(hidden_size, options)
        feed_forward = GeluFeedForward(hidden_size, dropout=options.dropout, bias=True)
        super().__init__(partial(nn.LayerNorm, hidden_size), attention, feed_forward)


def preset(sizes: Sizes, choices: LeapPreset) -> Preset:
    """A model with global and narrow windows in turn, learned positions, and a tied output without bias."""
    windows = choices.windows
    if windows == "package":
        windows = tuple(PACKAGE_WINDOWS[layer % len(PACKAGE_WINDOWS)] for layer in range(sizes.num_layers))
    return Preset(
        layers=[
            LeapOptions.from_choices(choices, window=window) for window in spread_windows(windows, sizes.num_layers)
        ],
        model={
            "positions": "learned",
            "embedding_dropout": choices.dropout,
            "initializer_range": sizes.hidden_size**-0.5,
        },
        training=TrainingDefaults(learning_rate=5e-4, weight_decay=0.01, schedule="cosine"),
    )


architecture = Architecture(
    name="leap",
    title="LEAP",
    source="Linear Explainable Attention in Parallel (mtanghu, package leap-transformer and its repository)",
    layer=LeapLayer,
    options=LeapOptions,
    preset_options=LeapPreset,
    preset=preset,
    variants={
        "global": {"windows": "global"},
        "windowed": {"windows": 5},
        "release": {"weights": "exp", "rescale": 10.0},
    },
)
