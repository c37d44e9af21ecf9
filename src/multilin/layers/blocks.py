"""Parts of residual layers: residual block, feed-forward, norms without parameters and rotary positions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multilin.layers.base import Layer, Layout
from multilin.layers.linear import Linear
from multilin.ops.dispatch import result_dtype
from multilin.ops.rotary import rotary
from multilin.ops.tile_norm import tile_norm

PAIR_BLOCK = 64  # pairs are (i, i + 32) inside blocks of 64, as in TScale; narrower heads are one block


class ResidualBlock(Layer):
    """A layer of two residual parts: x += attention(norm(x)), then x += feed_forward(norm(x)).

    Args:
        norm: function that creates a norm; called twice.
        attention: the module in which positions read each other, `y, state = attention(x, state, layout)`.
        feed_forward: maps (B, T, D) to (B, T, D), each position separately.
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
    """A feed-forward network with exact GELU, y = W_2 gelu(W_1 x), and dropout on the result.

    Args:
        hidden_size: width D of x and y; the hidden layer between is 4 D wide.
        dropout: dropout probability in training.
        bias: whether both matrices have a bias.
    """

    def __init__(self, hidden_size: int, dropout: float = 0.0, *, bias: bool = False) -> None:
        super().__init__()
        self.expand = Linear(hidden_size, 4 * hidden_size, bias=bias)
        self.contract = Linear(4 * hidden_size, hidden_size, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        return self.dropout(self.contract(torch.nn.functional.gelu(self.expand(x_BTD))))


class TileNorm(nn.Module):
    """Divide x by its root mean square over each tile of the last axis; a zero tile and its gradient stay 0.

    Args:
        tile: width of a tile; None is the whole vector.
        keeps_dtype: the result has the dtype of x even under autocast, for gradients that half precision cannot hold.
            Otherwise the result has the dtype of autocast, for the matrix products that read it.
    """

    def __init__(self, tile: int | None = None, *, keeps_dtype: bool = False) -> None:
        super().__init__()
        self.tile, self.keeps_dtype = tile, keeps_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        return tile_norm(x, tile=self.tile, dtype=x.dtype if self.keeps_dtype else result_dtype(x))


def standardize(x: Tensor, eps: float) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over the last axis; eps is added to the deviation.

    The divisor of the variance is n - 1. The computation is in float32 or better; the result has the dtype of x.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(dim=-1, keepdim=True)
    return (centred / (centred.std(dim=-1, keepdim=True) + eps)).to(x.dtype)


class Angles(NamedTuple):
    """Cosine and sine of the angle of each pair of numbers at each position, (B, T, D / 2) each."""

    cos_BTP: Tensor
    sin_BTP: Tensor


def rotary_angles(positions_BT: Tensor, width: int, base: float, dtype: torch.dtype) -> Angles:
    """Return cosine and sine of the rotary angles, position * base^(-2 n / D) for pair number n.

    Args:
        positions_BT: (B, T) positions in the text.
        width: D, the width of a head.
        base: base of the frequencies.
        dtype: of the vectors to rotate; the result is in float32 or better.
    """
    # In float64: an angle of a late position loses its fraction in float32.
    pair_P = torch.arange(width // 2, device=positions_BT.device, dtype=torch.float64)
    angle_BTP = positions_BT[..., None].double() * base ** (-2 * pair_P / width)
    wide = torch.promote_types(dtype, torch.float32)
    return Angles(angle_BTP.cos().to(wide), angle_BTP.sin().to(wide))


def rotate(x_BTHD: Tensor, angles: Angles) -> Tensor:
    """Rotate the pairs of each head by the angles: dot products of two positions then depend only on their distance.

    Args:
        x_BTHD: (B, T, H, D); D is even, and a multiple of 64 if it is above 64.
        angles: the result of `rotary_angles` for these positions and this width.
    """
    return rotary(x_BTHD, *angles, block=min(PAIR_BLOCK, x_BTHD.shape[-1]))
