"""What the compiled backends share: room for gradients, when those are needed, and windows read on from a state."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad

from multilin.ops.prefix_softmax.tokens import PrefixSoftmaxState, last_tokens, read_state_first


class Gradients(NamedTuple):
    """Of the inputs of a forward pass; of no size where there is no such input."""

    logits: Tensor
    values: Tensor
    own: Tensor
    state_logits: Tensor
    state_values: Tensor


def empty_gradients(values: Tensor, *, has_own: bool, has_state: bool) -> Gradients:
    """Room for the gradients: float32, that of the values like them."""
    B, T, H, D = values.shape
    none = (0,)
    return Gradients(
        values.new_empty((B, T, H), dtype=torch.float32),
        torch.empty((B, T, H, D), dtype=values.dtype, device=values.device),
        values.new_empty((B, T, H) if has_own else none, dtype=torch.float32),
        values.new_empty((B, 1, H) if has_state else none, dtype=torch.float32),
        values.new_empty((B, 1, H, D) if has_state else none, dtype=torch.float32),
    )


def fill_in(
    dlogits: Tensor | None, dvalues: Tensor | None, final_values_BSHD: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the final state: both, with zeros for one that is missing, or none."""
    if dlogits is None and dvalues is None:
        return None, None
    if dlogits is None:
        dlogits = torch.zeros_like(final_values_BSHD[..., 0])
    return dlogits, torch.zeros_like(final_values_BSHD) if dvalues is None else dvalues


def is_traced(*inputs: Tensor | None) -> bool:
    """Whether a graph is being made of the call, so that it must be one of known operators."""
    return torch.compiler.is_compiling() or any(type(x) not in (Tensor, Parameter, type(None)) for x in inputs)


def needs_gradients(*inputs: Tensor | None) -> bool:
    """Whether a backward pass may come."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def windowed(
    means: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, int | None], Tensor],
    logits_BTH: Tensor,
    values_BTHD: Tensor,
    own_logits: Tensor | None,
    starts: Tensor | None,
    state: PrefixSoftmaxState | None,
    window: int,
    *,
    needs_state: bool,
) -> tuple[Tensor, PrefixSoftmaxState | None]:
    """Means over the last `window` tokens: those of the state are read again before the new ones.

    Args:
        means: of logits, values, own logits and starts, over a window, or over the whole past for None.
        logits_BTH, values_BTHD, own_logits, starts, state, window, needs_state: see `multilin.ops.prefix_softmax`.
    """
    num_new = logits_BTH.shape[1]
    logits_BSH, values_BSHD, starts_BS = read_state_first(logits_BTH, values_BTHD, state, starts)
    num_read = logits_BSH.shape[1]
    if own_logits is not None and num_read > num_new:
        own_logits = pad(own_logits, (0, 0, num_read - num_new, 0), value=-torch.inf)
    means_BSHD = means(logits_BSH, values_BSHD, own_logits, starts_BS, None if window >= num_read else window)
    if needs_state:
        state = last_tokens(logits_BSH, values_BSHD, starts_BS, window - 1)
        state = PrefixSoftmaxState(state.logits_BSH, state.values_BSHD.float())
    return means_BSHD[:, num_read - num_new :], state if needs_state else None
