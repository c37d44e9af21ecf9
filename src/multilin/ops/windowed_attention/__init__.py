"""Softmax attention over a window of earlier tokens, with decays over distance and an optional null key."""

import math
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from multilin.errors import InputError
from multilin.ops.dispatch import Backend, Op, few_tokens, gpu_kernels
from multilin.ops.ring import Ring
from multilin.ops.shapes import check_heads, check_shapes
from multilin.ops.windowed_attention import gpu, portable, reference
from multilin.ops.windowed_attention.reference import WindowedAttentionState, windowed_attention_weights

__all__ = ["WINDOWED_ATTENTION", "WindowedAttentionState", "windowed_attention", "windowed_attention_weights"]

WINDOWED_ATTENTION = Op(
    "windowed_attention",
    [
        gpu_kernels("tiles, weights recomputed in the backward pass", gpu.windowed_attention, gpu.refuses),
        Backend("portable (PyTorch, blocks)", portable.windowed_attention),
        Backend("reference (PyTorch, quadratic time)", reference.windowed_attention),
    ],
    special_cases=[
        Backend("window 0", portable.one_token, refuses=partial(portable.why_wider, 0)),
        few_tokens(reference.windowed_attention, portable.SHORT, "cpu"),
        Backend("window 1", portable.one_token, "cpu", refuses=partial(portable.why_wider, 1)),
    ],
)


def windowed_attention(
    queries: Float[Tensor, "B T H D"],
    keys: Float[Tensor, "B T H D"],
    values: Float[Tensor, "B T H E"],
    *,
    window: int,
    scale: float = 1.0,
    slope: float | Tensor = 0.0,
    hyper: float | Tensor = 0.0,
    null_key: bool = False,
    padding: Bool[Tensor, "B T"] | None = None,
    state: WindowedAttentionState | Ring | None = None,
    starts: Bool[Tensor, "B T"] | None = None,
    needs_state: bool = True,
) -> tuple[Float[Tensor, "B T H E"], WindowedAttentionState | None]:
    """Average the values of the tokens in a window, weighted by the softmax of query-key products with a decay.

    The logits, for a position t and a token j:

        l_{t,j} = scale * q_t . k_j - slope * d + hyper / d        d = t - j, 1 <= d <= window, same text

    A position without a visible token gets 0. A null key adds 1 to the denominator (a token of logit 0 and value 0).
    Rotary positions must be applied to queries and keys before the call.

    Args:
        queries, keys: (B, T, H, D).
        values: (B, T, H, E); E may differ from D. All three may be float64, float32 or bf16.
        window: the number of earlier tokens that each position reads; with 0, each position reads only itself.
        scale: factor of the product of query and key.
        slope, hyper: linear and hyperbolic decay over the distance in tokens; numbers or scalar tensors.
        null_key: whether there is a null key.
        padding: (B, T) True at padding, which no position reads.
        state: the state that an earlier call returned; its tokens are read first. It may be a `Ring`.
        starts: (B, T) True where a new text begins; its positions read neither the state nor tokens before the start.
        needs_state: False if the text ends here: None is returned in place of the state.

    Returns:
        The means (B, T, H, E) in the dtype of `values`, and the last `window` keys and values in float32 or better;
        for a ring, only the new tokens.

    Raises:
        InputError: a negative window, or shapes that do not fit.

    Cost: 2 B T H (window + 64) (D + E) multiplications and additions forward, three times as many with a backward pass,
    in float32 or better even for bf16 inputs. Memory is proportional to the inputs, since weights exist for one tile at
    a time and are computed again backward.
    Source: the documents of 3Lin and TScale, which also give the decays and the width schedule.
    """
    _check_reach(window, slope, hyper)
    check_heads(queries, keys, values)
    (B, T, H, D), E, S = keys.shape, values.shape[3], window
    check_shapes(("padding", padding, (B, T)), ("starts", starts, (B, T)))
    if state is not None and not isinstance(state, Ring):
        check_shapes(("state", state.keys_BSHD, (B, S, H, D)), ("state", state.values_BSHE, (B, S, H, E)))
        check_shapes(("state", state.logits_BS, (B, S)))
    with torch.autocast(values.device.type, enabled=False):
        if isinstance(state, Ring):
            means, new = portable.from_ring(
                queries, keys, values, state, window=window, scale=scale, slope=slope, hyper=hyper, null_key=null_key,
                padding=padding,
            )  # fmt: skip
            return means.to(values.dtype), new
        means, after = WINDOWED_ATTENTION(
            queries, keys, values, window=window, scale=scale, slope=slope, hyper=hyper, null_key=null_key,
            padding=padding, state=state, starts=starts, needs_state=needs_state,
            dtype=torch.promote_types(queries.dtype, values.dtype),
        )  # fmt: skip
    return means.to(values.dtype), after


def _check_reach(window: int, slope: float | Tensor, hyper: float | Tensor) -> None:
    """Refuse a negative window and decays out of range; learned decays, which are tensors, are not checked."""
    if window < 0:
        raise InputError(f"window: {window} given, but it must be at least 0")
    for name, decay, least in (("slope", slope, 0.0), ("hyper", hyper, -math.inf)):
        if not isinstance(decay, Tensor) and not (math.isfinite(decay) and decay >= least):
            raise InputError(f"{name}: {decay} given, but it must be a finite number{' of at least 0' * (least == 0)}")
