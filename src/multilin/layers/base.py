"""The base of layers: a causal map over (B, T, D) that can stop after any token and continue from its state."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from multilin.errors import InputError


class Layout(NamedTuple):
    """For the tokens of one call: positions, starts of texts, padding, and whether a state is needed.

    positions_BT: int64, position of each token in its text, from 0; padding repeats the previous position.
    starts_BT: True where a text begins inside a row (packing); None if every row continues its text.
    padding_BT: True for padding; None if there is none.
    needs_state: False if the text will not be continued, so that no state is built.
    """

    positions_BT: Tensor
    starts_BT: Tensor | None = None
    padding_BT: Tensor | None = None
    needs_state: bool = True


class Layer(GradientCheckpointingLayer):
    """The base class of layers: it maps (B, T, D) and a state to (B, T, D), in the same dtype, and the next state.

    The streaming law: for every split of x = x1 ++ x2 along time,

        layer(x, None, layout).y == layer(x1, None, layout1).y ++ layer(x2, state after x1, layout2).y

    and the state, a (nested) NamedTuple of batch-first tensors in float32 (float64 where x is), has the same shapes
    after any number of tokens. `state` is None at the start of a text.
    """

    def forward(self, x_BTD: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """Return output and next state; the state is None if the layout needs none."""
        raise NotImplementedError


class ParameterHolder(nn.Module):
    """The base class of modules that hold parameters directly; the model initialises them.

    transformers initialises only modules that hold parameters directly. So each such module draws its parameters.
    """

    def initialize(self, std: float) -> None:
        """Draw the parameters: normal with standard deviation `std`, the model's initializer_range; a `bias` is 0."""
        for name, parameter in self.named_parameters(recurse=False):
            if name == "bias":
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=std)


def head_width(hidden_size: int, num_heads: int, *, fewest: int = 1) -> int:
    """Return the width of each head, or raise InputError if the width is not an integer or is below `fewest`."""
    if hidden_size % num_heads:
        raise InputError(f"num_heads: {num_heads} given, but it must divide the hidden size {hidden_size}")
    if hidden_size // num_heads < fewest:
        raise InputError(
            f"num_heads: {num_heads} given, but heads of the hidden size {hidden_size} must have width {fewest} or more"
        )
    return hidden_size // num_heads
