"""The running softmax mean of values, over the whole past or a window of it."""

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.dispatch import Backend, Op, cpu_kernels, gpu_kernels
from multilin.ops.kernels import is_exported
from multilin.ops.prefix_softmax import gpu, operator, portable, reference
from multilin.ops.prefix_softmax.reference import PrefixSoftmaxState, prefix_softmax_weights
from multilin.ops.ring import Ring
from multilin.ops.shapes import check_shapes

__all__ = ["PREFIX_SOFTMAX", "PrefixSoftmaxState", "prefix_softmax", "prefix_softmax_weights"]

PREFIX_SOFTMAX = Op(
    "prefix_softmax",
    [
        cpu_kernels("compiled, linear time", partial(operator.prefix_softmax, "cpu")),
        gpu_kernels("compiled, linear time", partial(operator.prefix_softmax, "gpu"), gpu.refuses),
        Backend("portable (PyTorch, linear time)", portable.prefix_softmax),
        Backend("reference (PyTorch, quadratic time)", reference.prefix_softmax),
    ],
)


def prefix_softmax(
    logits: Float[Tensor, "B T H"],
    values: Float[Tensor, "B T H D"],
    *,
    window: int | None = None,
    own_logits: Float[Tensor, "B T H"] | None = None,
    null_logit: float | None = None,
    state: PrefixSoftmaxState | Ring | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
    needs_state: bool = True,
) -> tuple[Float[Tensor, "B T H D"], PrefixSoftmaxState | None]:
    """Average the values read so far, weighted by the softmax of one logit per token.

        y_t = sum_j e^{l_j} v_j / sum_j e^{l_j}      j <= t, of the same text, and j > t - window if there is a window

    A running maximum is subtracted from the logits, so any finite logit is safe. A token of logit -inf (padding) has no
    weight; a position that reads only such tokens gets 0. If one token has nearly all the weight of a window, the
    gradient of this token's logit has an error of about 1e-7 times dy . v.

    Args:
        logits: (B, T, H) natural-log weights, one per token and head; -inf allowed, +inf and nan not.
        values: (B, T, H, D) the values to average.
        window: number of tokens read, including the current token; None reads the whole past.
        own_logits: (B, T, H) logits with which each position reads its own value a second time; later positions do not
            see these logits. With None, no value is read twice. Not allowed with a window or a null token.
        null_logit: logit of an extra token of value 0 that every position reads (adds e^null_logit to the denominator).
        state: the state that an earlier call returned; its tokens are read first. With a window it may be a `Ring`.
        starts: (B, T) True where a new text begins; its positions read neither the state nor tokens before the start.
        needs_state: False if the sequence ends here: None is returned in place of the state.

    Returns:
        The means (B, T, H, D) in the dtype of `values`, and the state after the last token. Without a window, the state
        is one summary token, whose logit is float64; with a window, the last window - 1 tokens; for a ring, only the
        new tokens. All other numbers are float32 (float64 if an input is float64).

    Raises:
        InputError: a window below 1, own_logits with a window or null_logit, or shapes that do not fit.

    Cost: O(B T H D) time and memory, whatever the window.
    Source: "Additive Attention Is All You Need?" (mtanghu), equations 5 and 9, computed as a running summary.
    """
    if window is not None and window < 1:
        raise InputError(f"window: {window} given, but it must be at least 1, or None for the whole past")
    if own_logits is not None:
        reference.check_own_term(window, null_logit)
    if values.shape[:3] != logits.shape:
        raise InputError(
            f"values: shape {tuple(values.shape)} given, but it must begin with logits' shape {tuple(logits.shape)}"
        )
    (B, T, H, D), S = values.shape, 1 if window is None else window - 1
    check_shapes(("own_logits", own_logits, (B, T, H)), ("starts", starts, (B, T)))
    if state is not None and not isinstance(state, Ring):
        check_shapes(("state", state.logits_BSH, (B, S, H)), ("state", state.values_BSHD, (B, S, H, D)))
    if torch.is_autocast_enabled(values.device.type):
        with torch.autocast(values.device.type, enabled=False):
            return prefix_softmax(
                logits, values, window=window, own_logits=own_logits, null_logit=null_logit,
                state=state, starts=starts, needs_state=needs_state,
            )  # fmt: skip
    # `to` does no work if the dtype is the same, but the call takes noticeable time beside a single token.
    dtype = torch.float64 if torch.float64 in (logits.dtype, values.dtype) else torch.float32
    if logits.dtype is not dtype:
        logits = logits.to(dtype)
    if own_logits is not None and own_logits.dtype is not dtype:
        own_logits = own_logits.to(dtype)
    if isinstance(state, Ring):
        return _read_ring(logits, values, state, window, null_logit)
    if window is None and not T:
        empty = PrefixSoftmaxState(logits.new_full((B, 1, H), -torch.inf).double(), logits.new_zeros(B, 1, H, D))
        return values, (state or empty) if needs_state else None
    backend = PREFIX_SOFTMAX.backend_for(
        values.device, dtype if dtype is torch.float64 else values.dtype, (values, logits, own_logits)
    )
    means, after = backend.compute(
        logits, values, window=window, own_logits=own_logits, null_logit=null_logit,
        state=state, starts=starts, needs_state=needs_state,
    )  # fmt: skip
    if window is not None and after is not None:
        after = reference.PrefixSoftmaxWindow(*after)
    return means if means.dtype is values.dtype else means.to(values.dtype), after


def _read_ring(
    logits: Tensor, values: Tensor, ring: Ring, window: int | None, null_logit: float | None
) -> tuple[Tensor, reference.PrefixSoftmaxWindow]:
    """The means at new tokens, which read a ring; and the new tokens to put into the ring."""
    assert window is not None
    new = reference.PrefixSoftmaxWindow(logits, values.to(logits.dtype))
    if logits.shape[1] == 1 and not is_exported():
        # A single new token reads all tokens of the ring, so their order does not matter.
        options = {"window": ring.num_slots + 1, "null_logit": null_logit, "state": ring.tokens, "needs_state": False}
        return prefix_softmax(logits, values, **options)[0], new
    means = portable.from_ring(logits, values, ring, window=window, null_logit=null_logit)
    return means.to(values.dtype), new
