"""ELiTA: a running softmax average of the whole text, and a feed-forward that multiplies two hidden vectors.

The weight of a token depends on its content and its position i. A head has vectors k1, k2, k3 of width D, vectors a1,
a2, b1, b2, c with a number per sine wave, a matrix V from D to the width of the values, and a matrix O back to D.
With h = LayerNorm(x), without scale and bias, each head computes:

    p1_i = sin((i a1) / n + b1) . c      p2_i = sin((i a2) / n + b2) . c
    X_j  = exp(k1 . h_j + p1_j)          R_t  = exp(p2_t + k3 . h_t)
    y_t  = (e^(k2 . h_t) V h_t + R_t sum_{j<=t} X_j V h_j) / (e^(k2 . h_t) + R_t sum_{j<=t} X_j)        x += O y

The current token counts twice: in the sum and as a separate term. The code computes a prefix softmax on logarithms,
with the separate term as one more token. n is a constant of the model, not the length of the input, so a text that is
read in pieces gets the same weights. Then, with h = LayerNorm(new x), the feed-forward computes:

    x += W_3 [ s(W_1 h + b_1) outer s(W_2 h + b_2) ] + b_3        s = swish, W_1: D -> D, W_2: D -> factor

State: each head keeps the log of the total weight and the mean of the values. The state has constant size; texts can
have any length.

When to use: ELiTA suits very long texts, and many texts at once. The cost per token is constant, and the state is the
smallest of all architectures here. Each head has one mean over the whole text. Later tokens can outweigh earlier
tokens; none is forgotten. Only the sine waves encode the order of tokens. If order matters, put windowed layers first.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multilin.architectures.base import Architecture, LayerOptions, Preset, Sizes, TrainingDefaults
from multilin.layers import Layout, Linear, ParameterHolder, Reader, ResidualBlock, head_width, multiply_pairs
from multilin.settings import settings
from multilin.settings.bounds import Fraction, Multiple, Positive, Width


@settings
class ElitaShared(LayerOptions):
    """Options that all layers of a model share."""

    num_heads: Multiple = 4  # number of heads
    value_size: Width | None = None  # width of a head's values; null is hidden size / heads
    num_frequencies: Multiple = 16  # number of sine waves in the weight of a position
    factor: Multiple = 8  # width of the second vector of the feed-forward
    norm_eps: Positive = 1e-5  # number that LayerNorm adds to the variance; 1e-3 in the original code
    clip_logits: Positive | None = None  # largest exponent; 20 in the original code; null does not clip
    dropout: Fraction = 0.0  # dropout of attention and feed-forward in training


@settings
class ElitaOptions(ElitaShared):
    """Options of one layer."""

    position_period: Positive = 1.0  # n, by which positions are divided


@settings
class ElitaPreset(ElitaShared):
    """Options of a whole model."""

    position_period: Positive | None = None  # n, by which positions are divided; null is the training length


class ElitaAttention(ParameterHolder, Reader):
    """sum over heads of O y_t: see the top of this file."""

    def __init__(self, hidden_size: int, options: ElitaOptions) -> None:
        super().__init__()
        self.options = options
        value_size = options.value_size or head_width(hidden_size, options.num_heads)
        # For each head: k1 (weight of a token in the sum), k2 (weight of the separate term), k3 (weight of the sum).
        self.scores = Linear(hidden_size, 3 * options.num_heads, bias=False)
        self.values = Linear(hidden_size, options.num_heads * value_size, bias=False)
        self.output = Linear(options.num_heads * value_size, hidden_size, bias=False)
        waves = (2, options.num_heads, options.num_frequencies)
        self.frequencies = nn.Parameter(torch.empty(waves))  # a1, a2
        self.phases = nn.Parameter(torch.empty(waves))  # b1, b2
        self.amplitudes = nn.Parameter(torch.empty(waves[1:]))  # c
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x_BTD: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """The output (B, T, D), and the state of the running sum."""
        in_sum_BTH, by_itself_BTH, of_sum_BTH = self.scores(x_BTD).chunk(3, dim=-1)
        waves_BT2H = self._position_weights(layout.positions_BT)
        in_sum_BTH = self._clip(in_sum_BTH + waves_BT2H[:, :, 0])
        of_sum_BTH = self._clip(of_sum_BTH + waves_BT2H[:, :, 1])
        values_BTHE = self.values(x_BTD).unflatten(-1, (self.options.num_heads, -1))
        own_logits_BTH = self._clip(by_itself_BTH) - of_sum_BTH
        means_BTHE, state = self.prefix_softmax(in_sum_BTH, values_BTHE, state, layout, own_logits=own_logits_BTH)
        return self.dropout(self.output(means_BTHE.flatten(2))), state

    def _position_weights(self, positions_BT: Tensor) -> Tensor:
        """p1 and p2 of each position and head, (B, T, 2, H)."""
        time_BT = positions_BT.to(torch.promote_types(self.phases.dtype, torch.float32)) / self.options.position_period
        angles = time_BT[:, :, None, None, None] * self.frequencies + self.phases
        return (torch.sin(angles) * self.amplitudes).sum(dim=-1)

    def _clip(self, logits: Tensor) -> Tensor:
        limit = self.options.clip_logits
        return logits if limit is None else logits.clamp(-limit, limit)

    def initialize(self, std: float) -> None:
        """Draw waves of about one radian per period, with small amplitudes."""
        nn.init.normal_(self.frequencies)
        nn.init.normal_(self.phases)
        nn.init.normal_(self.amplitudes, std=std)


class TwoFactorFeedForward(nn.Module):
    """y = W_3 [ s(W_1 x + b_1) outer s(W_2 x + b_2) ] + b_3, s = swish."""

    def __init__(self, hidden_size: int, options: ElitaOptions) -> None:
        super().__init__()
        self.wide = Linear(hidden_size, hidden_size)
        self.narrow = Linear(hidden_size, options.factor)
        self.combine = Linear(hidden_size * options.factor, hidden_size)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The output (B, T, D)."""
        wide, narrow = (nn.functional.silu(part(x_BTD))[..., None, :] for part in (self.wide, self.narrow))
        return self.dropout(multiply_pairs(self.combine, wide, narrow))


class ElitaLayer(ResidualBlock):
    """ELiTA attention, then its feed-forward; each reads a LayerNorm of x (no scale, no bias) and is added to x."""

    def __init__(self, hidden_size: int, options: ElitaOptions) -> None:
        norm = partial(nn.LayerNorm, hidden_size, eps=options.norm_eps, elementwise_affine=False)
        super().__init__(norm, ElitaAttention(hidden_size, options), TwoFactorFeedForward(hidden_size, options))


def preset(sizes: Sizes, choices: ElitaPreset) -> Preset:
    """A model with positions in the attention only, so that texts have no limit; tied output, final LayerNorm."""
    period = choices.position_period or float(sizes.n_positions or 1024)
    return Preset(
        layers=[ElitaOptions.from_choices(choices, position_period=period)] * sizes.num_layers,
        model={"n_positions": None},
        training=TrainingDefaults(
            learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.0, schedule="inverse_sqrt", warmup_steps=0
        ),
    )


architecture = Architecture(
    name="elita",
    title="ELiTA",
    source="ELiTA (acosharma)",
    layer=ElitaLayer,
    options=ElitaOptions,
    preset_options=ElitaPreset,
    preset=preset,
    variants={"clipped": {"clip_logits": 20.0}, "wide values": {"num_heads": 2, "value_size": 16, "factor": 3}},
)
