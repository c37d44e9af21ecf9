"""Loss and gradients of the output layer for one chunk of rows after the other."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_NUMBERS = 2**23  # logits held at a time, 32 MB in float32: large enough for full-speed matrix products


def logits_by_chunks(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, logit_scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their logits in float32 or better."""
    num_rows = max(1, CHUNK_NUMBERS // weight_VD.shape[0])
    wide = torch.promote_types(weight_VD.dtype, torch.float32)
    for first in range(0, max(len(hidden_ND), 1), num_rows):
        rows = slice(first, min(first + num_rows, len(hidden_ND)))
        logits = (hidden_ND[rows] @ weight_VD.T).to(wide)
        if logit_scale != 1.0:
            logits = logits.mul_(logit_scale) if not logits.requires_grad else logits * logit_scale
        yield rows, logits if bias_V is None else logits + bias_V


def chunk_losses(logits_NV: Tensor, targets_N: Tensor, label_smoothing: float, ignore_index: int) -> Tensor:
    """Cross entropy of each row in nats, 0 where the target is ignored."""
    return torch.nn.functional.cross_entropy(
        logits_NV, targets_N, reduction="none", label_smoothing=label_smoothing, ignore_index=ignore_index
    )


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses, with all gradients ready after the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        logit_scale: float,
        label_smoothing: float,
        ignore_index: int,
    ) -> Tensor:
        """Total loss; keeps d loss / d (hidden, weight, bias)."""
        device = hidden_ND.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
        hidden_low, weight_low = hidden_ND.to(low), weight_VD.to(low)
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        dhidden = torch.empty_like(hidden_ND)
        dweight = torch.zeros_like(weight_VD, dtype=wide)
        dbias = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide)
        for rows, logits in logits_by_chunks(hidden_low, weight_low, bias_V, logit_scale):
            total += chunk_losses(logits, targets_N[rows], label_smoothing, ignore_index).sum()
            dlogits = _dlogits(logits, targets_N[rows], label_smoothing, ignore_index)
            if dbias is not None:
                dbias += dlogits.sum(dim=0)
            dlogits_low = dlogits.mul_(logit_scale).to(low)
            dhidden[rows] = dlogits_low @ weight_low
            dweight += dlogits_low.T @ hidden_low[rows]
        if dbias is not None and bias_V is not None:
            dbias = dbias.to(bias_V.dtype)
        ctx.save_for_backward(dhidden, dweight.to(weight_VD.dtype), dbias)
        return total

    @staticmethod
    def backward(ctx: Any, *dtotals: Tensor) -> tuple[Tensor | None, ...]:
        """The kept gradients times that of the total."""
        dhidden, dweight, dbias = (None if g is None else g * dtotals[0].to(g.dtype) for g in ctx.saved_tensors)
        return dhidden, dweight, dbias, None, None, None, None


def _dlogits(logits_NV: Tensor, targets_N: Tensor, label_smoothing: float, ignore_index: int) -> Tensor:
    """softmax(logits) minus the target distribution; 0 in ignored rows."""
    counted_N = (targets_N != ignore_index)[:, None]
    target_N = targets_N.clamp(min=0)[:, None]
    dlogits = torch.softmax(logits_NV, dim=-1)
    if label_smoothing:
        dlogits -= label_smoothing / logits_NV.shape[1]
    dlogits.scatter_add_(1, target_N, torch.full_like(target_N, label_smoothing - 1.0, dtype=dlogits.dtype))
    return dlogits.mul_(counted_N)
