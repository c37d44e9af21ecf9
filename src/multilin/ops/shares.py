"""A softmax that lets nothing weigh nothing."""

import torch
from torch import Tensor


def shares(scores: Tensor) -> Tensor:
    """Softmax over the last axis; where all scores are -inf all shares are 0."""
    is_empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(is_empty, 0.0).softmax(dim=-1).masked_fill(is_empty, 0.0)
