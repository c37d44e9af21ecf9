"""The block outer product, computed straight from its equation."""

import torch
from torch import Tensor


def block_outer(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """See `multilin.ops.block_outer`."""
    return torch.einsum("...nk,...nj,dnkj->...d", left, right, weight)
