"""Windowed attention on a GPU, by kernels of our own.

PyTorch's flex_attention could express the windows and decays. But like every attention that keeps only the sum of
exponentials it takes the gradient as p (g - dmeans . means), a difference that keeps few digits where one weight is
nearly 1: our decays make most rows so, and `softmax` here says what is done about it. It also has no null key, runs
float32 in tf32 and must be compiled for each kind of call. The kernels count g from dmeans . means first and then
subtract what the softmax's own gradient still takes away, for which the tiles of a window are read twice backward.

A call with one token and a state, which decoding makes, is one kernel: it reads the state and writes the next one. The
kernels are in `gpu_kernels`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from multilin.ops.kernels.rows import dense_rows
from multilin.ops.windowed_attention.itself import read_itself
from multilin.ops.windowed_attention.tokens import WindowedAttentionState, last_tokens, read_state_first

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # numbers of a head that fit into the registers
_NARROW = 256  # windows up to here are few tiles, and may want other numbers of warps


def refuses(queries: Tensor, keys: Tensor, values: Tensor, *_: object, **options: object) -> str | None:
    """The reason against heads that are too wide."""
    widest = max(keys.shape[3], values.shape[3])
    return None if widest <= WIDEST else f"heads of {widest} numbers are wider than {WIDEST}"


def windowed_attention(
    queries_BTHD: Tensor,
    keys_BTHD: Tensor,
    values_BTHE: Tensor,
    logits_BT: Tensor,
    *,
    window: int,
    scale: float,
    slope: float | Tensor = 0.0,
    hyper: float | Tensor = 0.0,
    null_key: bool = False,
    state: WindowedAttentionState | None = None,
    starts: Tensor | None = None,
    needs_state: bool = True,
) -> tuple[Tensor, WindowedAttentionState | None]:
    """See `multilin.ops.windowed_attention`."""
    decays, slope, hyper = _decays(slope, hyper, keys_BTHD.device)
    inputs = queries_BTHD, keys_BTHD, values_BTHE
    if state is not None and _is_step(*inputs, decays, *state, window=window):
        means, *after = _step(
            *inputs, logits_BT, *state, starts, decays, float(scale), slope, hyper, null_key, needs_state
        )
        return means, WindowedAttentionState(*after) if needs_state else None
    keys, values, logits_BS = read_state_first(keys_BTHD, values_BTHE, logits_BT, state)
    after_all = last_tokens(keys, values, logits_BS, starts, window) if needs_state else None
    if window == 0:
        return read_itself(queries_BTHD, keys_BTHD, values_BTHE, logits_BT, scale, null_key), after_all
    dtype = torch.promote_types(queries_BTHD.dtype, values_BTHE.dtype)
    num_read = keys.shape[1] - keys_BTHD.shape[1]
    texts_BS = None if starts is None else pad(starts.cumsum(dim=1, dtype=torch.int32), (num_read, 0))
    means_BTHE, _, _ = _attend(
        queries_BTHD.to(dtype), keys.to(dtype), values.to(dtype), logits_BS, texts_BS, decays,
        window, float(scale), slope, hyper, null_key,
    )  # fmt: skip
    return means_BTHE, after_all


def _decays(slope: float | Tensor, hyper: float | Tensor, device: torch.device) -> tuple[Tensor | None, float, float]:
    """Both as one tensor if either is one, without waiting for the device; else as numbers."""
    if not isinstance(slope, Tensor) and not isinstance(hyper, Tensor):
        return None, float(slope), float(hyper)
    both = [x.to(device) if isinstance(x, Tensor) else torch.full((), x, device=device) for x in (slope, hyper)]
    return torch.stack([x.float().reshape(()) for x in both]), 0.0, 0.0


def _is_step(
    queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor | None,
    state_keys: Tensor, state_values: Tensor, state_logits: Tensor, *, window: int,
) -> bool:  # fmt: skip
    """One token after a full state, with no gradient asked for."""
    inputs = (queries, keys, values, state_keys, state_values, *(() if decays is None else (decays,)))
    is_learning = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    is_full = state_keys.shape[1] == window >= 1 and state_keys.dtype == torch.float32
    return keys.shape[1] == 1 and is_full and not is_learning


@torch.library.custom_op("multilin::windowed_attention_gpu", mutates_args=())
def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, logits: Tensor, texts: Tensor | None, decays: Tensor | None,
    window: int, scale: float, slope: float, hyper: float, null_key: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from multilin.ops.windowed_attention.gpu_kernels import forward

    (num_batch, num_new, num_heads, _), value_width = queries.shape, values.shape[3]
    means = torch.empty((num_batch, num_new, num_heads, value_width), dtype=values.dtype, device=keys.device)
    top = torch.empty((num_batch, num_heads, num_new), dtype=torch.float32, device=keys.device)
    total = torch.empty_like(top)
    if means.numel():
        tensors, numbers, constants = _arguments(queries, keys, values, logits, texts, decays)
        numbers[3:3] = [min(window, keys.shape[1]), scale, slope, hyper]
        forward[(num_batch * num_heads, -(-num_new // constants["BQ"]))](
            *tensors, means, top, total, *numbers, **constants, NULL_KEY=null_key, is_wide=window > _NARROW
        )
    return means, top, total


@_attend.register_fake
def _attended(
    queries: Tensor, keys: Tensor, values: Tensor, logits: Tensor, texts: Tensor | None, decays: Tensor | None,
    window: int, scale: float, slope: float, hyper: float, null_key: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    num_batch, num_new, num_heads, _ = queries.shape
    rows = queries.new_empty((num_batch, num_heads, num_new), dtype=torch.float32)
    return values.new_empty((num_batch, num_new, num_heads, values.shape[3])), rows, torch.empty_like(rows)


@torch.library.custom_op("multilin::windowed_attention_gpu_backward", mutates_args=())
def _attend_backward(
    dmeans: Tensor, means: Tensor, top: Tensor, total: Tensor,
    queries: Tensor, keys: Tensor, values: Tensor, logits: Tensor, texts: Tensor | None, decays: Tensor | None,
    window: int, scale: float, slope: float, hyper: float, null_key: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from multilin.ops.windowed_attention.gpu_kernels import backward_keys, backward_queries

    num_batch, num_new, num_heads, _ = queries.shape
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (queries, keys, values)]
    if means.numel() == 0:
        return *(x.zero_() for x in gradients), torch.zeros(2, device=keys.device)  # type: ignore[return-value]
    tensors, numbers, constants = _arguments(queries, keys, values, logits, texts, decays)
    dmeans = dense_rows(dmeans)
    numbers[3:3] = [min(window, keys.shape[1]), scale, slope, hyper]
    numbers += dmeans.stride()[:3]
    origin, rest = torch.empty_like(top), torch.empty_like(top)
    tiles = -(-num_new // constants["BQ"])
    ddecays = None if decays is None else torch.empty((num_batch * num_heads * tiles, 2), device=keys.device)
    is_wide = window > _NARROW
    backward_queries[(num_batch * num_heads, tiles)](
        *tensors, means, top, total, dmeans, gradients[0], origin, rest, ddecays, *numbers, **constants,
        NULL_KEY=null_key, is_wide=is_wide,
    )  # fmt: skip
    backward_keys[(num_batch * num_heads, -(-keys.shape[1] // constants["BL"]))](
        *tensors, top, total, dmeans, origin, rest, *gradients[1:], *numbers, **constants, is_wide=is_wide
    )
    return *gradients, torch.zeros(2, device=keys.device) if ddecays is None else ddecays.sum(dim=0)  # type: ignore[return-value]


@_attend_backward.register_fake
def _attended_backward(
    dmeans: Tensor, means: Tensor, top: Tensor, total: Tensor,
    queries: Tensor, keys: Tensor, values: Tensor, logits: Tensor, texts: Tensor | None, decays: Tensor | None,
    window: int, scale: float, slope: float, hyper: float, null_key: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = [x.new_empty(x.shape) for x in (queries, keys, values)]
    return gradients[0], gradients[1], gradients[2], top.new_empty(2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.options = inputs[6:]


def _differentiate(ctx: Any, dmeans: Tensor, *_: Any) -> tuple[Any, ...]:
    means, top, total, *inputs = ctx.saved_tensors
    dqueries, dkeys, dvalues, ddecays = _attend_backward(dmeans, means, top, total, *inputs, *ctx.options)
    return dqueries, dkeys, dvalues, None, None, None if inputs[5] is None else ddecays, *[None] * 5


_attend.register_autograd(_differentiate, setup_context=_save)


def _arguments(
    queries: Tensor, keys: Tensor, values: Tensor, logits: Tensor, texts: Tensor | None, decays: Tensor | None
) -> tuple[list[Tensor | None], list[Any], dict[str, int]]:
    """Tensors, numbers and constants that all kernels take; the options come after the first three numbers."""
    from multilin.ops.kernels.gpu_launch import block_of

    queries, keys, values = dense_rows(queries), dense_rows(keys), dense_rows(values)
    texts = None if texts is None else texts.contiguous()
    width, value_width = queries.shape[3], values.shape[3]
    is_large = max(width, value_width) * queries.element_size() > 256
    numbers = [queries.shape[1], keys.shape[1], queries.shape[2]]
    strides = [stride for x in (queries, keys, values) for stride in x.stride()[:3]]
    constants = {
        "D": width, "E": value_width, "BD": block_of(width, WIDEST), "BE": block_of(value_width, WIDEST),
        "BQ": block_of(queries.shape[1], 64), "BL": block_of(keys.shape[1], 32 if is_large else 64),
    }  # fmt: skip
    return [queries, keys, values, logits.float().contiguous(), texts, decays], numbers + strides, constants


@torch.library.custom_op("multilin::windowed_attention_gpu_step", mutates_args=())
def _step(
    query: Tensor, key: Tensor, value: Tensor, logit: Tensor, keys: Tensor, values: Tensor, logits: Tensor,
    starts: Tensor | None, decays: Tensor | None, scale: float, slope: float, hyper: float, null_key: bool,
    needs_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from multilin.ops.kernels.gpu_launch import block_of
    from multilin.ops.windowed_attention.gpu_kernels import step

    query, key, value = dense_rows(query), dense_rows(key), dense_rows(value)
    num_batch, num_read, num_heads, width = keys.shape
    means = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    state = [x.contiguous() for x in (keys, values, logits.float())]
    after = [torch.empty(x.shape if needs_state else (0,), dtype=x.dtype, device=x.device) for x in state]
    if means.numel():
        step[(num_batch * num_heads,)](
            query, key, value, logit.float().contiguous(), *state,
            None if starts is None else starts.to(torch.int8).contiguous(), decays, means, *after,
            num_read, num_heads, scale, slope, hyper,
            *(x.stride(axis) for x in (query, key, value) for axis in (0, 2)),
            D=width, E=values.shape[3], BD=block_of(width, WIDEST), BE=block_of(values.shape[3], WIDEST),
            BL=block_of(num_read, 32), NULL_KEY=null_key, NEEDS_STATE=needs_state,
        )  # fmt: skip
    return means, after[0], after[1], after[2]


@_step.register_fake
def _stepped(
    query: Tensor, key: Tensor, value: Tensor, logit: Tensor, keys: Tensor, values: Tensor, logits: Tensor,
    starts: Tensor | None, decays: Tensor | None, scale: float, slope: float, hyper: float, null_key: bool,
    needs_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    state = [x.new_empty(x.shape if needs_state else (0,), dtype=torch.float32) for x in (keys, values, logits)]
    return value.new_empty(value.shape), state[0], state[1], state[2]
