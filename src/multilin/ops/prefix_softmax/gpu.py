"""The running softmax mean on a GPU, compiled by Triton: each value read once forward, or twice where texts are few.

The formulas are in `gpu_math`, the kernels in the `gpu_global`, `gpu_windowed` and `gpu_step` files. Here they become
operators of PyTorch, with gradients and with shapes for tracing, so that autograd, compile and export know them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multilin.ops.prefix_softmax.compiled import empty_gradients, fill_in, is_traced, needs_gradients, windowed
from multilin.ops.prefix_softmax.gpu_run import (
    Kept,
    empty_kept,
    run_backward,
    run_forward,
    run_step,
)
from multilin.ops.prefix_softmax.tokens import PrefixSoftmaxState

WIDEST = 2**13  # numbers per head: one program of a step holds them all


def refuses(values: Tensor) -> str | None:
    """The reason against one call."""
    if values.shape[-1] > WIDEST:
        return f"heads are {values.shape[-1]} wide, and it takes at most {WIDEST}"
    if 0 in values.shape:
        return f"values of shape {tuple(values.shape)} are empty"
    return None


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
    """See `multilin.ops.prefix_softmax`. Logits in float32; values in that, bf16 or fp16, and the means like them."""
    null = -torch.inf if null_logit is None else null_logit
    num_new, num_past = logits_BTH.shape[1], 1 if window is None else window - 1
    past_logits = None if state is None else state.logits_BSH.float()
    past_values = None if state is None else state.values_BSHD.float()
    if num_new == 1 and (window is None or (state is not None and state.logits_BSH.shape[1] == num_past)):
        inputs = (logits_BTH, values_BTHD, own_logits, past_logits, past_values)
        if not needs_gradients(*inputs):
            return _step(
                logits_BTH, values_BTHD, own_logits, starts, past_logits, past_values, window, null, needs_state
            )
    if window is None:
        means, *final = _means(
            logits_BTH, values_BTHD, own_logits, starts, past_logits, past_values, None, null, needs_state
        )
        return means, PrefixSoftmaxState(*final) if needs_state else None

    def means_of(logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, cut: int | None) -> Tensor:
        return _means(logits, values, own, starts, None, None, cut, null, False)[0]

    return windowed(means_of, logits_BTH, values_BTHD, own_logits, starts, state, window, needs_state=needs_state)


def _step(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, needs_state: bool,
) -> tuple[Tensor, PrefixSoftmaxState | None]:  # fmt: skip
    """A single position, without gradients."""
    arguments = (logits, values, own, starts, state_logits, state_values, window, null, needs_state)
    if is_traced(logits, values, own, state_logits, state_values):
        means, *final = _one_step(*arguments)
    else:
        means, *final = run_step(*arguments)
    return means, PrefixSoftmaxState(*final) if needs_state else None


def _means(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, needs_state: bool,
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    """Means and summary token; without the operator around the kernels, which takes longer than they do, if it can."""
    inputs = (logits, values, own, state_logits, state_values)
    keeps = needs_gradients(*inputs)
    arguments = (logits, values, own, starts, state_logits, state_values, window, null, keeps, needs_state)
    if is_traced(*inputs):
        return _forward(*arguments)[:3]
    return _Eager.apply(*arguments) if keeps else run_forward(*arguments)[:3]


@torch.library.custom_op("multilin::prefix_softmax_step_gpu", mutates_args=())
def _one_step(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, needs_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    means, final_logits, final_values = run_step(
        logits, values, own, starts, state_logits, state_values, window, null, needs_state
    )
    if final_logits is None or final_values is None:
        return means, logits.new_empty(0), logits.new_empty(0)
    return means, final_logits, final_values


@_one_step.register_fake
def _step_shapes(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, needs_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    B, _, H, D = values.shape
    num_past = 1 if window is None else window - 1
    return (
        torch.empty((B, 1, H, D), dtype=values.dtype, device=values.device),
        logits.new_empty((B, num_past, H) if needs_state else (0,)),
        logits.new_empty((B, num_past, H, D) if needs_state else (0,)),
    )


@torch.library.custom_op("multilin::prefix_softmax_gpu", mutates_args=())
def _forward(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, keeps: bool, needs_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    means, final_logits, final_values, kept = run_forward(
        logits, values, own, starts, state_logits, state_values, window, null, keeps, needs_state
    )
    if final_logits is None or final_values is None:
        final_logits, final_values = logits.new_empty(0), logits.new_empty(0)
    return means, final_logits, final_values, *(kept or _nothing_kept(logits))


def _nothing_kept(logits: Tensor) -> Kept:
    return Kept(*(logits.new_empty(0) for _ in Kept._fields))


@_forward.register_fake
def _forward_shapes(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, keeps: bool, needs_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, T, H, D = values.shape
    return (
        torch.empty((B, T, H, D), dtype=values.dtype, device=values.device),
        logits.new_empty((B, 1, H) if needs_state else (0,)),
        logits.new_empty((B, 1, H, D) if needs_state else (0,)),
        *(empty_kept(values, window) if keeps else _nothing_kept(logits)),
    )


def _compute_gradients(
    dmeans: Tensor, dfinal_logits: Tensor | None, dfinal_values: Tensor | None, logits: Tensor, values: Tensor,
    own: Tensor | None, starts: Tensor | None, tops: Tensor, scales: Tensor, past_tops: Tensor, past_totals: Tensor,
    past_means: Tensor, window: int | None, null: float, has_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    kept = Kept(tops, scales, past_tops, past_totals, past_means)
    return run_backward(
        dmeans, dfinal_logits, dfinal_values, logits, values, own, starts, kept, window, null, has_state
    )


_backward = torch.library.custom_op("multilin::prefix_softmax_backward_gpu", _compute_gradients, mutates_args=())


@_backward.register_fake
def _backward_shapes(
    dmeans: Tensor, dfinal_logits: Tensor | None, dfinal_values: Tensor | None, logits: Tensor, values: Tensor,
    own: Tensor | None, starts: Tensor | None, tops: Tensor, scales: Tensor, past_tops: Tensor, past_totals: Tensor,
    past_means: Tensor, window: int | None, null: float, has_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_gradients(values, has_own=own is not None, has_state=has_state)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    logits, values, own, starts, _, state_values, window, null, keeps, _ = inputs
    _, _, final_values, *kept = output
    # The final state is saved for its shape alone; it is small.
    ctx.save_for_backward(logits, values, own, starts, final_values, *kept)
    ctx.window, ctx.null, ctx.has_state, ctx.keeps = window, null, state_values is not None, keeps
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dmeans: Tensor | None, *dfinal_and_kept: Tensor | None) -> tuple[Any, ...]:
    if not ctx.keeps:
        raise RuntimeError("multilin::prefix_softmax_gpu has no gradient where it was called with keeps=False")
    return _gradients(_backward, ctx, dmeans, *dfinal_and_kept[:2])


def _gradients(
    backward: Callable[..., Any], ctx: Any, dmeans: Tensor | None, dfinal_logits: Any = None, dfinal_values: Any = None
) -> tuple[Any, ...]:
    """Of all arguments of the operator, with its backward operator or without."""
    logits, values, own, starts, final_values, *kept = ctx.saved_tensors
    if dmeans is None:
        dmeans = torch.zeros_like(values)
    dfinal_logits, dfinal_values = fill_in(dfinal_logits, dfinal_values, final_values)
    dlogits, dvalues, down, dstate_logits, dstate_values = backward(
        dmeans, dfinal_logits, dfinal_values, logits, values, own, starts, *kept, ctx.window, ctx.null, ctx.has_state
    )
    state = (dstate_logits, dstate_values) if ctx.has_state else (None, None)
    return dlogits, dvalues, None if own is None else down, None, *state, None, None, None, None


class _Eager(torch.autograd.Function):
    """The operator for tensors that are numbers: no name to look up, a call costs less time."""

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
