"""Feed-forward blocks: they mix channels, one position at a time."""

import torch
from torch import Tensor, nn

from multilin.layers.linear import Linear


class GeluFeedForward(nn.Module):
    """y = W_2 gelu(W_1 x), exact GELU, without biases; dropout on the result.

    Args:
        hidden_size: width D of x and y.
        expansion: width of the middle in multiples of D.
        dropout: probability in training.
    """

    def __init__(self, hidden_size: int, expansion: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.expand = Linear(hidden_size, expansion * hidden_size, bias=False)
        self.contract = Linear(expansion * hidden_size, hidden_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        result: Tensor = self.dropout(self.contract(torch.nn.functional.gelu(self.expand(x_BTD))))
        return result
