"""Start the GPU kernels of the running softmax mean: divide the work, allocate results and scratch.

The formulas are in `gpu_math`, the kernels in `gpu_forward` and `gpu_backward`. Without a window, each value
is read once forward, or twice if time is cut because texts and heads are few. With a window, each value is read two to
four times.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule, dense_rows

CHUNK = 64  # positions of a chunk: all its pairs are compared, and a mean is kept for the backward pass
MAX_PARTS = 64  # parts of one text's time
WIDEST = 2**13  # numbers per head: one program of `step` holds all of them
_Tensors = tuple[Tensor | None, ...]
_forwards = LazyModule("multilin.ops.prefix_softmax.gpu_forward")
_backwards = LazyModule("multilin.ops.prefix_softmax.gpu_backward")
_launch = LazyModule("multilin.ops.kernels.gpu_launch")


def refuses(values: Tensor, *_: object) -> str | None:
    """The reason why the kernels do not take a call, or None."""
    if values.shape[-1] > WIDEST:
        return f"heads are {values.shape[-1]} wide, but the kernels take at most {WIDEST}"
    if 0 in values.shape:
        return f"values of shape {tuple(values.shape)} are empty"
    return None


def empty_kept(values: Tensor, own: Tensor | None, window: int | None, null: float) -> tuple[Tensor, ...]:
    """Allocate the float32 tensors that the forward pass fills for the backward pass.

    Returns:
        rows: (2, B, H, T) the largest logit that each position reads, +inf if the position reads nothing; and 1 / sum
            of exp(logit - largest), 0 if the position reads nothing.
        past: (2, B, H, T / CHUNK + 1) the largest logit of all tokens before each chunk, and the sum of
            exp(logit - largest). The last entry is for all tokens. Empty with a window.
        past_means: (B, H, T / CHUNK + 1, D) the means of the same tokens.
    """
    B, T, H, D = values.shape
    slots = 0 if window is not None else -(-T // CHUNK) + 1
    return _float32(values, 2, B, H, T), _float32(values, 2, B, H, slots), _float32(values, B, H, slots, D)


class Plan(NamedTuple):
    """How the work of one call is divided."""

    batch: int  # number of texts
    width: int  # of the slice of D that one program takes
    splits: int  # number of slices
    parts: int  # number of parts of the time
    length: int  # positions of a part; with a window, a part is one chunk
    whole: int  # the most parts before a part that all of its positions read completely
    apart: int  # with a window: positions from the oldest chunk that a chunk reads to the chunk


def plan(values: Tensor, window: int | None) -> Plan:
    """Divide the work; without a window, time is cut into only as many parts as fill the GPU."""
    B, T, H, D = values.shape
    processors = _launch.num_processors(values.device)
    width = _launch.block_of(D, 128)
    parts = 1 if window is None else -(-T // CHUNK)
    if width > 64 and B * H * parts * -(-D // width) < 0.75 * processors:
        width = 64
    splits = -(-D // width)
    if window is not None:
        return Plan(B, width, splits, parts, CHUNK, max(window // CHUNK - 1, 0), -(-window // CHUNK) * CHUNK)
    programs = B * H * splits
    if programs < 0.75 * processors:
        parts = max(1, min(-(-4 * processors // programs), MAX_PARTS, T // (4 * CHUNK)))
    length = -(-T // (parts * CHUNK)) * CHUNK
    parts = -(-T // length)
    return Plan(B, width, splits, parts, length, parts, 0)


def _constants(cut: Plan) -> dict[str, int]:
    """Constants of all kernels that compute parts of time.

    On an H200, 4 warps and 2 stages are by far the fastest with windows. Without a window, no choice is 5 % faster.
    """
    return {"CHUNK": CHUNK, "BLOCK_D": cut.width, "num_warps": 4, "num_stages": 2}


def _kind(cut: Plan, window: int | None) -> dict[str, Any]:
    """Further constants of `forward` and `backward`."""
    num_old = 0 if window is None else cut.apart // CHUNK - cut.whole
    return {"NUM_OLD": num_old, "CARRIES": window is None or cut.whole > 0}


def forward(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, keeps: bool, needs_state: bool,
) -> _Tensors:  # fmt: skip
    """Run the forward kernels; results as in `cpu.forward`. With a window, only a single position may have a state."""
    B, T, H, D = values.shape
    means = torch.empty((B, T, H, D), dtype=values.dtype, device=values.device)
    num_past = 1 if window is None else window - 1
    final: _Tensors = (None, None)
    if needs_state:
        kind = torch.float64 if window is None else torch.float32
        final_logits = torch.empty((B, num_past, H), dtype=kind, device=values.device)
        final = final_logits, _float32(values, B, num_past, H, D)
    state = _whole(state_logits), _whole(state_values)
    kept = empty_kept(values, own, window, null) if keeps else (None, None, None)
    if T == 1 and not keeps:
        starts = None if starts is None else starts.contiguous().view(torch.uint8)
        width = _launch.block_of(D, 2**20)
        chunk, warps = (1, 1 if width <= 128 else 4) if window is None else (max(16, min(64, 4096 // width)), 4)
        _forwards.step[H, B](
            *_rows(logits), *_rows(values), *_rows(own), starts, state, means, final, H, D, num_past, null,
            CHUNK=chunk, BLOCK_D=width, WINDOWED=window is not None, num_warps=warps,
        )  # fmt: skip
    else:
        _forward(logits, values, own, _texts(starts), state, None, means, final, kept, None, window, null)
    return means, *final, *kept


def _forward(
    logits: Tensor, values: Tensor, own: Tensor | None, texts: Tensor | None, state: _Tensors, dmeans: Tensor | None,
    means: Tensor | None, final: _Tensors, kept: _Tensors, deltas: Tensor | None, window: int | None, null: float,
) -> None:  # fmt: skip
    B, T, H, D = values.shape
    cut = plan(values, window)
    constants, kind, grid = _constants(cut), _kind(cut, window), (cut.splits * H * cut.parts * B,)
    inputs = (*_rows(logits), *_rows(values))
    tokens: _Tensors = (None, None, None)
    if cut.parts > 1 and cut.whole > 0:
        tokens = _scalars_and_vectors(values, B, cut.parts, H)
        _forwards.summarize[grid](*inputs, texts, tokens, T, H, D, cut, **constants)
    rows, past, past_means = kept
    before = (None, None, None) if past is None or window is not None else (*past, past_means)
    _forwards.forward[grid](
        *inputs, *_rows(own), texts, state, tokens, *_rows(dmeans), means, final,
        (None, None) if rows is None else (*rows,), before, deltas, T, H, D, cut, -(-T // CHUNK) + 1, window or 0, null,
        **constants, **kind,
    )  # fmt: skip


def backward(
    dmeans: Tensor, dfinal_logits: Tensor | None, dfinal_values: Tensor | None, logits: Tensor, values: Tensor,
    own: Tensor | None, starts: Tensor | None, means: Tensor | None, kept: tuple[Tensor, ...], window: int | None,
    null: float, gradients: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """Compute the gradients of all inputs of `forward`, into `gradients`."""
    B, T, H, D = values.shape
    cut, texts, rows, past = plan(values, window), _texts(starts), (*kept[0],), (*kept[1], kept[2])
    constants, kind, grid = _constants(cut), _kind(cut, window), (cut.splits * H * cut.parts * B,)
    dfinal = _whole(dfinal_logits), _whole(dfinal_values)
    sums: _Tensors = (None, None, None)
    ends: _Tensors = (None, None, None)
    deltas = None
    if window is not None:
        deltas = _float32(values, cut.splits, B, H, T)
        _forward(
            logits, values, None, texts, (None, None), dmeans, None, (None, None), (None,) * 3, deltas, window, null
        )
    if cut.parts > 1 and cut.whole > 0:
        low, flow = _scalars_and_vectors(values, B, cut.parts, H)[1:]
        numbers = [_float32(values, cut.splits, B, cut.parts, H) for _ in range(3)]
        sums, ends = ((low, flow, None), (*numbers,)) if window is None else ((low, flow, numbers[0]), ends)
        _backwards.summarize_rows[grid](*_rows(dmeans), texts, rows, deltas, sums, T, H, D, cut, **constants)
    # Each slice of D gives a partial sum of every number per head; these are added below, in a fixed order.
    *totals, dstate_values = gradients[0], *gradients[2:]
    slices = totals if cut.splits == 1 else [_float32(values, cut.splits, *x.shape) for x in totals]
    dlogits, down, dstate_logits = slices
    dstate = (dstate_logits, dstate_values) if dstate_logits.numel() else (None, None)
    _backwards.backward[grid](
        *_rows(logits), *_rows(values), *_rows(own), texts, *_rows(dmeans), dfinal, sums, rows, past, deltas,
        gradients[1], dlogits, down, dstate, ends, T, H, D, cut, -(-T // CHUNK) + 1, window or 0, **constants, **kind,
    )  # fmt: skip
    if ends[0] is not None:
        _backwards.subtract_lost[grid](
            *_rows(logits), texts, past, dlogits, dstate, ends, T, H, cut, -(-T // CHUNK) + 1,
            CHUNK=CHUNK, MAX_PARTS=MAX_PARTS,
        )  # fmt: skip
    if cut.splits > 1:
        for total, parts in zip(totals, slices, strict=True):
            torch.sum(parts, dim=0, out=total)


def _float32(values: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=values.device)


def _scalars_and_vectors(values: Tensor, *shape: int) -> _Tensors:
    """Scratch tensors of this shape: two tensors of numbers, one tensor of vectors."""
    return *(_float32(values, *shape) for _ in range(2)), _float32(values, *shape, values.shape[-1])


def _rows(tensor: Tensor | None) -> tuple[Any, ...]:
    """A (B, T, H, ...) tensor in the form that kernels take, and its strides over B, T and H."""
    if tensor is None:
        return None, (0, 0, 0)
    if tensor.dim() == 4:
        tensor = dense_rows(tensor)
    return tensor, tensor.stride()[:3]


def _whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _texts(starts: Tensor | None) -> Tensor | None:
    """The number of each position's text (B, T)."""
    return None if starts is None else starts.cumsum(dim=1, dtype=torch.int32)
