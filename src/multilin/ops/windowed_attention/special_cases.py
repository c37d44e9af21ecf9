"""Calls that are simpler: a window of 0, and full causal attention that is only read."""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from multilin.ops.kernels.operators import needs_gradients
from multilin.ops.windowed_attention.tokens import WindowedAttentionState, all_tokens, last_tokens

SHORT = 64  # tokens up to which full causal attention has nothing to gain


def own_token(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, *, window: int, scale: float, null_key: bool = False,
    padding: Tensor | None = None, starts: Tensor | None = None, needs_state: bool = True, **_: object,
) -> tuple[Tensor, WindowedAttentionState | None]:  # fmt: skip
    """A window of 0: each token's own value, weighed against the null key only."""
    keys, values, logits_BT = all_tokens(queries_BTHD, keys_BTHD, values_BTHE, padding, None)
    state = last_tokens(keys, values, logits_BT, starts, window) if needs_state else None
    if not null_key:
        return values_BTHE.masked_fill((logits_BT == -torch.inf)[..., None, None], 0.0), state
    scores_BTH = scale * (queries_BTHD.to(logits_BT.dtype) * keys_BTHD.to(logits_BT.dtype)).sum(dim=-1)
    return torch.sigmoid(scores_BTH + logits_BT[..., None])[..., None] * values_BTHE, state


def why_not_own_token(*_: Tensor, window: int, **options: object) -> str | None:
    """The reason against `own_token`."""
    return None if window == 0 else "the window is larger than 0"


def full_causal(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, *, window: int, scale: float,
    null_key: bool = False, needs_state: bool = True, **_: object,
) -> tuple[Tensor, WindowedAttentionState | None]:  # fmt: skip
    """A window that holds the whole text and weighs all distances alike: causal attention, which PyTorch has.

    Its gradient takes differences of numbers that are nearly equal where one weight is near 1, more than our tolerance
    allows, so it serves reading only.
    """
    state = None
    if needs_state:
        state = last_tokens(*all_tokens(queries_BTHD, keys_BTHD, values_BTHE, None, None), None, window)
    width, value_width = queries_BTHD.shape[-1], values_BTHE.shape[-1]
    queries, keys = (pad(x, (0, max(value_width - width, 0))) for x in (queries_BTHD, keys_BTHD))
    values = pad(values_BTHE, (0, max(width - value_width, 0)))
    queries, keys, values = (x.to(values_BTHE.dtype).transpose(1, 2) for x in (queries, keys, values))
    # Keys one place later make the past strict; what comes to stand first is the null key, or is left out.
    keys, values = keys[:, :, :-1], values[:, :, :-1]
    if null_key:
        keys, values = (pad(x, (0, 0, 1, 0)) for x in (keys, values))
    means = scaled_dot_product_attention(
        queries if null_key else queries[:, :, 1:], keys, values, is_causal=True, scale=scale
    )
    return (means if null_key else pad(means, (0, 0, 1, 0))).transpose(1, 2)[..., :value_width], state


def why_not_full_causal(
    *inputs: Tensor, window: int, slope: float | Tensor = 0.0, hyper: float | Tensor = 0.0,
    padding: Tensor | None = None, state: object = None, starts: Tensor | None = None, **_: object,
) -> str | None:  # fmt: skip
    """The reason against `full_causal`."""
    if not SHORT < inputs[0].shape[1] <= window or not (padding is None and state is None and starts is None):
        return "it is no whole text"
    if any(isinstance(decay, Tensor) or decay != 0 for decay in (slope, hyper)):
        return "it decays"
    return "it is learned" if needs_gradients(*inputs) else None
