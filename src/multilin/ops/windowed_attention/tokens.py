"""The state of windowed attention: the keys and values of the tokens that later positions may still read."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from multilin.ops.ring import Slots, register_window


class WindowedAttentionState(NamedTuple):
    """The last `window` tokens, in float32 or better; a logit of -inf stands for what was not read, else it is 0."""

    keys_BSHD: Tensor
    values_BSHE: Tensor
    logits_BS: Tensor


register_window(WindowedAttentionState, Slots(("keys_BSHD", "values_BSHE", "logits_BS"), are_multiplied=True))


def all_tokens(
    queries: Tensor, keys: Tensor, values: Tensor, padding: Tensor | None, state: WindowedAttentionState | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and logits of the state's tokens and then the new ones; the logits in the dtype to compute in."""
    dtype = torch.promote_types(torch.promote_types(queries.dtype, values.dtype), torch.float32)
    logits = torch.zeros(keys.shape[:2], dtype=dtype, device=keys.device)
    if padding is not None:
        logits = logits.masked_fill(padding, -torch.inf)
    if state is None:
        return keys, values, logits
    pairs = zip(state, (keys, values, logits), strict=True)
    keys, values, logits = (torch.cat([x.to(dtype) for x in pair], dim=1) for pair in pairs)
    return keys, values, logits


def last_tokens(
    keys: Tensor, values: Tensor, logits: Tensor, starts: Tensor | None, num_tokens: int
) -> WindowedAttentionState:
    """The last tokens of the last text; filled up at the front where there are fewer."""
    missing = max(num_tokens - keys.shape[1], 0)
    first = keys.shape[1] + missing - num_tokens
    if starts is not None:
        text_BS = texts(starts, keys.shape[1])
        logits = logits.masked_fill(text_BS != text_BS[:, -1:], -torch.inf)
    keys, values = keys[:, first:].to(logits.dtype), values[:, first:].to(logits.dtype)
    return WindowedAttentionState(
        pad(keys, (0, 0, 0, 0, missing, 0)),
        pad(values, (0, 0, 0, 0, missing, 0)),
        pad(logits[:, first:], (missing, 0), value=-torch.inf),
    )


def texts(starts_BT: Tensor, length: int, dtype: torch.dtype | None = None) -> Tensor:
    """The number of each token's text (B, length); tokens of the state, before the new ones, are in text 0."""
    return pad(starts_BT.cumsum(dim=1, dtype=dtype), (length - starts_BT.shape[1], 0))
