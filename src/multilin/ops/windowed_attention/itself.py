"""A window of 0: a token reads itself only."""

import torch
from torch import Tensor


def read_itself(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, logits_BT: Tensor, scale: float, null_key: bool
) -> Tensor:
    """The own value, weighed against the null key only."""
    if not null_key:
        return values_BTHE.masked_fill((logits_BT == -torch.inf)[..., None, None], 0.0)
    dtype = logits_BT.dtype
    scores_BTH = scale * (queries_BTHD.to(dtype) * keys_BTHD.to(dtype)).sum(dim=-1) + logits_BT[..., None]
    return torch.sigmoid(scores_BTH)[..., None] * values_BTHE
