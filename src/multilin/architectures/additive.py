"""Additive attention: softmax attention with one score per token, the same for every query; the cost is linear.

Pooling averages the tokens of a window in each head. The scores come from a learned vector w per head:

    l_j = w . x_j / sqrt(D)        G_t = (sum_j e^(l_j) x_j) / (sum_j e^(l_j))        j in (t - window, t]

Let h = LayerNorm(x), and let q, k, v be h W_q, h W_k, h W_v, split into heads. A layer pools twice:

    G = pool(q; w_q)        P' = LayerNorm(G * k + k)        K = pool(P'; w_k)        x += K * v

Then x += W_2 gelu(W_1 LayerNorm(x)). Products are pointwise. No pair of positions is compared, so the cost is linear in
the length of the text.

The option `stabilizer: head_norm` follows the released package: P' = G * k, and l = rescale * (w . x) / head width.
There, each pooling first standardises its input and w over each head, and adds 1e-5 to the denominator.

State: for each pooling and head, a global layer keeps one summary token (the log of the total weight, and the mean),
and a windowed layer keeps the last window - 1 tokens. A window at least as long as the longest text counts as global.

When to use: additive attention suits long texts on small machines, and weights that are easy to read: each token has
one weight per head and pooling. A token has the same score for every position that reads it. Additive attention is
therefore bad at looking up one particular earlier token. Learned positions limit the text to n_positions.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from multilin.architectures.base import Architecture, LayerOptions, Preset, Sizes, TrainingDefaults, spread_windows
from multilin.errors import InputError
from multilin.layers import (
    GeluFeedForward,
    Layout,
    Linear,
    ParameterHolder,
    Reader,
    ResidualBlock,
    head_width,
    standardize,
)
from multilin.ops.prefix_softmax import PrefixSoftmaxState
from multilin.settings import settings
from multilin.settings.bounds import LARGEST_WINDOW, Fraction, LayerWindows, Multiple, Positive, Window

PACKAGE_EPS = 1e-5  # the released package adds it to standard deviations and to the softmax denominator
Windows = Literal["doubling", "package", "global"] | Window | LayerWindows


@settings
class AdditiveShared(LayerOptions):
    """Options that all layers of a model share."""

    num_heads: Multiple = 4  # number of heads; it must divide the hidden size
    stabilizer: Literal["mid_norm", "head_norm"] = "mid_norm"  # place of the norms; head_norm: as in the package
    rescale: Positive | None = None  # largest logit with head_norm; null is 15
    dropout: Fraction = 0.1  # dropout of poolings and feed-forward in training


@settings
class AdditiveOptions(AdditiveShared):
    """Options of one layer."""

    window: Window | None = None  # number of tokens read, with the current one; null reads the whole past


@settings
class AdditivePreset(AdditiveShared):
    """Options of a whole model."""

    windows: Windows = "doubling"  # doubling (4, 8, ..., global), package (global, 4, ...), global, one size or a list


class AdditiveState(NamedTuple):
    """The states of the two poolings."""

    queries: PrefixSoftmaxState
    products: PrefixSoftmaxState


class AdditivePooling(ParameterHolder, Reader):
    """The softmax mean of the tokens, in each head; a learned vector per head gives the logits."""

    def __init__(self, hidden_size: int, options: AdditiveOptions) -> None:
        super().__init__()
        self.window, self.is_standardized = options.window, options.stabilizer == "head_norm"
        width = head_width(hidden_size, options.num_heads, fewest=2 if self.is_standardized else 1)
        self.scorer = nn.Parameter(torch.empty(options.num_heads, width))
        self.scale = (options.rescale or 15.0) / width if self.is_standardized else hidden_size**-0.5
        self.null_logit = math.log(PACKAGE_EPS) if self.is_standardized else None

    def forward(self, x_BTHD: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """The means (B, T, H, D / H), and the state."""
        scorer_HD: Tensor = self.scorer
        if self.is_standardized:
            x_BTHD, scorer_HD = standardize(x_BTHD, PACKAGE_EPS), standardize(scorer_HD, PACKAGE_EPS)
        logits_BTH = self.scale * (x_BTHD * scorer_HD).sum(dim=-1)
        return self.prefix_softmax(logits_BTH, x_BTHD, state, layout, window=self.window, null_logit=self.null_logit)


class AdditiveAttention(nn.Module):
    """u = pool(P'; w_k) * v with P' from pool(q; w_q) and k: see the top of this file."""

    def __init__(self, hidden_size: int, options: AdditiveOptions) -> None:
        super().__init__()
        self.num_heads = options.num_heads
        self.projections = Linear(hidden_size, 3 * hidden_size, bias=False)
        self.pool_queries = AdditivePooling(hidden_size, options)
        self.pool_products = AdditivePooling(hidden_size, options)
        self.mid_norm = nn.LayerNorm(hidden_size) if options.stabilizer == "mid_norm" else None
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x_BTD: Tensor, state: AdditiveState | None, layout: Layout) -> tuple[Tensor, Any]:
        """The output (B, T, D), and the state."""
        q_BTHD, k_BTHD, v_BTHD = self.projections(x_BTD).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        queries, products = state or (None, None)
        pooled_BTHD, queries = self.pool_queries(q_BTHD, queries, layout)
        products_BTHD = self.dropout(pooled_BTHD) * k_BTHD
        if self.mid_norm is not None:
            products_BTHD = self.mid_norm((products_BTHD + k_BTHD).flatten(2)).view_as(k_BTHD)
        pooled_BTHD, products = self.pool_products(products_BTHD, products, layout)
        result_BTD = (self.dropout(pooled_BTHD) * v_BTHD).flatten(2)
        return result_BTD, AdditiveState(queries, products) if layout.needs_state else None


class AdditiveLayer(ResidualBlock):
    """Additive attention, then a GELU feed-forward of width 4 D; each reads a LayerNorm of x and is added to x."""

    def __init__(self, hidden_size: int, options: AdditiveOptions) -> None:
        if options.rescale is not None and options.stabilizer != "head_norm":
            raise InputError(f"rescale: {options.rescale} given, but only the stabilizer head_norm uses it")
        attention = AdditiveAttention(hidden_size, options)
        feed_forward = GeluFeedForward(hidden_size, dropout=options.dropout)
        super().__init__(partial(nn.LayerNorm, hidden_size), attention, feed_forward)


def preset(sizes: Sizes, choices: AdditivePreset) -> Preset:
    """A model with windows that double from layer to layer, learned positions, and a tied output with bias.

    A window as long as the longest text becomes global, because the state of a global layer is one token only.
    """
    windows, longest = _windows(sizes.num_layers, choices.windows), sizes.n_positions
    if longest is not None:
        windows = [None if window is None or window >= longest else window for window in windows]
    return Preset(
        layers=[AdditiveOptions.from_choices(choices, window=window) for window in windows],
        model={
            "positions": "learned",
            "output_bias": "learned",
            "final_scale": sizes.hidden_size**-0.5 if choices.stabilizer == "mid_norm" else 1.0,
            "embedding_dropout": choices.dropout,
            "initializer_range": 0.02,
        },
        training=TrainingDefaults(learning_rate=5e-4, betas=(0.9, 0.999), weight_decay=0.01, clip_norm=1.0),
    )


def _windows(num_layers: int, windows: Windows) -> list[int | None]:
    if windows == "doubling":
        return [*(min(4 * 2**layer, LARGEST_WINDOW) for layer in range(num_layers - 1)), None]
    if windows == "package":
        return [None, *(min(2 * 2**layer, LARGEST_WINDOW) for layer in range(1, num_layers - 1)), None][:num_layers]
    return spread_windows(windows, num_layers)


architecture = Architecture(
    name="additive",
    title="Additive attention",
    source="Additive Attention Is All You Need? (mtanghu, package fastformerLM), after Fastformer, arXiv 2108.09084",
    layer=AdditiveLayer,
    options=AdditiveOptions,
    preset_options=AdditivePreset,
    preset=preset,
    variants={
        "global": {"windows": "global"},
        "windowed": {"windows": 5},
        "head_norm": {"stabilizer": "head_norm"},
        "package": {"stabilizer": "head_norm", "windows": "package"},
    },
)
