"""Starting the GPU kernels of the running softmax mean: how work is cut, and where results and scratch lie."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multilin.ops.kernels.operators import dense_rows
from multilin.ops.prefix_softmax.compiled import Gradients, empty_gradients

CHUNK = 64  # positions whose weights are compared pair by pair, and between means kept for the backward pass
MAX_PARTS = 64  # of one text's time
PER_HEAD = ("logits", "own", "state_logits")  # gradients with one number per head


@functools.cache
def _triton_modules() -> tuple[Any, ...]:
    """What imports triton: imported by the first call, and not looked for again by the others."""
    from multilin.ops.kernels import gpu_launch as launch
    from multilin.ops.prefix_softmax import (
        gpu_global,
        gpu_global_backward,
        gpu_step,
        gpu_windowed,
        gpu_windowed_backward,
    )

    return gpu_global, gpu_global_backward, gpu_windowed, gpu_windowed_backward, gpu_step, launch


class Kept(NamedTuple):
    """What the backward pass reads besides the inputs, in float32.

    tops: (B, H, T) the largest logit that each position reads, +inf where it reads nothing.
    scales: (B, H, T) 1 / sum of exp(logit - top), 0 where it reads nothing.
    past_tops, past_totals: (B, H, T / CHUNK + 1) of all before every chunk, and at the end; empty with a window.
    past_means: (B, H, T / CHUNK + 1, D) likewise.
    """

    tops: Tensor
    scales: Tensor
    past_tops: Tensor
    past_totals: Tensor
    past_means: Tensor


def empty_kept(values: Tensor, window: int | None) -> Kept:
    """Room for what is kept."""
    B, T, H, D = values.shape
    slots = -(-T // CHUNK) + 1
    past = [(B, H, slots), (B, H, slots), (B, H, slots, D)] if window is None else [(0,)] * 3
    return Kept(*(_float32(values, shape) for shape in ((B, H, T), (B, H, T), *past)))


class Plan(NamedTuple):
    """How one call is cut.

    width: of the slice of D that one program takes; splits: their number.
    parts: of the time, each of `length` positions; blocks of a window's length, or of a chunk's, if there is a window.
    chunks: of a part that there is scratch for.
    """

    width: int
    splits: int
    parts: int
    length: int
    chunks: int


def plan(values: Tensor, window: int | None) -> Plan:
    """As few cuts as fill the card: a program reads time in order, which is fastest, if there are enough of them."""
    launch = _triton_modules()[-1]
    B, T, H, D = values.shape
    processors = launch.num_processors(values.device)
    width = launch.block_of(D, 128)
    length = T if window is None else max(window, CHUNK)
    parts = -(-T // length)
    if width > 64 and B * H * parts * -(-D // width) < 0.75 * processors:
        width = 64
    splits = -(-D // width)
    programs = B * H * splits
    if window is None and programs < 0.75 * processors:
        parts = max(1, min(-(-4 * processors // programs), MAX_PARTS, T // (4 * CHUNK)))
        length = -(-T // (parts * CHUNK)) * CHUNK
        parts = -(-T // length)
    return Plan(width, splits, parts, length, -(-length // CHUNK))


def run_forward(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, keeps: bool, needs_state: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Kept | None]:  # fmt: skip
    """Means, and the summary token after them if needed, and what is kept if it `keeps`; None for what is not there."""
    gpu_global, _, _, _, _, _ = _triton_modules()
    B, T, H, D = values.shape
    means = torch.empty((B, T, H, D), dtype=values.dtype, device=values.device)
    kept = empty_kept(values, window) if keeps else None
    if window is not None:
        _windowed_forward(logits, values, own, _texts(starts), None, window, null, means, kept, None)
        return means, None, None, kept
    cut, texts = plan(values, None), _texts(starts)
    final: tuple[Tensor | None, Tensor | None] = (None, None)
    if needs_state:
        final = _float32(values, (B, 1, H)), _float32(values, (B, 1, H, D))
    inputs = (*_with_strides(logits), *_with_strides(_dense(values)))
    numbers = (T, H, D, cut.length, cut.parts, cut.splits)
    constants = {"CHUNK": CHUNK, "BLOCK_D": cut.width, "PARTS": _power_of_two(cut.parts)}
    summaries: tuple[Tensor | None, ...] = (None, None, None)
    grid = (cut.splits * H * cut.parts * B,)
    if cut.parts > 1:
        summaries = _part_room(values, cut, 2)
        gpu_global.summarize[grid](*inputs, texts, *summaries, *numbers, **constants)
    state = (
        (None, None) if state_logits is None or state_values is None else (_whole(state_logits), _whole(state_values))
    )
    gpu_global.forward[grid](
        *inputs, *_with_strides(own), texts, *state, *summaries, means, *final, *(kept or (None,) * 5),
        *numbers, -(-T // CHUNK), null, **constants,
    )  # fmt: skip
    return means, *final, kept


def _windowed_forward(
    logits: Tensor, values: Tensor, own: Tensor | None, texts: Tensor | None, dmeans: Tensor | None, window: int,
    null: float, means: Tensor | None, kept: Kept | None, deltas: Tensor | None,
) -> None:  # fmt: skip
    gpu_windowed = _triton_modules()[2]
    B, T, H, D = values.shape
    cut = plan(values, window)
    gpu_windowed.forward[(cut.splits * H * cut.parts * B,)](
        *_with_strides(logits), *_with_strides(_dense(values)), *_with_strides(own), texts, *_with_strides(dmeans),
        *_chunk_room(values, cut), means, *((kept.tops, kept.scales) if kept else (None, None)), deltas,
        T, H, D, window, cut.length, cut.parts, cut.splits, cut.chunks, B, null,
        CHUNK=CHUNK, BLOCK_D=cut.width, HAS_CARRY=cut.chunks > 1,
    )  # fmt: skip


def run_backward(
    dmeans: Tensor, dfinal_logits: Tensor | None, dfinal_values: Tensor | None, logits: Tensor, values: Tensor,
    own: Tensor | None, starts: Tensor | None, kept: Kept, window: int | None, null: float, has_state: bool,
) -> Gradients:  # fmt: skip
    """Gradients of all inputs of `run_forward`."""
    cut = plan(values, window)
    found = empty_gradients(values, has_own=own is not None, has_state=has_state)
    if cut.splits > 1:
        # Each slice of D gives a share of what is one number per head; the shares are added below, in a fixed order.
        shares = {name: _float32(values, (cut.splits, *getattr(found, name).shape)) for name in PER_HEAD}
        found = found._replace(**{name: share for name, share in shares.items() if share.numel()})
    arguments = (logits, _dense(values), own, _texts(starts), _dense(dmeans), kept, cut, found)
    if window is None:
        _global_backward(*arguments, dfinal_logits, dfinal_values)
    else:
        _windowed_backward(*arguments, window, null)
    if cut.splits > 1:
        totals = {name: getattr(found, name) for name in PER_HEAD}
        found = found._replace(**{name: share.sum(dim=0) for name, share in totals.items() if share.numel()})
    return found


def _global_backward(
    logits: Tensor, values: Tensor, own: Tensor | None, texts: Tensor | None, dmeans: Tensor, kept: Kept, cut: Plan,
    found: Gradients, dfinal_logits: Tensor | None, dfinal_values: Tensor | None,
) -> None:  # fmt: skip
    kernels = _triton_modules()[1]
    B, T, H, D = values.shape
    inputs = (*_with_strides(logits), *_with_strides(values), *_with_strides(own), texts, *_with_strides(dmeans))
    final: tuple[Tensor | None, Tensor | None] = (None, None)
    if dfinal_logits is not None and dfinal_values is not None:
        final = _whole(dfinal_logits), _whole(dfinal_values)
    numbers = (T, H, D, cut.length, cut.parts, cut.splits)
    constants = {"CHUNK": CHUNK, "BLOCK_D": cut.width, "PARTS": _power_of_two(cut.parts)}
    grid = (cut.splits * H * cut.parts * B,)
    rows: tuple[Tensor | None, ...] = (None, None)
    ends: tuple[Tensor | None, ...] = (None, None, None)
    if cut.parts > 1:
        rows = _part_room(values, cut, 1)
        ends = tuple(_float32(values, (cut.splits, B, cut.parts, H)) for _ in range(3))
        kernels.summarize_rows[grid](
            *_with_strides(dmeans), texts, kept.tops, kept.scales, *rows, *numbers, **constants
        )
    dstate = (found.state_logits, found.state_values) if found.state_values.numel() else (None, None)
    down = found.own if own is not None else None
    kernels.backward[grid](
        *inputs, *final, *rows, *kept, found.values, found.logits, down, *dstate, *ends,
        *numbers, -(-T // CHUNK), B, **constants,
    )  # fmt: skip
    if cut.parts > 1:
        kernels.subtract_lost[grid](
            *_with_strides(logits), texts, kept.past_tops, kept.past_totals, found.logits, dstate[0], *ends,
            T, H, cut.length, cut.parts, cut.splits, -(-T // CHUNK), B,
            CHUNK=CHUNK, PARTS=constants["PARTS"],
        )  # fmt: skip


def _windowed_backward(
    logits: Tensor, values: Tensor, own: Tensor | None, texts: Tensor | None, dmeans: Tensor, kept: Kept, cut: Plan,
    found: Gradients, window: int, null: float,
) -> None:  # fmt: skip
    kernels = _triton_modules()[3]
    B, T, H, D = values.shape
    deltas = _float32(values, (cut.splits, B, H, T))
    _windowed_forward(logits, values, own, texts, dmeans, window, null, None, None, deltas)
    lows, lost, flows = _chunk_room(values, cut)
    kernels.backward[(cut.splits * H * cut.parts * B,)](
        *_with_strides(logits), *_with_strides(values), *_with_strides(own), texts, *_with_strides(dmeans),
        lows, flows, lost, kept.tops, kept.scales, deltas, found.values, found.logits,
        found.own if own is not None else None,
        T, H, D, window, cut.length, cut.parts, cut.splits, cut.chunks, B,
        CHUNK=CHUNK, BLOCK_D=cut.width, HAS_CARRY=cut.chunks > 1,
    )  # fmt: skip


def run_step(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, needs_state: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Mean of a single position and the state after it, in one kernel."""
    *_, gpu_step, launch = _triton_modules()
    B, _, H, D = values.shape
    num_past = 1 if window is None else window - 1
    means = torch.empty((B, 1, H, D), dtype=values.dtype, device=values.device)
    final: tuple[Tensor | None, Tensor | None] = (None, None)
    if needs_state:
        final = _float32(values, (B, num_past, H)), _float32(values, (B, num_past, H, D))
    state = (
        (None, None) if state_logits is None or state_values is None else (_whole(state_logits), _whole(state_values))
    )
    values = _dense(values)
    arguments: list[Any] = []
    for tensor in (logits, values, own):
        arguments += [tensor, *((0, 0) if tensor is None else (tensor.stride(0), tensor.stride(2)))]
    arguments += [None if starts is None else starts.contiguous().view(torch.uint8), *state, means, *final, H, D]
    width = launch.block_of(D, 2**20)
    if window is None:
        gpu_step.step[(H, B)](*arguments, null, BLOCK_D=width, num_warps=1 if width <= 128 else 4)
    else:
        chunk = max(16, min(64, 4096 // width))
        gpu_step.step_window[(H, B)](*arguments, num_past, null, CHUNK=chunk, BLOCK_D=width)
    return means, *final


def _float32(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=values.device)


def _part_room(values: Tensor, cut: Plan, numbers: int) -> tuple[Tensor, ...]:
    """Scratch for so many numbers and one vector per part and head."""
    B, _, H, D = values.shape
    shapes = [(B, cut.parts, H)] * numbers + [(B, cut.parts, H, D)]
    return tuple(_float32(values, shape) for shape in shapes)


def _chunk_room(values: Tensor, cut: Plan) -> tuple[Tensor | None, ...]:
    """Scratch for two numbers and one vector per chunk of every block, head and slice of D."""
    if cut.chunks == 1:
        return None, None, None
    B, _, H, D = values.shape
    shape = (cut.splits, B, H, cut.parts, cut.chunks)
    return _float32(values, shape), _float32(values, shape), _float32(values, (*shape, D))


def _with_strides(tensor: Tensor | None) -> tuple[Any, ...]:
    """A (B, T, H, ...) tensor as kernels take it: with the strides of B, T and H."""
    return (None, 0, 0, 0) if tensor is None else (tensor, *tensor.stride()[:3])


def _dense(tensor: Tensor) -> Tensor:
    dense: Tensor = dense_rows(tensor)
    return dense


def _whole(tensor: Tensor) -> Tensor:
    return tensor.float().contiguous()


def _texts(starts: Tensor | None) -> Tensor | None:
    """Number of the text of each position (B, T)."""
    return None if starts is None else starts.cumsum(dim=1, dtype=torch.int32)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
