"""Parts of residual layers: a block of two modules, and a feed-forward, which mixes channels at one position."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multilin.layers.base import Layer, Layout
from multilin.layers.linear import Linear


class ResidualBlock(Layer):
    """x += attention(norm(x)), then x += feed_forward(norm(x)).

    Args:
        norm: makes each of the two norms.
        attention: the module where positions meet, `y, state = attention(x, state, layout)`; its state is the layer's.
        feed_forward: (B, T, D) to (B, T, D), one position at a time.
    """

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.feed_forward_norm = norm()
        self.feed_forward = feed_forward

    def forward(self, x_BTD: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """Output (B, T, D) and the state of the attention."""
        update_BTD, state = self.attention(self.attention_norm(x_BTD), state, layout)
        x_BTD = x_BTD + update_BTD
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD)), state


class GeluFeedForward(nn.Module):
    """y = W_2 gelu(W_1 x), exact GELU; dropout on the result.

    Args:
        hidden_size: width D of x and y; the middle is 4 D wide.
        dropout: probability in training.
        bias: whether both matrices have one.
    """

    def __init__(self, hidden_size: int, dropout: float = 0.0, *, bias: bool = False) -> None:
        super().__init__()
        self.expand = Linear(hidden_size, 4 * hidden_size, bias=bias)
        self.contract = Linear(4 * hidden_size, hidden_size, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        return self.dropout(self.contract(torch.nn.functional.gelu(self.expand(x_BTD))))
