"""Block outer products contracted, as the equation."""

import torch
from torch import Tensor


def block_outer(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """See `multilin.ops.block_outer`."""
    return torch.einsum("...nk,...nj,dnkj->...d", left, right, weight)
