"""Start the CPU kernels of the prefix softmax: allocate results, describe the task, and divide the work.

Work is divided by texts and, if there are fewer texts than threads, by time. Division by heads costs 1.2 to 2.4
times as much, because every thread then reads memory in short pieces. Kernels take addresses and strides, so that rows
may lie apart, as in a slice of a fused projection; a copy would cost as much as the kernel. Inside a row, heads and
components are contiguous.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule

Tensors = tuple[Tensor, ...]
ROWS = 32  # positions whose values and gradients stay in the cache between two passes over them
_launcher = LazyModule("multilin.ops.kernels.cpu_launch")
_global = LazyModule("multilin.ops.prefix_softmax.cpu_global")
_windowed = LazyModule("multilin.ops.prefix_softmax.cpu_windowed")

TENSORS = (
    "logits", "own", "values", "starts", "state_logits", "state_values",
    "means", "weights", "checkpoints", "rounding", "summaries", "final_logits", "final_values",
    "dmeans", "dfinal_logits", "dfinal_values", "dlogits", "dvalues", "down", "dstate_logits", "dstate_values",
)  # fmt: skip
_STRIDES = {name: (f"{name}_batch", f"{name}_row") for name in TENSORS}
_SIZES = (
    "num_time", "num_heads", "width",  # T, H, D
    "num_parts",  # parts of each text's time, which run in parallel; there are num_parts ** 2 pieces
    "part",  # the part, or the piece, that this call of a kernel computes
    "window",  # tokens read, for the windowed kernels
    "is_gated",  # 1 if y is not the running mean itself: own term, null token, or rounding to bf16
)  # fmt: skip


class Task(ctypes.Structure):
    """Arguments of a kernel. Each tensor has its address (0 if absent) and its strides over texts and positions."""

    _fields_ = [
        *((field, ctypes.c_int64) for name in TENSORS for field in (name, *_STRIDES[name])),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("null", ctypes.c_double),  # logit of the null token, -inf where there is none
    ]


def empty_kept(values: Tensor, own: Tensor | None, window: int | None, null: float) -> Tensors:
    """Allocate the tensors that the forward pass fills for the backward pass, besides inputs and means.

    Returns:
        weights: (B, kinds of weights, T, H) in float32, all in [0, 1].
        checkpoints: (B, T / ROWS + 1, H, D) in float32, the running mean before each block of ROWS positions, and after
            the last block; empty with a window.
        rounding: (B, T, H, D), exact mean minus bf16 mean; empty without a window or for float32 values.
    """
    (B, T, H, D), device = values.shape, values.device
    kinds = 6 if window is not None else 4 if is_gated(values, own, null) else 2
    has_rounding = window is not None and values.dtype is not torch.float32
    return (
        torch.empty(B, kinds, T, H, dtype=torch.float32, device=device),
        torch.empty(B, 0 if window is not None else -(-T // ROWS) + 1, H, D, dtype=torch.float32, device=device),
        torch.empty(B if has_rounding else 0, T, H, D, dtype=values.dtype, device=device),
    )


def forward(
    logits: Tensor, values: Tensor, own: Tensor | None, starts: Tensor | None, state_logits: Tensor | None,
    state_values: Tensor | None, window: int | None, null: float, keeps: bool, needs_state: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Run the forward kernels.

    Returns:
        The means; logits and values of the summary token of all tokens, None without `needs_state`; and the tensors of
        `empty_kept`, None without `keeps`.
    """
    B, T, H, D = values.shape
    means = torch.empty(B, T, H, D, dtype=values.dtype)
    weights = checkpoints = rounding = final_logits = final_values = None
    if keeps:
        weights, checkpoints, rounding = empty_kept(values, own, window, null)
    if needs_state:
        final_logits = torch.empty(B, 1, H, dtype=torch.float64)
        final_values = torch.empty(B, 1, H, D, dtype=torch.float32)
    _launch(
        "forward", is_gated(values, own, null), window, null, logits=logits, own=own, values=values,
        starts=None if starts is None else starts.float(), state_logits=state_logits, state_values=state_values,
        means=means, weights=weights, checkpoints=checkpoints, rounding=rounding, final_logits=final_logits,
        final_values=final_values,
    )  # fmt: skip
    return means, final_logits, final_values, weights, checkpoints, rounding


def backward(
    dmeans: Tensor, dfinal_logits: Tensor | None, dfinal_values: Tensor | None, logits: Tensor | None, values: Tensor,
    own: Tensor | None, starts: Tensor | None, means: Tensor | None, kept: Tensors, window: int | None, null: float,
    gradients: Tensors,
) -> None:  # fmt: skip
    """Compute the gradients of all inputs of `forward`, into `gradients`."""
    weights, checkpoints, rounding = kept
    dlogits, dvalues, down, dstate_logits, dstate_values = gradients
    _launch(
        "backward", means is None, window, null, values=values, means=means, weights=weights, checkpoints=checkpoints,
        rounding=rounding, dmeans=dmeans, dfinal_logits=dfinal_logits, dfinal_values=dfinal_values,
        dlogits=dlogits, dvalues=dvalues, down=down, dstate_logits=dstate_logits, dstate_values=dstate_values,
    )  # fmt: skip


def is_gated(values: Tensor, own: Tensor | None, null: float) -> bool:
    """True if y is not the running mean itself, because of an own term, a null token, or rounding to bf16."""
    return own is not None or null != -torch.inf or values.dtype is not torch.float32


def _launch(kernel: str, is_gated: bool, window: int | None, null: float, **tensors: Tensor | None) -> None:
    """Start a kernel for every text and part of its time, each with a copy of the task.

    Python overhead matters here: the kernel takes about a microsecond for one token.
    """
    values: Any = tensors["values"]
    B, T, H, D = values.shape
    threads = _launcher.num_threads(B * T * H * D)
    parts = _num_parts(threads, B, T, window)
    tasks = (Task * (B * max(parts, parts**2 - parts)))()
    if not tasks:
        return
    task, has_strides, copies = tasks[0], B > 1 or T > 1, []
    task.num_time, task.num_heads, task.width, task.num_parts, task.null = T, H, D, parts, null
    if window is not None:
        task.window = window
    if is_gated:
        task.is_gated = 1
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            strides = tensor.stride()
            if strides[-1] != 1 or (len(strides) == 4 and strides[2] != D):
                tensor = tensor.contiguous()
                copies.append(tensor)
        setattr(task, name, tensor.data_ptr())
        if has_strides:
            size, strides, (batch, row) = tensor.element_size(), tensor.stride(), _STRIDES[name]
            setattr(task, batch, size * strides[0])
            setattr(task, row, size * strides[1])
    kernels = _global if window is None else _windowed
    if window is None and parts > 1:
        summaries = torch.empty(B, parts**2, 3 + D, H, dtype=torch.float32)
        task.summaries, task.summaries_batch = summaries.data_ptr(), 4 * summaries.stride(0)
        _launcher.launch(getattr(kernels, f"{kernel}_summaries"), task, values.dtype, B * (parts**2 - parts), threads)
    _launcher.launch(getattr(kernels, kernel), task, values.dtype, B * parts, threads)


def _num_parts(threads: int, num_batch: int, num_time: int, window: int | None) -> int:
    """The number of parts into which time is cut: enough for all threads if there are fewer texts than threads."""
    parts = -(-threads // max(num_batch, 1))
    if window is not None:
        return min(parts, -(-num_time // window))
    while parts > 1 and parts**2 > num_time // ROWS:
        parts -= 1
    return parts
