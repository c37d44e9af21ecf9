"""A window that holds the whole text and weighs all distances alike is causal attention, which PyTorch has.

Its gradient takes differences of numbers that are nearly equal where one weight is near 1, more than our tolerance
allows, so it serves reading only.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

SHORT = 64  # up to here there is nothing to gain


def serves(*inputs: Tensor, window: int, decays: tuple[float | Tensor, ...], others: tuple[Any, ...]) -> bool:
    """Whether `causal_attention` gives the result: no gradient asked for, no decay, and none of the others given."""
    length = inputs[0].shape[1]
    is_plain = all(not isinstance(decay, Tensor) and decay == 0 for decay in decays)
    is_learning = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    is_exact = all(x.dtype != torch.float64 for x in inputs)
    return is_exact and is_plain and not is_learning and SHORT < length <= window and all(x is None for x in others)


def causal_attention(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, *, scale: float, null_key: bool
) -> Tensor:
    """Means (B, T, H, E) of the values of all earlier tokens, in the dtype of the values."""
    width, value_width = queries_BTHD.shape[-1], values_BTHE.shape[-1]
    queries, keys = (pad(x, (0, max(value_width - width, 0))) for x in (queries_BTHD, keys_BTHD))
    values = pad(values_BTHE, (0, max(width - value_width, 0)))
    queries, keys, values = (x.to(values_BTHE.dtype).transpose(1, 2) for x in (queries, keys, values))
    # Keys one place later make the past strict; what comes to stand first is the null key, or is left out.
    if null_key:
        keys, values = (pad(x[:, :, :-1], (0, 0, 1, 0)) for x in (keys, values))
        means = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
    else:
        means = scaled_dot_product_attention(
            queries[:, :, 1:], keys[:, :, :-1], values[:, :, :-1], is_causal=True, scale=scale
        )
        means = pad(means, (0, 0, 1, 0))
    return means.transpose(1, 2)[..., :value_width]
