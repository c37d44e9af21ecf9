"""Linear mixer: each position is a weighted sum of the positions so far; the weights are parameters.

    e_t = W onehot(token_t)        h_t = e_t + sum_{j<=t} c[t, j] e_j (+ b_t)        logits_t = H h_t

c is a lower triangle of n_ctx (n_ctx + 1) / 2 parameters, shared by all D features; b is one number per position. The
weights are the same for every text. A layer is this mixing and an optional feed-forward x += F(x). Options:

    mixing "linear"   c x            "gelu"   c' gelu(c x), two triangles
           "relu"     c x, and a ReLU before the output projection, at the end of the last layer only
    feed_forward      "none", "linear" (A x + a), "gelu" (A_2 gelu(A_1 x + a_1) + a_2)

With norms, a GELU feed-forward and several layers, the model is the masked mixer. With linear mixing, a linear
feed-forward or none, and no norm, the whole model is one linear map: one matrix maps input tokens to output tokens, and
a lower-triangular matrix maps input positions to output positions. `compose` in `multilin.inference.rollout` computes
this map. `multilin rollout` computes many outputs of such a model in parallel.

State: each mixing keeps all inputs that it has read, in a buffer of n_ctx rows. A text cannot be longer than n_ctx.
Texts cannot share a row of a batch: weights belong to absolute positions.

When to use: use this architecture to study what a language model with little or no nonlinearity can do, and to compute
many outputs at once (`multilin rollout`). The weights do not depend on content, the cost grows with the square of
n_ctx, and the state holds every input. For long texts or a small state, use another architecture.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from multilin.architectures.base import Architecture, LayerOptions, Preset, Sizes
from multilin.errors import InputError
from multilin.layers import Layer, Layout, Linear, ParameterHolder, Reader, Reading
from multilin.layers.linear import weight_of
from multilin.ops.causal_mixing import CausalMixingState, causal_mixing, lower_triangle
from multilin.settings import settings
from multilin.settings.bounds import Length, Multiple


@settings
class LinearMixerPreset(LayerOptions):
    """Options of a whole model."""

    mixing: Literal["linear", "relu", "gelu"] = "linear"  # function of the sum; see the architecture's page
    mixing_bias: bool = False  # add a learned number per position to the sum
    residual: bool = True  # add the mixing to its input instead of replacing it
    feed_forward: Literal["none", "linear", "gelu"] = "none"  # applied to each position after the mixing, and added
    expansion: Multiple = 4  # hidden width of the GELU feed-forward, in multiples of the hidden size
    norm: bool = False  # LayerNorm before the mixing and before the feed-forward


@settings
class LinearMixerOptions(LinearMixerPreset):
    """Options of one layer; with mixing "relu" its output goes through a ReLU."""

    context: Length = 1024  # n_ctx: number of positions with weights, which is the length of the longest text


class LinearMixerState(NamedTuple):
    """The inputs of the mixing, and of its second triangle if there is one."""

    first: CausalMixingState
    second: CausalMixingState | None


class Triangle(ParameterHolder, Reader):
    """y_t = sum_{j<=t} c[t, j] x_j + b_t. A Linear stores the triangle row by row, so that adapters find it."""

    def __init__(self, context: int, has_bias: bool) -> None:
        super().__init__()
        self.triangle = nn.Linear((context + 1) // 2, context | 1, bias=False)  # n_ctx (n_ctx + 1) / 2 weights
        self.bias = nn.Parameter(torch.empty(context)) if has_bias else None

    def matrix(self) -> Tensor:
        """The matrix c, (n_ctx, n_ctx)."""
        return lower_triangle(weight_of(self.triangle, self.triangle.weight).flatten())

    def forward(self, x_BTD: Tensor, state: CausalMixingState | None, layout: Layout) -> tuple[Tensor, Any]:
        """The output (B, T, D), and the state."""
        self.record(lambda: self._reading(x_BTD, layout))
        triangle = weight_of(self.triangle, x_BTD).flatten()
        return causal_mixing(
            x_BTD, triangle, self.bias, positions=layout.positions_BT, padding=layout.padding_BT,
            state=state, needs_state=layout.needs_state,
        )  # fmt: skip

    def _reading(self, x_BTD: Tensor, layout: Layout) -> Reading:
        """The rows of c, with a column for each token of the text."""
        positions_BT = layout.positions_BT.expand(x_BTD.shape[:2]).clamp(min=0)
        weights_BTS = self.matrix()[positions_BT[:, :, None], positions_BT[:, None, :]]
        if layout.padding_BT is not None:
            weights_BTS = weights_BTS.masked_fill(layout.padding_BT[:, None, :], 0.0)
        meaning = (
            "A weight is the learned number c[t, j] for this pair of positions. It may be negative, is no share, and "
            "does not depend on the text."
        )
        return Reading(meaning, weights_BTS[:, None], 0, None, is_share=False)


class LinearMixerLayer(Layer):
    """A mixing over positions, then a feed-forward or none."""

    def __init__(self, hidden_size: int, options: LinearMixerOptions) -> None:
        super().__init__()
        self.hidden_size, self.options = hidden_size, options
        norm = nn.LayerNorm if options.norm else nn.Identity
        self.mixing_norm = norm(hidden_size)
        self.mixing = Triangle(options.context, options.mixing_bias)
        self.second_mixing = Triangle(options.context, options.mixing_bias) if options.mixing == "gelu" else None
        self.feed_forward_norm = nn.Identity() if options.feed_forward == "none" else norm(hidden_size)
        self.feed_forward = _feed_forward(hidden_size, options)
        self.activation = nn.ReLU() if options.mixing == "relu" else nn.Identity()

    def forward(self, x_BTD: Tensor, state: LinearMixerState | None, layout: Layout) -> tuple[Tensor, Any]:
        """The output (B, T, D), and the state: the inputs of the mixing so far."""
        first, second = state or (None, None)
        mixed_BTD, first = self.mixing(self.mixing_norm(x_BTD), first, layout)
        if self.second_mixing is not None:
            mixed_BTD, second = self.second_mixing(nn.functional.gelu(mixed_BTD), second, layout)
        x_BTD = x_BTD + mixed_BTD if self.options.residual else mixed_BTD
        if self.feed_forward is not None:
            x_BTD = x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))
        return self.activation(x_BTD), LinearMixerState(first, second) if layout.needs_state else None

    def linear_map(self) -> tuple[Tensor, Tensor, Tensor]:
        """P (n_ctx, n_ctx), R (D, D), O (n_ctx, D): this layer maps a whole text x (n_ctx, D) to P x R^T + O.

        Raises:
            InputError: an option makes the layer nonlinear.
        """
        accepted = {"mixing": ("linear",), "feed_forward": ("none", "linear"), "norm": (False,)}
        for name, values in accepted.items():
            if (given := getattr(self.options, name)) not in values:
                needed = " or ".join(map(str, values))
                raise InputError(f"{name}: {given!r} given, but it must be {needed} for the layer to be a linear map")
        over_positions = self.mixing.matrix()
        if self.options.residual:
            over_positions = over_positions + torch.eye(len(over_positions)).to(over_positions)
        over_features = torch.eye(self.hidden_size).to(over_positions)
        offset = over_positions.new_zeros(len(over_positions), self.hidden_size)
        if self.mixing.bias is not None:
            offset = offset + self.mixing.bias[:, None]
        if isinstance(self.feed_forward, Linear):
            over_features = over_features + self.feed_forward.float_matrix()
            offset = offset @ over_features.T + self.feed_forward.bias
        return over_positions, over_features, offset


def _feed_forward(hidden_size: int, options: LinearMixerOptions) -> nn.Module | None:
    if options.feed_forward == "gelu":
        middle = options.expansion * hidden_size
        return nn.Sequential(Linear(hidden_size, middle), nn.GELU(), Linear(middle, hidden_size))
    return Linear(hidden_size, hidden_size) if options.feed_forward == "linear" else None


def preset(sizes: Sizes, choices: LinearMixerPreset) -> Preset:
    """A model without position embeddings, since c depends on positions; untied output without a final norm."""
    if sizes.n_positions is None:
        raise InputError("n_positions: none given, but linear_mixer has weights for each position of the longest text")
    if choices.feed_forward != "gelu" and choices.expansion != LinearMixerPreset.expansion:
        raise InputError(f"expansion: {choices.expansion} given, but only feed_forward gelu uses it; leave it out")
    last = LinearMixerOptions.from_choices(choices, context=sizes.n_positions)
    # Only the last layer, before the output projection, has a ReLU.
    others = dataclasses.replace(last, mixing="linear") if choices.mixing == "relu" else last
    layers = [others] * (sizes.num_layers - 1) + [last]
    return Preset(layers, model={"tie_word_embeddings": False, "final_norm": "none"})


architecture = Architecture(
    name="linear_mixer",
    title="Linear and masked mixers",
    source="Linear Language Models (blbadger); masked mixers (arXiv 2409.01482)",
    layer=LinearMixerLayer,
    options=LinearMixerOptions,
    preset_options=LinearMixerPreset,
    preset=preset,
    variants={
        "affine": {"mixing_bias": True, "feed_forward": "linear"},
        "relu": {"mixing": "relu"},
        "two triangles": {"mixing": "gelu", "mixing_bias": True},
        "no residual": {"residual": False, "mixing_bias": True},
        "masked mixer": {"feed_forward": "gelu", "norm": True, "mixing_bias": True},
    },
    packs=False,
)
