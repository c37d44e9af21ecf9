"""The output head: a fixed bias from token counts, and the loss, computed for a chunk of tokens at a time."""

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multilin.errors import InputError
from multilin.layers.linear import is_unwrapped
from multilin.ops.linear_cross_entropy import linear_cross_entropy, rows_of_chunk, token_cross_entropy
from multilin.ops.shapes import kind_of


class FixedBiasLinear(nn.Linear):
    """y = W x + b with a bias that is saved with the model but never trained: a buffer."""

    bias: Any

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        del self.bias
        self.register_buffer("bias", torch.zeros(out_features))


class FixedBias:
    """Mixin before a PreTrainedModel: `lm_head` is a FixedBiasLinear if config.output_bias is "unigram"."""

    config: Any
    lm_head: nn.Linear

    @torch.no_grad()
    def set_token_counts(self, counts: Tensor) -> None:
        """Fix the head's bias to log((count + 1) / sum(counts + 1)) of each token, if output_bias is "unigram".

        Args:
            counts: (V,) how often each token occurs in the training text.

        Raises:
            InputError: the config's output_bias is not "unigram", or there are not V counts.
        """
        if self.config.output_bias != "unigram":
            raise InputError(
                f"output_bias: {self.config.output_bias!r} given, but only the bias 'unigram' is set from counts"
            )
        if counts.shape != (self.config.vocab_size,):
            raise InputError(f"counts: shape {tuple(counts.shape)} given, but it must be ({self.config.vocab_size},)")
        assert isinstance(self.lm_head, FixedBiasLinear)
        smoothed_V = counts.double() + 1
        self.lm_head.bias.copy_((smoothed_V / smoothed_V.sum()).log())

    @torch.no_grad()
    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Resize as transformers does; a fixed bias stays fixed, and a new token gets the bias of the rarest token."""
        bias_V = self.lm_head.bias.clone() if isinstance(self.lm_head, FixedBiasLinear) else None
        embeddings: nn.Module = super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]
        if bias_V is not None:
            if not isinstance(self.lm_head, FixedBiasLinear):
                weight = self.lm_head.weight
                self.lm_head = FixedBiasLinear(weight.shape[1], weight.shape[0]).to(weight)
                self.lm_head.weight = weight
            num_kept = min(len(bias_V), self.lm_head.out_features)
            self.lm_head.bias = bias_V.min().repeat(self.lm_head.out_features)
            self.lm_head.bias[:num_kept] = bias_V[:num_kept]
        return embeddings


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
    """Return -ln p of each of N tokens, (N,) float32, without gradients; arguments as for `sequence_loss`."""
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

    False for an adapter, which has another class, and for modules for which `is_unwrapped` is False.
    """
    return type(head) in (nn.Linear, FixedBiasLinear) and is_unwrapped(head)


def _chunks(head: nn.Module, hidden_ND: Tensor, targets_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    num_outputs = int(getattr(head, "out_features", 2**15))
    num_rows = rows_of_chunk(num_outputs, hidden_ND.device)
    return zip(hidden_ND.split(num_rows), targets_N.split(num_rows), strict=True)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def check_targets(name: str, targets: Any, tokens: Any) -> None:
    """Refuse targets that are not one id for each token; the body refuses tokens that are not a tensor."""
    if not isinstance(tokens, Tensor):
        return
    is_ids = isinstance(targets, Tensor) and targets.dtype in (torch.int64, torch.int32)
    if not is_ids or targets.shape != tokens.shape[:2]:
        wanted = f"int64 of shape {tuple(tokens.shape[:2])}, as the ids are"
        raise InputError(f"{name}: {kind_of(targets)} given, but it must be {wanted}")
