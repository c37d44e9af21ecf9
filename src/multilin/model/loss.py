"""The loss of the output head, in chunks of tokens, without calling the head if it is a plain Linear."""

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multilin.errors import InputError
from multilin.layers.linear import is_unwrapped
from multilin.model.output_bias import FixedBiasLinear
from multilin.ops.linear_cross_entropy import linear_cross_entropy, rows_of_chunk, token_cross_entropy
from multilin.ops.shapes import kind_of


def sequence_loss(head: nn.Module, hidden_ND: Tensor, targets_N: Tensor, *, label_smoothing: float) -> Tensor:
    """Sum of the cross entropy over N tokens, in nats, differentiable; targets of -100 are not counted.

    Args:
        head: module that maps (N, D) hidden states to (N, V) logits.
        hidden_ND: final hidden states.
        targets_N: token ids.
        label_smoothing: share of the target distribution spread evenly over the vocabulary.
    """
    targets_N = targets_N.long()
    if is_plain_linear(head):
        return linear_cross_entropy(hidden_ND, head.weight, head.bias, targets_N, label_smoothing=label_smoothing)

    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = _wide(head(hidden))
        return nn.functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)

    losses = [checkpoint(loss_of, *chunk, use_reentrant=False) for chunk in _chunks(head, hidden_ND, targets_N)]
    return torch.stack(losses).sum()


def token_losses(head: nn.Module, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
    """-ln p of each of N tokens, (N,) float32, without gradients; arguments as for `sequence_loss`."""
    targets_N = targets_N.long()
    if is_plain_linear(head):
        return token_cross_entropy(hidden_ND, head.weight, head.bias, targets_N)
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(_wide(head(hidden)), targets, reduction="none")
            for hidden, targets in _chunks(head, hidden_ND, targets_N)
        ]
        return torch.cat(losses)


def is_plain_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """True if calling the head only multiplies with its own weight and adds its own bias.

    An adapter is of another class; see `is_unwrapped` for what else does more.
    """
    return type(head) in (nn.Linear, FixedBiasLinear) and is_unwrapped(head)


def _chunks(head: nn.Module, hidden_ND: Tensor, targets_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    num_outputs = int(getattr(head, "out_features", 2**15))
    num_rows = rows_of_chunk(num_outputs, hidden_ND.device)
    return zip(hidden_ND.split(num_rows), targets_N.split(num_rows), strict=True)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def check_targets(name: str, targets: Any, tokens: Any) -> None:
    """Refuse targets that are not one id for each token; what is no tensor of tokens is for the body to refuse."""
    if not isinstance(tokens, Tensor):
        return
    is_ids = isinstance(targets, Tensor) and targets.dtype in (torch.int64, torch.int32)
    if not is_ids or targets.shape != tokens.shape[:2]:
        wanted = f"int64 of shape {tuple(tokens.shape[:2])}, as the ids are"
        raise InputError(f"{name}: {kind_of(targets)} given, but it must be {wanted}")
