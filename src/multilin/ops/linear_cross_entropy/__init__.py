"""Cross entropy of a linear output layer, computed without holding all logits at once."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.dispatch import Backend, Op, cpu_kernels, result_dtype
from multilin.ops.kernels import MANY_NUMBERS, is_traced, needs_gradients, refuse_second_derivative, refuses_eager
from multilin.ops.linear_cross_entropy import cpu, portable
from multilin.ops.linear_cross_entropy.portable import IGNORED
from multilin.ops.shapes import check_shapes

__all__ = ["LINEAR_CROSS_ENTROPY", "linear_cross_entropy", "rows_of_chunk", "token_cross_entropy"]

NUMBERS = {"cpu": 2**23}  # logits held at a time, by type of device: enough for full-speed matrix products

LINEAR_CROSS_ENTROPY = Op(
    "linear_cross_entropy",
    [
        cpu_kernels("compiled, one pass", cpu.losses_and_gradient),
        Backend("portable (PyTorch, several passes)", portable.losses_and_gradient),
    ],
    special_cases=[Backend("portable (PyTorch, in graphs)", portable.losses_and_gradient, refuses=refuses_eager)],
)


def linear_cross_entropy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " N"],
    *,
    label_smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """Sum the cross entropy of softmax(hidden weight^T + bias) with the targets over rows, in nats.

    With label smoothing s the target distribution is (1 - s) onehot(target) + s / V. Rows whose target is -100 are
    ignored. The gradients are computed in the forward pass, chunk by chunk, so the peak memory is one chunk of logits,
    about 2^23 numbers, or 2^26 on a GPU, whatever N is. Under autocast, matrix products use autocast's dtype; softmax,
    loss and the sum of the weight's gradient stay in float32.

    Args:
        hidden: (N, D) final hidden states, one row per predicted token.
        weight: (V, D) output embedding.
        bias: (V,) added to the logits, or None.
        targets: (N,) token ids, or -100.
        label_smoothing: share of the target distribution that is spread evenly over the vocabulary, in [0, 1).

    Returns:
        A scalar in float32 (float64 for float64 inputs), differentiable once by hidden, weight and bias.

    Raises:
        InputError: not one target per row, a target that is not a token id (checked only on a CPU), or a share outside
            [0, 1).

    Cost: 3 products of N x D x V; memory for the logits of a chunk and for one gradient of the size of `weight`. On a
    CPU, ignored rows cost nothing.
    """
    if not 0 <= label_smoothing < 1:
        raise InputError(f"label_smoothing: {label_smoothing:g} given, but it must be at least 0 and below 1")
    if (rows := _counted_rows(hidden, weight, targets)) is not None:
        hidden, targets = hidden[rows], targets[rows]
    inputs = hidden, weight, bias, targets, label_smoothing
    return _LinearCrossEntropy.apply(*inputs) if needs_gradients(*inputs) else _token_losses(*inputs).sum()


@torch.no_grad()
def token_cross_entropy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " N"],
) -> Float[Tensor, " N"]:
    """Compute the cross entropy of each row, (N,) in nats, without gradients; 0 for ignored rows."""
    if (rows := _counted_rows(hidden, weight, targets)) is None:
        return _token_losses(hidden, weight, bias, targets, 0.0)
    losses = _token_losses(hidden[rows], weight, bias, targets[rows], 0.0)
    return losses.new_zeros(len(targets)).index_copy(0, rows, losses)


def rows_of_chunk(num_outputs: int, device: torch.device) -> int:
    """The number of rows whose logits are held at a time."""
    return max(1, NUMBERS.get(device.type, MANY_NUMBERS) // num_outputs)


def _counted_rows(hidden: Tensor, weight: Tensor, targets_N: Tensor) -> Tensor | None:
    """The rows that are not ignored; None if no row is ignored, or on a GPU, to avoid waiting for it."""
    check_shapes(("targets", targets_N, hidden.shape[:1]))
    if hidden.device.type != "cpu" or is_traced(hidden, targets_N):
        return None
    is_wrong_N = (targets_N != IGNORED) & ((targets_N < 0) | (targets_N >= len(weight)))
    if is_wrong_N.any():
        raise InputError(f"targets: {int(targets_N[is_wrong_N][0])} given, but ids are 0 to {len(weight) - 1}")
    rows = (targets_N != IGNORED).nonzero().flatten()
    return rows if len(rows) < len(targets_N) else None


def _token_losses(hidden: Tensor, weight: Tensor, *others: Any) -> Tensor:
    chunks = _chunks(*_lowered(hidden, weight), *others, makes_gradient=False)
    return torch.cat([losses for _, losses, _, _ in chunks])


def _lowered(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and weight in the dtype of the matrix products."""
    low = result_dtype(weight)
    return hidden.to(low), weight.to(low)


def _chunks(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor,
    label_smoothing: float, *, makes_gradient: bool,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:  # fmt: skip
    """For each chunk: its rows, losses, and gradients of logits and bias; see `portable.losses_and_gradient`."""
    num_rows = rows_of_chunk(len(weight_VD), weight_VD.device)
    for first in range(0, max(len(hidden_ND), 1), num_rows):
        rows = slice(first, min(first + num_rows, len(hidden_ND)))
        yield rows, *LINEAR_CROSS_ENTROPY(
            hidden_ND[rows] @ weight_VD.T, bias_V, targets_N[rows], label_smoothing, makes_gradient,
            dtype=hidden_ND.dtype,
        )  # fmt: skip


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses, with all gradients ready after the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor,
        label_smoothing: float,
    ) -> Tensor:  # fmt: skip
        hidden_low, weight_low = _lowered(hidden_ND, weight_VD)
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dhidden = torch.empty_like(hidden_ND) if needs_hidden else None
        dweight = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None
        dbias = None if bias_V is None or not bias_V.requires_grad else torch.zeros_like(bias_V, dtype=wide)
        chunks = _chunks(hidden_low, weight_low, bias_V, targets_N, label_smoothing, makes_gradient=True)
        for rows, losses, dlogits_low, dbias_of_rows in chunks:
            total = total + losses.sum()  # an operation in place would have no gradient when PyTorch 2.11 compiles this
            if dbias is not None and dbias_of_rows is not None:
                dbias += dbias_of_rows
            if dhidden is not None:
                dhidden[rows] = dlogits_low @ weight_low
            if dweight is not None:
                dweight += dlogits_low.T @ hidden_low[rows]
        ctx.save_for_backward(dhidden, None if dweight is None else dweight.to(weight_VD.dtype), dbias)
        return total

    @staticmethod
    def backward(ctx: Any, *dtotals: Tensor) -> tuple[Tensor | None, ...]:
        """The kept gradients times the gradient of the total."""
        refuse_second_derivative("linear_cross_entropy")
        gradients = [None if g is None else g * dtotals[0].to(g.dtype) for g in ctx.saved_tensors]
        return *gradients, None, None
