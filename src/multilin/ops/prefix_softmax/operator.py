"""The PyTorch operator that runs the CPU or GPU kernels, with its gradients and its shapes for tracing.

The modules `cpu` and `gpu` start the kernels; both define `forward`, `backward` and `empty_kept`. The argument
`kernels` names the module; the device cannot, because interpreted Triton kernels also run on CPU tensors.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from multilin.ops.kernels import is_traced, needs_gradients, refuse_second_derivative
from multilin.ops.prefix_softmax import cpu, gpu
from multilin.ops.prefix_softmax.reference import PrefixSoftmaxState, last_tokens, read_state_first

_MODULES: dict[str, Any] = {"cpu": cpu, "gpu": gpu}


def prefix_softmax(
    kernels: str, logits_BTH: Tensor, values_BTHD: Tensor, *, window: int | None = None,
    own_logits: Tensor | None = None, null_logit: float | None = None, state: PrefixSoftmaxState | None = None,
    starts: Tensor | None = None, needs_state: bool = True,
) -> tuple[Tensor, PrefixSoftmaxState | None]:  # fmt: skip
    """See `multilin.ops.prefix_softmax`. Logits in float32; values and means in float32 or half precision.

    With a window, the kernels get the state's tokens and the new tokens as one text, except for one new token on a GPU.
    """
    null, num_new = -torch.inf if null_logit is None else null_logit, logits_BTH.shape[1]
    is_step = kernels == "gpu" and num_new == 1 and state is not None and state.logits_BSH.shape[1] + 1 == window
    if window is None or is_step:
        past: Any = (None, None)
        if state is not None:
            logits_BSH = state.logits_BSH.double() if window is None else state.logits_BSH.float()
            past = logits_BSH, state.values_BSHD.float()
        if window is None or not needs_gradients(logits_BTH, values_BTHD, *past):
            inputs = (logits_BTH, values_BTHD, own_logits, starts, *past, window, null, needs_state)
            means, *final = _means(kernels, *inputs)
            return means, PrefixSoftmaxState(*final) if needs_state else None
    logits_BSH, values_BSHD, starts_BS = read_state_first(logits_BTH, values_BTHD, state, starts)
    num_read = logits_BSH.shape[1]
    cut = None if window >= num_read else window
    means_BSHD = _means(kernels, logits_BSH, values_BSHD, None, starts_BS, None, None, cut, null, False)[0]
    if needs_state:
        state = last_tokens(logits_BSH, values_BSHD, starts_BS, window - 1)
        state = PrefixSoftmaxState(state.logits_BSH, state.values_BSHD.float())
    return means_BSHD[:, num_read - num_new :], state if needs_state else None


def _means(
    kernels: str, logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None,
    state_logits: Tensor | None, state_values: Tensor | None, window: int | None, null: float, needs_state: bool,
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    """The means, and the next state. Without tracing, the operator is skipped: calling it takes longer than a token."""
    keeps = needs_gradients(logits, values, own, state_logits, state_values)
    arguments = (logits, values, own, starts, state_logits, state_values, window, null, keeps, needs_state)
    if is_traced(logits, values):
        return _forward(kernels, *arguments)[:3]
    return _Eager.apply(kernels, *arguments) if keeps else _MODULES[kernels].forward(*arguments)[:3]


def _run_forward(kernels: str, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(arguments[0].new_empty(0) if x is None else x for x in _MODULES[kernels].forward(*arguments))


def _run_backward(kernels: str, *arguments: Any) -> tuple[Tensor, ...]:
    *inputs, kept_a, kept_b, kept_c, window, null, _ = arguments
    gradients = _empty_gradients(kernels, *arguments)
    _MODULES[kernels].backward(*inputs, (kept_a, kept_b, kept_c), window, null, gradients)
    return gradients


_forward = torch.library.custom_op(
    "multilin::prefix_softmax", _run_forward, mutates_args=(),
    schema="(str kernels, Tensor logits, Tensor values, Tensor? own_logits, Tensor? starts, Tensor? state_logits, "
    "Tensor? state_values, SymInt? window, float null, bool keeps, bool needs_state) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
_backward = torch.library.custom_op(
    "multilin::prefix_softmax_backward", _run_backward, mutates_args=(),
    schema="(str kernels, Tensor dmeans, Tensor? dfinal_logits, Tensor? dfinal_values, Tensor? logits, Tensor values, "
    "Tensor? own_logits, Tensor? starts, Tensor? means, Tensor kept_a, Tensor kept_b, Tensor kept_c, SymInt? window, "
    "float null, bool has_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip


@_forward.register_fake
def _forward_shapes(kernels: str, logits: Tensor, values: Tensor, own: Tensor | None, *others: Any) -> tuple[Any, ...]:
    *_, window, null, keeps, needs_state = others
    B, T, H, D = values.shape
    S = 1 if window is None else window - 1
    kept = _MODULES[kernels].empty_kept(values, own, window, null) if keeps else (logits.new_empty(0) for _ in range(3))
    kind = torch.float64 if needs_state and window is None else torch.float32
    final_logits = logits.new_empty((B, S, H) if needs_state else (0,), dtype=kind)
    final_values = logits.new_empty((B, S, H, D) if needs_state else (0,))
    return values.new_empty((B, T, H, D)), final_logits, final_values, *kept


@_backward.register_fake
def _empty_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """Allocate gradients of logits, own logits and state in float32, and of values; size 0 for None."""
    values, own, has_state = arguments[5], arguments[6], arguments[-1]
    B, T, H, D = values.shape
    num_own, num_states = 0 if own is None else B, B if has_state else 0
    shapes = (B, T, H), (num_own, T, H), (num_states, 1, H), (num_states, 1, H, D)
    dlogits, *others = (torch.empty(shape, dtype=torch.float32, device=values.device) for shape in shapes)
    return dlogits, torch.empty(B, T, H, D, dtype=values.dtype, device=values.device), *others


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    kernels, logits, values, own, starts, _, state_values, window, null, keeps, needs_state = inputs
    means, _, _, *kept = output
    # Tensors that the backward pass does not read are not kept, so that their memory can be freed.
    if kernels == "cpu":
        logits = starts = None
    if kernels == "gpu" or (window is None and cpu.is_gated(values, own, null)):
        means = None
    ctx.save_for_backward(logits, values, own, starts, means, *kept)
    ctx.has_state, ctx.keeps, ctx.needs_state = state_values is not None, keeps, needs_state
    ctx.options = kernels, window, null, ctx.has_state
    ctx.set_materialize_grads(False)


def _differentiate(
    backward: Any, ctx: Any, dmeans: Tensor | None, dfinal_logits: Tensor | None, dfinal_values: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    """Gradients of all arguments of the operator; `backward` is `_backward`, or `_run_backward` without tracing."""
    if not ctx.keeps:
        raise RuntimeError("multilin::prefix_softmax: called with keeps=False, so it has no gradient")
    saved, (kernels, *options) = ctx.saved_tensors, ctx.options
    values, own = saved[1:3]
    if dmeans is None:
        dmeans = torch.zeros_like(values)
    dfinal_logits = None if dfinal_logits is None else dfinal_logits.float()
    if not ctx.needs_state:
        dfinal_logits = dfinal_values = None
    elif dfinal_logits is None and dfinal_values is not None:
        dfinal_logits = torch.zeros_like(dfinal_values[..., 0])
    elif dfinal_values is None and dfinal_logits is not None:
        dfinal_values = dfinal_logits.new_zeros((*dfinal_logits.shape, values.shape[-1]))
    dlogits, dvalues, down, *dstate = backward(kernels, dmeans, dfinal_logits, dfinal_values, *saved, *options)
    dstate = dstate if ctx.has_state else (None, None)
    return None, dlogits, dvalues, None if own is None else down, None, *dstate, None, None, None, None


class _Eager(torch.autograd.Function):
    """The operator outside of tracing, which skips PyTorch's dispatcher, so that a call takes a third of the time."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        output = _MODULES[inputs[0]].forward(*inputs[1:])
        _save(ctx, inputs, output)
        return output[:3]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative("prefix_softmax")
        return _differentiate(_run_backward, ctx, *gradients)


_forward.register_autograd(partial(_differentiate, _backward), setup_context=_save)
