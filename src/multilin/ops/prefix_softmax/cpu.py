"""The running softmax mean on a CPU, compiled by numba: about as fast as memory delivers the values.

The formulas and kernels are in the `cpu_global` and `cpu_windowed` files. Here they become operators of PyTorch, with
gradients and with shapes for tracing, so that autograd, autocast, compile and export know them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multilin.ops.prefix_softmax.compiled import empty_gradients, fill_in, is_traced, needs_gradients, windowed
from multilin.ops.prefix_softmax.cpu_run import (
    Kept,
    empty_kept,
    is_gated,
    run_backward,
    run_forward,
)
from multilin.ops.prefix_softmax.tokens import PrefixSoftmaxState


def prefix_softmax(
    logits_BTH: Tensor,
    values_BTHD: Tensor,
    *,
    window: int | None = None,
    own_logits: Tensor | None = None,
    null_logit: float | None = None,
    state: PrefixSoftmaxState | None = None,
    starts: Tensor | None = None,
    needs_state: bool = True,
) -> tuple[Tensor, PrefixSoftmaxState | None]:
    """See `multilin.ops.prefix_softmax`. Logits in float32; values in float32 or bf16, and the means like them."""
    null = -torch.inf if null_logit is None else null_logit
    if window is None:
        past = state
        if state is not None and state.values_BSHD.dtype is not torch.float32:
            past = PrefixSoftmaxState(state.logits_BSH.float(), state.values_BSHD.float())
        means, final_logits, final_values = _means(
            logits_BTH, values_BTHD, own_logits, starts, past, None, null, needs_state
        )
        if not needs_state or final_logits is None or final_values is None:
            return means, None
        return means, PrefixSoftmaxState(final_logits, final_values)

    def means_of(logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, cut: int | None) -> Tensor:
        return _means(logits, values, own, starts, None, cut, null, False)[0]

    return windowed(means_of, logits_BTH, values_BTHD, own_logits, starts, state, window, needs_state=needs_state)


def _means(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state: PrefixSoftmaxState | None,
    window: int | None, null: float, needs_state: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Means and summary token; without the operator around the kernels, which takes longer than a token, if it can."""
    state_logits, state_values = (None, None) if state is None else state
    inputs = (logits, values, own, state_logits, state_values)
    keeps = needs_gradients(*inputs)
    arguments = (logits, values, own, starts, state_logits, state_values, window, null, keeps, needs_state)
    if is_traced(*inputs):
        return _forward(*arguments)[:3]
    return _Eager.apply(*arguments) if keeps else run_forward(*arguments)[:3]


@torch.library.custom_op("multilin::prefix_softmax", mutates_args=(), device_types="cpu")
def _forward(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, keeps: bool, needs_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    means, final_logits, final_values, kept = run_forward(
        logits, values, own, starts, state_logits, state_values, window, null, keeps, needs_state
    )
    if final_logits is None or final_values is None:
        final_logits, final_values = logits.new_empty(0), logits.new_empty(0)
    return means, final_logits, final_values, *(kept or _nothing_kept(logits, values))


def _nothing_kept(logits: Tensor, values: Tensor) -> Kept:
    return Kept(logits.new_empty(0), logits.new_empty(0), values.new_empty(0))


@_forward.register_fake
def _forward_shapes(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, keeps: bool, needs_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, T, H, D = values.shape
    kept = _nothing_kept(logits, values)
    if keeps:
        kept = empty_kept(values, window, own, null)
    return (
        torch.empty((B, T, H, D), dtype=values.dtype, device=values.device),
        logits.new_empty((B, 1, H) if needs_state else (0,)),
        logits.new_empty((B, 1, H, D) if needs_state else (0,)),
        *kept,
    )


def _compute_gradients(
    dmeans: Tensor, dfinal_logits: Tensor | None, dfinal_values: Tensor | None, values: Tensor, means: Tensor,
    weights: Tensor, checkpoints: Tensor, rounding: Tensor, window: int | None, has_own: bool, has_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    kept = Kept(weights, checkpoints, rounding)
    return run_backward(dmeans, dfinal_logits, dfinal_values, values, means, kept, window, has_own, has_state)


_backward = torch.library.custom_op(
    "multilin::prefix_softmax_backward", _compute_gradients, mutates_args=(), device_types="cpu"
)


@_backward.register_fake
def _backward_shapes(
    dmeans: Tensor, dfinal_logits: Tensor | None, dfinal_values: Tensor | None, values: Tensor, means: Tensor,
    weights: Tensor, checkpoints: Tensor, rounding: Tensor, window: int | None, has_own: bool, has_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_gradients(values, has_own=has_own, has_state=has_state)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, values, own, _, _, state_values, window, null, keeps, _ = inputs
    means, _, final_values, *kept = output
    # Gated means of the whole past are not read again: their memory can be freed.
    reads_means = window is not None or not is_gated(values, own, null)
    ctx.save_for_backward(values, final_values, *kept, *([means] if reads_means else []))
    ctx.window, ctx.has_own, ctx.has_state, ctx.keeps = window, own is not None, state_values is not None, keeps
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dmeans: Tensor | None, *dfinal_and_kept: Tensor | None) -> tuple[Any, ...]:
    if not ctx.keeps:
        raise RuntimeError("multilin::prefix_softmax has no gradient where it was called with keeps=False")
    return _gradients(_backward, ctx, dmeans, *dfinal_and_kept[:2])


def _gradients(
    backward: Callable[..., Any], ctx: Any, dmeans: Tensor | None, dfinal_logits: Any = None, dfinal_values: Any = None
) -> tuple[Any, ...]:
    """Of all arguments of the operator, with its backward operator or without."""
    values, final_values, *kept_and_means = ctx.saved_tensors
    kept, means = kept_and_means[:3], (kept_and_means[3:] or kept_and_means)[0]
    if dmeans is None:
        dmeans = torch.zeros_like(values)
    dfinal_logits, dfinal_values = fill_in(dfinal_logits, dfinal_values, final_values)
    dlogits, dvalues, down, dstate_logits, dstate_values = backward(
        dmeans, dfinal_logits, dfinal_values, values, means, *kept, ctx.window, ctx.has_own, ctx.has_state
    )
    state = (dstate_logits, dstate_values) if ctx.has_state else (None, None)
    return dlogits, dvalues, down if ctx.has_own else None, None, *state, None, None, None, None


class _Eager(torch.autograd.Function):
    """The operator for tensors that are numbers: no name to look up, a call costs a third of the time."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `run_forward`."""
        means, final_logits, final_values, kept = run_forward(*inputs)
        assert kept is not None
        _save(ctx, inputs, (means, final_logits, final_values, *kept))
        return means, final_logits, final_values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """See `run_backward`."""
        return _gradients(_compute_gradients, ctx, *gradients)


_forward.register_autograd(_differentiate, setup_context=_save)
