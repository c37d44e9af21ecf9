"""The state of a prefix softmax: a bounded set of tokens that the future may still read; and its gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

from multilin.ops.ring import Slots, register_window


class PrefixSoftmaxState(NamedTuple):
    """Tokens that later positions may still read: the last `window - 1`, or one summary token without a window.

    The mean of everything read is exactly one token whose value is the mean and whose logit is the log of the total
    weight. So a state always has the shape of tokens, and continuing a text is reading those tokens first. Tokens of
    logit -inf stand for tokens not read yet: the shape is the same from the first call on. Float32 or better.
    """

    logits_BSH: Tensor
    values_BSHD: Tensor


class PrefixSoftmaxWindow(PrefixSoftmaxState):
    """The last `window - 1` tokens, which can lie in a ring; see `multilin.ops.ring`."""


register_window(PrefixSoftmaxWindow, Slots(("logits_BSH", "values_BSHD")))


class Gradients(NamedTuple):
    """Gradients of the inputs of a call, in their shapes; in float32, but for the values in the dtype of the values."""

    logits: Tensor
    values: Tensor
    own_logits: Tensor
    state_logits: Tensor
    state_values: Tensor


def read_state_first(
    logits_BTH: Tensor, values_BTHD: Tensor, state: PrefixSoftmaxState | None, starts_BT: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Put the state's tokens before the new ones; `starts` grows with them."""
    if state is None:
        return logits_BTH, values_BTHD, starts_BT
    logits = torch.cat([state.logits_BSH.to(logits_BTH.dtype), logits_BTH], dim=1)
    values = torch.cat([state.values_BSHD.to(values_BTHD.dtype), values_BTHD], dim=1)
    if starts_BT is not None:
        starts_BT = torch.nn.functional.pad(starts_BT, (state.logits_BSH.shape[1], 0))
    return logits, values, starts_BT


def last_tokens(
    logits_BTH: Tensor, values_BTHD: Tensor, starts_BT: Tensor | None, num_tokens: int
) -> PrefixSoftmaxState:
    """The last `num_tokens` tokens, with logit -inf where there is none or it belongs to an earlier text."""
    missing = max(num_tokens - logits_BTH.shape[1], 0)
    first = logits_BTH.shape[1] + missing - num_tokens
    if starts_BT is not None:
        text_BT = starts_BT.cumsum(dim=1)
        logits_BTH = logits_BTH.masked_fill((text_BT != text_BT[:, -1:])[..., None], -torch.inf)
    logits, values = logits_BTH[:, first:], values_BTHD[:, first:]
    if missing:
        logits = torch.nn.functional.pad(logits, (0, 0, missing, 0), value=-torch.inf)
        values = torch.nn.functional.pad(values, (0, 0, 0, 0, missing, 0))
    return PrefixSoftmaxState(logits, values)
