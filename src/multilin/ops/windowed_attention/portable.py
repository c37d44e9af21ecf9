"""Windowed attention in linear time from PyTorch operations: blocks of queries against two blocks of keys."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from multilin.ops.windowed_attention import reference
from multilin.ops.windowed_attention.softmax import softmax
from multilin.ops.windowed_attention.tokens import WindowedAttentionState, last_tokens, read_state_first

SMALLEST_BLOCK = 32  # below, the products are too small to be worth their calls


def windowed_attention(
    queries_BTHD: Tensor,
    keys_BTHD: Tensor,
    values_BTHE: Tensor,
    logits_BT: Tensor,
    *,
    window: int,
    scale: float,
    slope: float | Tensor = 0.0,
    hyper: float | Tensor = 0.0,
    null_key: bool = False,
    state: WindowedAttentionState | None = None,
    starts: Tensor | None = None,
    needs_state: bool = True,
) -> tuple[Tensor, WindowedAttentionState | None]:
    """See `multilin.ops.windowed_attention`."""
    num_new, block = keys_BTHD.shape[1], max(window, SMALLEST_BLOCK)
    if num_new <= 2 * block:
        return reference.windowed_attention(
            queries_BTHD, keys_BTHD, values_BTHE, logits_BT, window=window, scale=scale, slope=slope, hyper=hyper,
            null_key=null_key, state=state, starts=starts, needs_state=needs_state,
        )  # fmt: skip
    keys, values, logits_BS = read_state_first(keys_BTHD, values_BTHE, logits_BT, state)
    num_read = keys.shape[1] - num_new
    after = last_tokens(keys, values, logits_BS, starts, window) if needs_state else None

    extra = -keys.shape[1] % block
    queries_BNKHD = pad(queries_BTHD, (0, 0, 0, 0, num_read, extra)).unflatten(1, (-1, block))
    keys_BNLHD = _with_block_before(pad(keys, (0, 0, 0, 0, 0, extra)).unflatten(1, (-1, block)))
    values_BNLHE = _with_block_before(pad(values, (0, 0, 0, 0, 0, extra)).unflatten(1, (-1, block)))
    logits_BNL = _with_block_before(pad(logits_BS, (0, extra), value=-torch.inf).unflatten(1, (-1, block)), -torch.inf)

    offset_K, offset_L = (torch.arange(n, device=keys.device) for n in (block, 2 * block))
    distance_KL = offset_K[:, None] + block - offset_L[None, :]
    hidden = ~reference.is_visible(distance_KL, window)[None, None, None]
    if starts is not None:
        text_BNK = pad(starts.cumsum(dim=1), (num_read, extra)).unflatten(1, (-1, block))
        hidden = hidden | (text_BNK[..., :, None] != _with_block_before(text_BNK)[..., None, :])[:, :, None]
    scores_BNHKL = scale * torch.einsum("bnkhd,bnlhd->bnhkl", queries_BNKHD, keys_BNLHD)
    scores_BNHKL = scores_BNHKL + reference.decay(distance_KL, slope, hyper, keys.dtype)
    scores_BNHKL = scores_BNHKL + logits_BNL[:, :, None, None, :]
    weights_BNHKL = softmax(scores_BNHKL.masked_fill(hidden, -torch.inf), null_key)
    means_BNKHE = torch.einsum("bnhkl,bnlhe->bnkhe", weights_BNHKL, values_BNLHE)
    return means_BNKHE.flatten(1, 2)[:, num_read : num_read + num_new], after


def _with_block_before(x_BNK: Tensor, fill: float = 0.0) -> Tensor:
    """Each block behind the one before it: (B, N, 2K, ...)."""
    before = pad(x_BNK[:, :-1], (0, 0) * (x_BNK.ndim - 2) + (1, 0), value=fill)
    return torch.cat([before, x_BNK], dim=2)
