"""minGRU: each channel of the state is a gated running average; there is no attention.

Let h = LayerNorm(x), and let c_t = sum_{i<4} w_i * h_(t-i), a convolution of each channel over the last four tokens:

    z_t = sigmoid(W_z c_t)        s_t = (1 - z_t) * s_(t-1) + z_t * g(W_h c_t)        x += W_o s_t

Then x += W_2 gelu(W_1 LayerNorm(x)). g(u) is u + 0.5 for u >= 0 and sigmoid(u) below; s is 0 before the text. In a GRU
the gates z and the candidates g(W_h c) depend on the previous state. Here they depend on the last four tokens only, so
that training computes all positions at once.

State: the vector s and the last three inputs of the convolution. The state's size is constant.

When to use: minGRU suits very long texts, if recent tokens and a few numbers about the past are enough. A channel keeps
its value until later gates replace the value. A channel is one number, so minGRU cannot look up stored pairs.
"""

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from multilin.architectures.base import Architecture, LayerOptions, Preset, Sizes, TrainingDefaults
from multilin.layers import GeluFeedForward, Layout, Linear, Reader, Reading, ResidualBlock, ShortConvolution
from multilin.ops.linear_recurrence import LinearRecurrenceState, linear_recurrence, linear_recurrence_weights
from multilin.settings import settings
from multilin.settings.bounds import Fraction, Multiple

TAPS = 4  # tokens that the convolution reads


@settings
class MinGruOptions(LayerOptions):
    """Options of one layer, or of a whole model."""

    expansion: Multiple = 1  # number of channels of the state, in multiples of the hidden size
    convolution: bool = True  # gates and candidates read the last four tokens, not only the current one
    dropout: Fraction = 0.0  # dropout of both terms that are added to x, in training


class MinGruState(NamedTuple):
    """The last inputs of the convolution, if there is one, and s."""

    inputs_BSD: Tensor | None
    hidden: LinearRecurrenceState


class MinGru(Reader):
    """W_o s_t: see the top of this file."""

    def __init__(self, hidden_size: int, options: MinGruOptions) -> None:
        super().__init__()
        width = options.expansion * hidden_size
        self.convolution = ShortConvolution(hidden_size, TAPS) if options.convolution else None
        self.projections = Linear(hidden_size, 2 * width, bias=False)  # W_z, W_h
        self.output = Linear(width, hidden_size, bias=False)  # W_o
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x_BTD: Tensor, state: MinGruState | None, layout: Layout) -> tuple[Tensor, MinGruState | None]:
        """The output (B, T, D), and the state."""
        inputs_BSD, hidden = state or (None, None)
        if self.convolution is not None:
            x_BTD, inputs_BSD = self.convolution(x_BTD, inputs_BSD, layout)
        pairs_BT2E = self.projections(x_BTD).unflatten(-1, (2, -1))
        where = {"starts": layout.starts_BT, "padding": layout.padding_BT}
        self.record(lambda: _reading(pairs_BT2E, where, has_convolution=self.convolution is not None))
        hidden_BTE, hidden = linear_recurrence(pairs_BT2E, state=hidden, needs_state=layout.needs_state, **where)
        after = None if hidden is None else MinGruState(inputs_BSD, hidden)
        return self.dropout(self.output(hidden_BTE)), after


def _reading(pairs_BT2E: Tensor, where: dict[str, Any], *, has_convolution: bool) -> Reading:
    weights_BTS, null_BT = linear_recurrence_weights(pairs_BT2E, **where)
    made = (
        " A convolution computes a candidate from the token and the three tokens before it." if has_convolution else ""
    )
    meaning = (
        "A weight is the share of the token's candidate in the state, averaged over the channels; the remaining share "
        f"belongs to the zero state before the text.{made}"
    )
    return Reading(meaning, weights_BTS[:, None], 0, None, null_BHT=null_BT[:, None])


class MinGruLayer(ResidualBlock):
    """minGRU, then a GELU feed-forward of width 4 D; each reads a LayerNorm of x and is added to x."""

    def __init__(self, hidden_size: int, options: MinGruOptions) -> None:
        feed_forward = GeluFeedForward(hidden_size, dropout=options.dropout)
        super().__init__(partial(nn.LayerNorm, hidden_size), MinGru(hidden_size, options), feed_forward)


def preset(sizes: Sizes, choices: MinGruOptions) -> Preset:
    """A model without positions, so that texts have no limit; tied output, final LayerNorm."""
    return Preset(
        layers=[choices] * sizes.num_layers,
        model={"n_positions": None, "embedding_dropout": choices.dropout},
        training=TrainingDefaults(learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.1, schedule="cosine"),
    )


architecture = Architecture(
    name="mingru",
    title="minGRU",
    source="Were RNNs All We Needed? (arXiv 2410.01201)",
    layer=MinGruLayer,
    options=MinGruOptions,
    preset_options=MinGruOptions,
    preset=preset,
    variants={"gates of one token": {"convolution": False}, "wide state": {"expansion": 3}},
)
