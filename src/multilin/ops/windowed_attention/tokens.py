"""The state of windowed attention: the keys and values of the tokens that later positions may still read."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class WindowedAttentionState(NamedTuple):
    """The last `window` tokens, in float32 or better; a logit of -inf stands for what was not read, else it is 0."""

    keys_BSHD: Tensor
    values_BSHE: Tensor
    logits_BS: Tensor


def read_state_first(
    keys: Tensor, values: Tensor, logits: Tensor, state: WindowedAttentionState | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The state's tokens, then the new ones: keys, values and logits."""
    if state is None:
        return keys, values, logits
    dtype = logits.dtype
    return (
        torch.cat([state.keys_BSHD.to(dtype), keys.to(dtype)], dim=1),
        torch.cat([state.values_BSHE.to(dtype), values.to(dtype)], dim=1),
        torch.cat([state.logits_BS.to(dtype), logits], dim=1),
    )


def last_tokens(
    keys: Tensor, values: Tensor, logits: Tensor, starts: Tensor | None, num_tokens: int
) -> WindowedAttentionState:
    """The last tokens of the last text; filled up at the front where there are fewer."""
    missing = max(num_tokens - keys.shape[1], 0)
    first = keys.shape[1] + missing - num_tokens
    if starts is not None:
        text_BS = starts.cumsum(dim=1)
        text_BS = pad(text_BS, (keys.shape[1] - starts.shape[1], 0))
        logits = logits.masked_fill(text_BS != text_BS[:, -1:], -torch.inf)
    keys, values = keys[:, first:].to(logits.dtype), values[:, first:].to(logits.dtype)
    return WindowedAttentionState(
        pad(keys, (0, 0, 0, 0, missing, 0)),
        pad(values, (0, 0, 0, 0, missing, 0)),
        pad(logits[:, first:], (missing, 0), value=-torch.inf),
    )
