"""From tensors to kernels and back: allocates the results, describes the task, starts the kernels."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multilin.ops.prefix_softmax.compiled import Gradients, empty_gradients
from multilin.ops.prefix_softmax.cpu_task import ROWS, Task


@functools.cache
def _numba_modules() -> tuple[Any, ...]:
    """What imports numba: imported by the first call, and not looked for again by the others."""
    from multilin.ops.kernels.cpu_launch import launch, num_threads
    from multilin.ops.prefix_softmax import (
        cpu_global_backward,
        cpu_global_forward,
        cpu_windowed_backward,
        cpu_windowed_forward,
    )

    kernels = (cpu_global_forward, cpu_windowed_forward, cpu_global_backward, cpu_windowed_backward)
    return *kernels, launch, num_threads


class Kept(NamedTuple):
    """What the backward pass reads besides the inputs.

    weights: (B, planes, T, H) in float32, all of them in [0, 1].
    checkpoints: (B, T / ROWS + 1, H, D) in float32, the running mean before every ROWS positions and at the end;
        empty with a window.
    rounding: (B, T, H, D), what bf16 means lack; empty without a window and in float32.
    """

    weights: Tensor
    checkpoints: Tensor
    rounding: Tensor


def is_gated(values: Tensor, own: Tensor | None, null: float) -> bool:
    """Whether y is another number than the running mean: by an own term, by a null token, or by rounding it to bf16."""
    return own is not None or null != -torch.inf or values.dtype != torch.float32


def empty_kept(values: Tensor, window: int | None, own: Tensor | None, null: float) -> Kept:
    """Room for what is kept."""
    B, T, H, D = values.shape
    none = (0,)
    planes = 5 if is_gated(values, own, null) else 2
    if window is not None:
        planes = 6 if own is None else 7
    has_rounding = window is not None and values.dtype != torch.float32
    return Kept(
        _float32(values, (B, planes, T, H)),
        _float32(values, none if window is not None else (B, (T + ROWS - 1) // ROWS + 1, H, D)),
        values.new_empty((B, T, H, D) if has_rounding else none),
    )


def run_forward(
    logits: Tensor,
    values: Tensor,
    own: Tensor | None,
    starts: Tensor | None,
    state_logits: Tensor | None,
    state_values: Tensor | None,
    window: int | None,
    null: float,
    keeps: bool,
    needs_state: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Kept | None]:
    """Means, and the summary token after them if needed, and what is kept if it `keeps`; None for what is not there."""
    global_forward, windowed_forward, _, _, launch, num_threads = _numba_modules()
    B, T, H, D = values.shape
    logits, values = _rows(logits), _rows(values)
    means = torch.empty((B, T, H, D), dtype=values.dtype)
    kept = final_logits = final_values = None
    threads = num_threads(values.numel())
    parts = _num_parts(threads, B, T, window)
    task = Task(
        B, T, H, D, window or 0, parts, is_gated(values, own, null), keeps,
        logits.data_ptr(), 4 * logits.stride(0), 4 * logits.stride(1),
    )  # fmt: skip
    task.null = null
    _set_rows(task, "values", values)
    _set_rows(task, "means", means)
    if own is not None:
        own = _rows(own)
        _set_rows(task, "own", own)
    if starts is not None:
        starts = starts.contiguous()
        task.starts, task.starts_batch = starts.data_ptr(), T
    if state_logits is not None and state_values is not None:
        state_logits, state_values = state_logits.contiguous(), state_values.contiguous()
        task.state_logits, task.state_values = state_logits.data_ptr(), state_values.data_ptr()
    if needs_state:
        final_logits, final_values = torch.empty((B, 1, H)), torch.empty((B, 1, H, D))
        task.final_logits, task.final_values = final_logits.data_ptr(), final_values.data_ptr()
    if keeps:
        kept = empty_kept(values, window, own, null)
        _set_kept(task, kept)
    if window is not None:
        launch(windowed_forward.forward, task, values.dtype, B * parts, threads)
    else:
        if parts > 1:
            summaries = torch.empty(B * parts**2 * (3 + D) * H)
            task.summaries = summaries.data_ptr()
            launch(global_forward.summarize, task, values.dtype, B * (parts**2 - parts), threads)
        launch(global_forward.forward, task, values.dtype, B * parts, threads)
    return means, final_logits, final_values, kept


def run_backward(
    dmeans: Tensor,
    dfinal_logits: Tensor | None,
    dfinal_values: Tensor | None,
    values: Tensor,
    means: Tensor,
    kept: Kept,
    window: int | None,
    has_own: bool,
    has_state: bool,
) -> Gradients:
    """Gradients of all inputs of `run_forward`; `means` are not read where the whole past is gated."""
    _, _, global_backward, windowed_backward, launch, num_threads = _numba_modules()
    B, T, H, D = values.shape
    values, dmeans = _rows(values), _rows(dmeans)
    gradients = empty_gradients(values, has_own=has_own, has_state=has_state)
    threads = num_threads(values.numel())
    parts = _num_parts(threads, B, T, window)
    reads_means = window is not None or kept.weights.shape[1] == 2
    task = Task(B, T, H, D, window or 0, parts, not reads_means, True)
    for name, tensor in (("values", values), ("dmeans", dmeans), ("dvalues", gradients.values)):
        _set_rows(task, name, tensor)
    if reads_means:
        _set_rows(task, "means", means)
    _set_kept(task, kept)
    task.dlogits = gradients.logits.data_ptr()
    if has_own:
        task.own = task.down = gradients.own.data_ptr()
    if has_state:
        task.dstate_logits, task.dstate_values = gradients.state_logits.data_ptr(), gradients.state_values.data_ptr()
    if dfinal_logits is not None and dfinal_values is not None:
        dfinal_logits, dfinal_values = dfinal_logits.contiguous(), dfinal_values.contiguous()
        task.dfinal_logits, task.dfinal_values = dfinal_logits.data_ptr(), dfinal_values.data_ptr()
    if window is not None:
        launch(windowed_backward.backward, task, values.dtype, B * parts, threads)
    else:
        if parts > 1:
            summaries = torch.empty(B * parts**2 * (3 + D) * H)
            task.summaries = summaries.data_ptr()
            launch(global_backward.summarize, task, values.dtype, B * (parts**2 - parts), threads)
        launch(global_backward.backward, task, values.dtype, B * parts, threads)
    return gradients


def _float32(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=values.device)


def _num_parts(threads: int, num_batch: int, num_time: int, window: int | None) -> int:
    """Parts that time is cut in: enough for all threads, where there are fewer texts than threads."""
    parts = -(-threads // max(num_batch, 1))
    if window is not None:
        return min(parts, -(-num_time // window))
    while parts > 1 and parts**2 > num_time // ROWS:
        parts -= 1
    return parts


def _rows(tensor: Tensor) -> Tensor:
    """The tensor itself if what belongs to one position lies together, else a copy."""
    if tensor.is_contiguous():
        return tensor
    size = 1
    for length, stride in zip(tensor.shape[:1:-1], tensor.stride()[:1:-1], strict=True):
        if length != 1 and stride != size:
            return tensor.contiguous()
        size *= length
    return tensor


def _set_rows(task: Task, name: str, tensor: Tensor) -> None:
    size, strides = tensor.element_size(), tensor.stride()
    setattr(task, name, tensor.data_ptr())
    setattr(task, f"{name}_batch", size * strides[0])
    setattr(task, f"{name}_row", size * strides[1])


def _set_kept(task: Task, kept: Kept) -> None:
    task.weights, task.checkpoints = kept.weights.data_ptr(), kept.checkpoints.data_ptr()
    task.rounding = kept.rounding.data_ptr() if kept.rounding.numel() else 0
