"""Starting the CPU kernels of the prefix softmax: results are allocated, a task is described, work is shared out.

Work is divided by texts and, where they are fewer than threads, by time: divided by heads it took 2.5 times as long, as
every thread then reads memory in pieces. Kernels take addresses because rows may lie apart, as slices of a fused
projection do: a copy would cost as much as the kernel. Inside a row, heads and components are contiguous.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from multilin.ops.prefix_softmax.state import Gradients

ROWS = 32  # positions whose values and gradients stay in the cache between two passes over them
Kept = tuple[Tensor, Tensor, Tensor]

_SIZES = (
    "address",  # of the task itself
    "num_time", "num_heads", "width",  # T, H, D
    "num_parts",  # of the time of a text, which run at the same time; pieces are the square of it
    "part",  # the one of a kernel's call, or its piece
    "window",  # tokens read, for the windowed kernels
    "is_gated",  # 1 where y is not simply the running mean: an own term, a null token, rounding to bf16
)  # fmt: skip
_VALUES = ("values", "means", "rounding", "dmeans", "dvalues")  # (B, T, H, D) in the type of the values
_TENSORS = (
    "logits", "own", "values", "starts", "state_logits", "state_values",
    "means", "weights", "checkpoints", "rounding", "summaries", "final_logits", "final_values",
    "dmeans", "dfinal_logits", "dfinal_values", "dlogits", "dvalues", "down", "dstate_logits", "dstate_values",
)  # fmt: skip
_FIELDS = [(name, f"{name}_batch", f"{name}_row") for name in _TENSORS]
NUM_TENSORS, FIRST_TENSOR, NUM_NUMBERS = len(_TENSORS), len(_SIZES), len(_SIZES) + 3 * len(_TENSORS) + 1


class Task(ctypes.Structure):
    """What a kernel is told. Of every tensor the address and the bytes between texts and positions; 0 if absent."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (*_SIZES, *(field for fields in _FIELDS for field in fields))),
        ("null", ctypes.c_double),  # logit of the null token, -inf where there is none
    ]


@functools.cache
def _numba_modules() -> tuple[Any, ...]:
    """The modules that import numba: imported by the first call, and not looked for again by the others."""
    from multilin.ops.kernels.cpu_launch import launch, num_threads
    from multilin.ops.prefix_softmax import cpu_global, cpu_windowed

    return cpu_global, cpu_windowed, launch, num_threads


def empty_kept(values: Tensor, own: Tensor | None, window: int | None, null: float) -> Kept:
    """Room for what the backward pass reads besides inputs and means.

    Returns:
        weights: (B, kinds, T, H) in float32, all of them in [0, 1].
        checkpoints: (B, T / ROWS + 1, H, D) in float32, the running mean before every ROWS positions and at the
            end; empty with a window.
        rounding: (B, T, H, D), what bf16 means lack; empty without a window and in float32.
    """
    B, T, H, D = values.shape
    kinds = 6 if window is not None else 4 if is_gated(values, own, null) else 2
    has_rounding = window is not None and values.dtype is not torch.float32
    return (
        _empty(values, (B, kinds, T, H)),
        _empty(values, (B, 0 if window is not None else -(-T // ROWS) + 1, H, D)),
        _empty(values, (B if has_rounding else 0, T, H, D), values.dtype),
    )


def forward(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, keeps: bool, needs_state: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Means, logits and values of the summary token after them, and what is kept; None for what is not asked for."""
    B, T, H, D = values.shape
    means = torch.empty((B, T, H, D), dtype=values.dtype)
    weights = checkpoints = rounding = final_logits = final_values = None
    if keeps:
        weights, checkpoints, rounding = empty_kept(values, own, window, null)
    if needs_state:
        final_logits, final_values = torch.empty((B, 1, H)), torch.empty((B, 1, H, D))
    starts = None if starts is None else starts.float()
    inputs = (logits, own, values, starts, state_logits, state_values)
    outputs = (means, weights, checkpoints, rounding, None, final_logits, final_values)
    _launch("forward", values, is_gated(values, own, null), window, null, (*inputs, *outputs))
    return means, final_logits, final_values, weights, checkpoints, rounding


def backward(
    dmeans: Tensor, dfinal_logits: Tensor | None, dfinal_values: Tensor | None, logits: Tensor | None, values: Tensor,
    own: Tensor | None, starts: Tensor | None, means: Tensor | None, kept: Kept, window: int | None, null: float,
    gradients: Gradients,
) -> None:  # fmt: skip
    """Fill in the gradients of all inputs of `forward`."""
    read = (None, None, values, None, None, None, means, *kept, None, None, None, dmeans, dfinal_logits, dfinal_values)
    _launch("backward", values, means is None, window, null, (*read, *(x if x.numel() else None for x in gradients)))


def is_gated(values: Tensor, own: Tensor | None, null: float) -> bool:
    """Whether y is another number than the running mean: by an own term, by a null token, or by rounding it to bf16."""
    return own is not None or null != -torch.inf or values.dtype is not torch.float32


def _launch(
    kernel: str, values: Tensor, is_gated: bool, window: int | None, null: float, tensors: tuple[Tensor | None, ...]
) -> None:
    """Start a kernel for every text and part of its time. The task is followed by room for a copy for each of them."""
    cpu_global, cpu_windowed, launch, num_threads = _numba_modules()
    B, T, H, D = values.shape
    threads = num_threads(values.numel())
    parts = _num_parts(threads, B, T, window)
    tasks = (Task * (B * parts**2 + 1))()
    task, alive = tasks[0], []
    task.address, task.num_time, task.num_heads, task.width = ctypes.addressof(tasks), T, H, D
    task.num_parts, task.window, task.is_gated, task.null = parts, window or 0, is_gated, null
    for (address, batch, row), tensor in zip(_FIELDS, tensors, strict=False):
        if tensor is not None:
            strides = tensor.stride()
            if strides[-1] != 1 or (len(strides) == 4 and strides[2] != D):
                tensor = tensor.contiguous()
                strides = tensor.stride()
                alive.append(tensor)
            setattr(task, address, tensor.data_ptr())
            if B > 1 or T > 1:  # one token is a matter of microseconds
                size = tensor.element_size()
                setattr(task, batch, size * strides[0])
                setattr(task, row, size * strides[1])
    kernels = cpu_global if window is None else cpu_windowed
    if window is None and parts > 1:
        summaries = torch.empty(B, parts**2, 3 + D, H)
        task.summaries, task.summaries_batch = summaries.data_ptr(), 4 * summaries.stride(0)
        launch(getattr(kernels, f"{kernel}_summaries"), task, values.dtype, B * (parts**2 - parts), threads)
    launch(getattr(kernels, kernel), task, values.dtype, B * parts, threads)


def _num_parts(threads: int, num_batch: int, num_time: int, window: int | None) -> int:
    """Parts that time is cut in: enough for all threads, where there are fewer texts than threads."""
    parts = -(-threads // max(num_batch, 1))
    if window is not None:
        return min(parts, -(-num_time // window))
    while parts > 1 and parts**2 > num_time // ROWS:
        parts -= 1
    return parts


def _empty(values: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=values.device)
