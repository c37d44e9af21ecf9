"""Windowed attention on a GPU, by multilin's own kernels.

PyTorch's flex_attention computes the gradient of a score as p (g - dmeans . means): few digits are left if one weight p
is nearly 1, as is common with decays. flex_attention also has no null key and computes float32 in tf32. The kernels
subtract the origin dmeans . means from g, then the remaining sum of p (g - origin), so backward they read the tiles of
a window twice. For one token with a state, a single kernel reads the state and writes the next state.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule, needs_gradients, operator
from multilin.ops.windowed_attention.reference import WindowedAttentionState, all_tokens, last_tokens, texts

WIDEST = 256  # numbers of a head that fit in registers
_NARROW = 256  # windows up to this length are few tiles, and are tuned separately
_kernels = LazyModule("multilin.ops.windowed_attention.gpu_kernels")
_launch = LazyModule("multilin.ops.kernels.gpu_launch")


class _Call(NamedTuple):
    """The kernels' arguments besides queries, keys and values; if `decays` is None, slope and hyper are numbers."""

    logits: Tensor
    texts: Tensor | None
    decays: Tensor | None
    num_new: int
    num_all: int
    num_heads: int
    window: int
    scale: float
    slope: float
    hyper: float


def refuses(queries: Tensor, keys: Tensor, values: Tensor, **options: object) -> str | None:
    """The reason why heads are too wide for the kernels, or None."""
    widest = max(keys.shape[3], values.shape[3])
    return None if widest <= WIDEST else f"heads of {widest} numbers are wider than {WIDEST}"


def windowed_attention(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, *, window: int, scale: float = 1.0,
    slope: float | Tensor = 0.0, hyper: float | Tensor = 0.0, null_key: bool = False, padding: Tensor | None = None,
    state: WindowedAttentionState | None = None, starts: Tensor | None = None, needs_state: bool = True,
) -> tuple[Tensor, WindowedAttentionState | None]:  # fmt: skip
    """See `multilin.ops.windowed_attention`; the window must be at least 1."""
    decays, slope, hyper = _decays(slope, hyper, keys_BTHD.device)
    inputs, options = (queries_BTHD, keys_BTHD, values_BTHE), (float(scale), slope, hyper, null_key)
    if state is not None and needs_state and _is_step(inputs, state, decays, window):
        logit_B1 = all_tokens(*inputs, padding, None)[2]
        means, *after = _step(*inputs, logit_B1, *state, starts, decays, *options)
        return means, WindowedAttentionState(*after)
    keys, values, logits_BS = all_tokens(*inputs, padding, state)
    dtype = torch.promote_types(queries_BTHD.dtype, values_BTHE.dtype)
    texts_BS = None if starts is None else texts(starts, keys.shape[1], torch.int32)
    means_BTHE, _, _ = _attend(
        queries_BTHD.to(dtype), keys.to(dtype), values.to(dtype), logits_BS, texts_BS, decays, window, *options
    )
    return means_BTHE, last_tokens(keys, values, logits_BS, starts, window) if needs_state else None


def _decays(slope: float | Tensor, hyper: float | Tensor, device: torch.device) -> tuple[Tensor | None, float, float]:
    """Slope and hyper: one tensor if either is a tensor (reading it would wait for the GPU), else two numbers."""
    if not isinstance(slope, Tensor) and not isinstance(hyper, Tensor):
        return None, float(slope), float(hyper)
    both = [x.to(device) if isinstance(x, Tensor) else torch.full((), x, device=device) for x in (slope, hyper)]
    return torch.stack([x.float().reshape(()) for x in both]), 0.0, 0.0


def _is_step(inputs: tuple[Tensor, ...], state: WindowedAttentionState, decays: Tensor | None, window: int) -> bool:
    """True for one token after a full state, if no gradient is needed."""
    is_full = state.keys_BSHD.shape[1] == window and state.keys_BSHD.dtype == torch.float32
    return inputs[0].shape[1] == 1 and is_full and not needs_gradients(*inputs, *state, decays)


def _fake_attend(queries: Tensor, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    num_batch, num_new, num_heads = queries.shape[:3]
    rows = queries.new_empty((num_batch, num_heads, num_new), dtype=torch.float32)
    return values.new_empty((num_batch, num_new, num_heads, values.shape[3])), rows, torch.empty_like(rows)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.options = inputs[6:]


def _differentiate(ctx: Any, dmeans: Tensor, *_: Any) -> tuple[Any, ...]:
    dqueries, dkeys, dvalues, ddecays = _attend_backward(dmeans, *ctx.saved_tensors, *ctx.options)
    return dqueries, dkeys, dvalues, None, None, None if ctx.saved_tensors[8] is None else ddecays, *[None] * 5


@operator("windowed_attention_gpu", _fake_attend, _save, _differentiate)
def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, logits: Tensor, texts: Tensor | None, decays: Tensor | None,
    window: int, scale: float, slope: float, hyper: float, null_key: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The means, and for every row the largest score and the sum of exp(score - largest)."""
    results = means, _, _ = _fake_attend(queries, keys, values)
    if means.numel():
        arguments, constants = _arguments(queries, keys, values, logits, texts, decays, window, scale, slope, hyper)
        grid = means.shape[0] * means.shape[2], -(-means.shape[1] // constants["BQ"])
        _kernels.forward[grid](*arguments, *results, **constants, NULL_KEY=null_key)
    return results


def _fake_backward(dmeans: Tensor, means: Tensor, top: Tensor, total: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[:3]]
    return *gradients, top.new_empty(2)


@operator("windowed_attention_gpu_backward", _fake_backward)
def _attend_backward(
    dmeans: Tensor, means: Tensor, top: Tensor, total: Tensor,
    queries: Tensor, keys: Tensor, values: Tensor, logits: Tensor, texts: Tensor | None, decays: Tensor | None,
    window: int, scale: float, slope: float, hyper: float, null_key: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dqueries, dkeys, dvalues, no_ddecays = _fake_backward(dmeans, means, top, total, queries, keys, values)
    if means.numel() == 0:
        return dqueries.zero_(), dkeys.zero_(), dvalues.zero_(), no_ddecays.zero_()
    arguments, constants = _arguments(queries, keys, values, logits, texts, decays, window, scale, slope, hyper)
    rows, tiles = means.shape[0] * means.shape[2], -(-means.shape[1] // constants["BQ"])
    kept = top, total, dmeans.contiguous(), torch.empty_like(top), torch.empty_like(top)
    ddecays = None if decays is None else top.new_empty((rows * tiles, 2))
    _kernels.backward_queries[(rows, tiles)](
        *arguments, *kept, means, dqueries, ddecays, **constants, NULL_KEY=null_key
    )
    _kernels.backward_keys[(rows, -(-keys.shape[1] // constants["BL"]))](*arguments, *kept, dkeys, dvalues, **constants)
    return dqueries, dkeys, dvalues, no_ddecays if ddecays is None else ddecays.sum(dim=0)


def _arguments(
    queries: Tensor, keys: Tensor, values: Tensor, logits: Tensor, texts: Tensor | None, decays: Tensor | None,
    window: int, scale: float, slope: float, hyper: float,
) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
    """Arguments and constants of all kernels but `step`."""
    (_, num_new, num_heads, width), num_all, value_width = queries.shape, keys.shape[1], values.shape[3]
    size = max(width, value_width) * queries.element_size()  # bytes of a head; large tiles of wide heads do not fit
    constants = {
        "D": width, "E": value_width, "BD": _launch.block_of(width, WIDEST),
        "BE": _launch.block_of(value_width, WIDEST), "BQ": _launch.block_of(num_new, 32 if size > 512 else 64),
        "BL": _launch.block_of(num_all, 32 if size > 256 else 64), "is_wide": window > _NARROW,
        "DECAY": 2 if decays is not None or hyper != 0 else int(slope != 0),
    }  # fmt: skip
    texts = None if texts is None else texts.contiguous()
    sizes = num_new, num_all, num_heads, min(window, num_all)
    call = _Call(logits.float().contiguous(), texts, decays, *sizes, scale, slope, hyper)
    return [*(x.contiguous() for x in (queries, keys, values)), call], constants


@operator("windowed_attention_gpu_step", lambda *x: tuple(torch.empty_like(x[i]) for i in (2, 4, 5, 6)))
def _step(
    query: Tensor, key: Tensor, value: Tensor, logit: Tensor, keys: Tensor, values: Tensor, logits: Tensor,
    starts: Tensor | None, decays: Tensor | None, scale: float, slope: float, hyper: float, null_key: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The mean at one new token, and keys, values and logits of the next state."""
    num_batch, num_read, num_heads, width = keys.shape
    *tensors, logits = [x.contiguous() for x in (query, key, value, logit.float(), keys, values, logits.float())]
    mean, *after = (torch.empty_like(x) for x in (tensors[2], *tensors[4:], logits))
    if mean.numel():
        call = _Call(logits, None, decays, 1, num_read, num_heads, num_read, scale, slope, hyper)
        _kernels.step[(num_batch * num_heads,)](
            *tensors, None if starts is None else starts.to(torch.int8).contiguous(), call, mean, *after,
            D=width, E=values.shape[3], BD=_launch.block_of(width, WIDEST),
            BE=_launch.block_of(values.shape[3], WIDEST), BL=_launch.block_of(num_read, 32), NULL_KEY=null_key,
        )  # fmt: skip
    return mean, after[0], after[1], after[2]
