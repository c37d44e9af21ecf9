"""Cross entropy of a linear output layer that never holds all logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multilin.ops.linear_cross_entropy import chunked
from multilin.ops.linear_cross_entropy.chunked import LINEAR_CROSS_ENTROPY

__all__ = ["LINEAR_CROSS_ENTROPY", "linear_cross_entropy", "token_cross_entropy"]


def linear_cross_entropy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " N"],
    *,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    """Sum over rows of the cross entropy of softmax(logit_scale * hidden weight^T + bias) with the targets, in nats.

    With label smoothing s the target distribution is (1 - s) onehot(target) + s / V. Rows whose target is
    `ignore_index` count nothing. The gradients are computed in the forward pass, chunk by chunk, so the peak memory
    is one chunk of logits, about 2^23 numbers, whatever N is. Under autocast the matrix products run in its dtype;
    softmax, loss and the sum of the weight's gradient stay in float32.

    Args:
        hidden: (N, D) final hidden states, a row per predicted token.
        weight: (V, D) output embedding.
        bias: (V,) added to the scaled logits, or None.
        targets: (N,) token ids.
        logit_scale: factor on the product, not on the bias.
        label_smoothing: share of the target distribution spread evenly, in [0, 1).
        ignore_index: the target that marks a row to leave out.

    Returns:
        A scalar in float32 (float64 for float64 inputs). Differentiable once in hidden, weight and bias.

    Cost: 3 products of N x D x V and their memory for a chunk of rows, plus one gradient of the size of `weight`.
    """
    if not torch.is_grad_enabled():
        losses = token_cross_entropy(
            hidden, weight, bias, targets, logit_scale=logit_scale, label_smoothing=label_smoothing,
            ignore_index=ignore_index,
        )  # fmt: skip
        return losses.sum()
    total: Tensor = chunked.LinearCrossEntropy.apply(
        hidden, weight, bias, targets, logit_scale, label_smoothing, ignore_index
    )
    return total


def token_cross_entropy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " N"],
    *,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Float[Tensor, " N"]:
    """The terms that `linear_cross_entropy` sums, (N,) in nats, without gradients; 0 for ignored rows."""
    with torch.no_grad():
        device = hidden.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        chunks = chunked.losses_of_chunks(
            hidden.detach().to(low), weight.detach().to(low), bias, targets, logit_scale=logit_scale,
            label_smoothing=label_smoothing, ignore_index=ignore_index, makes_gradient=False,
        )  # fmt: skip
        return torch.cat([losses for _, losses, _, _ in chunks])
