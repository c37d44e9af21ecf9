"""Loss and gradients of the output layer for one chunk of rows after the other."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from multilin.ops.dispatch import Backend, Op
from multilin.ops.kernels import why_no_numba
from multilin.ops.linear_cross_entropy import cpu, portable

CHUNK_NUMBERS = 2**23  # logits held at a time, 16 MB in bf16: large enough for full-speed matrix products

LINEAR_CROSS_ENTROPY = Op(
    "linear_cross_entropy",
    [
        Backend(
            "numba (compiled, one pass)",
            cpu.losses_and_gradient,
            device="cpu",
            dtypes=(torch.float32, torch.bfloat16),
            why_not=why_no_numba,
        ),
        Backend("portable (PyTorch, several passes)", portable.losses_and_gradient),
    ],
)


def losses_of_chunks(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    logit_scale: float,
    label_smoothing: float,
    ignore_index: int,
    makes_gradient: bool,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
    """Rows, their losses, and the gradients of their products and of the bias: see `portable.losses_and_gradient`."""
    num_rows = max(1, CHUNK_NUMBERS // weight_VD.shape[0])
    compute = LINEAR_CROSS_ENTROPY.backend_for(hidden_ND.device, hidden_ND.dtype).compute
    if torch.compiler.is_compiling() or any(type(x) is not Tensor for x in (hidden_ND, targets_N)):
        compute = portable.losses_and_gradient
    for first in range(0, max(len(hidden_ND), 1), num_rows):
        rows = slice(first, min(first + num_rows, len(hidden_ND)))
        yield rows, *compute(
            hidden_ND[rows] @ weight_VD.T, bias_V, targets_N[rows], logit_scale=logit_scale,
            label_smoothing=label_smoothing, ignore_index=ignore_index, makes_gradient=makes_gradient,
        )  # fmt: skip


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
        hidden_low, weight_low = hidden_ND.detach().to(low), weight_VD.detach().to(low)
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        dhidden = torch.empty_like(hidden_ND)
        dweight = torch.zeros_like(weight_VD, dtype=wide)
        dbias = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide)
        chunks = losses_of_chunks(
            hidden_low, weight_low, bias_V, targets_N, logit_scale=logit_scale, label_smoothing=label_smoothing,
            ignore_index=ignore_index, makes_gradient=True,
        )  # fmt: skip
        for rows, losses, dlogits_low, dbias_of_rows in chunks:
            total += losses.sum()
            if dbias is not None and dbias_of_rows is not None:
                dbias += dbias_of_rows
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
