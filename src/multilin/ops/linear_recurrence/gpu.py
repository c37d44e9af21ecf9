"""Start the GPU kernels of minGRU's recurrence; the kernels are in `gpu_kernels`.

If texts and channels alone do not fill the GPU, time is cut into parts. A kernel first combines each part into one
step, so inputs are read twice in each direction.
"""

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule

CHUNK = 64  # positions that are scanned in parallel
BLOCK = 32  # channels of a program
MAX_PARTS = 64  # parts of the time of one text
_kernels = LazyModule("multilin.ops.linear_recurrence.gpu_kernels")
_launch = LazyModule("multilin.ops.kernels.gpu_launch")


def forward(inputs: Tensor, before: Tensor, starts: Tensor | None, hidden: Tensor, after: Tensor) -> None:
    """Write the hidden states to `hidden`, and the last hidden state to `after`."""
    _start("forward", inputs, starts, None, before, hidden, after)


def backward(
    inputs: Tensor, before: Tensor, starts: Tensor | None, hidden: Tensor, dhidden: Tensor, dafter: Tensor,
    dinputs: Tensor, dbefore: Tensor,
) -> None:  # fmt: skip
    """Write the gradient of the inputs to `dinputs`, and the gradient of `before` to `dbefore`."""
    _start("backward", inputs, starts, dhidden, before, hidden, dafter, dinputs, dbefore)


def _start(kernel: str, inputs: Tensor, starts: Tensor | None, dhidden: Tensor | None, *others: Tensor) -> None:
    """Start a kernel; if time has several parts, first start the kernel that sums up each part."""
    num_texts, num_time, _, width = inputs.shape
    chunk = _launch.block_of(num_time, CHUNK)
    programs = num_texts * -(-width // BLOCK)
    parts = max(1, min(-(-4 * _launch.num_processors(inputs.device) // programs), MAX_PARTS, num_time // (4 * chunk)))
    length = -(-num_time // (parts * chunk)) * chunk
    parts = -(-num_time // length)
    starts = None if starts is None else starts.contiguous().view(torch.uint8)
    grid, sizes, constants = (programs, parts), (num_time, width, length), {"CHUNK": chunk, "BLOCK": BLOCK}
    products = ends = None
    if parts > 1:
        products, ends = inputs.new_empty((2, num_texts, parts, width), dtype=torch.float32)
        is_backward = kernel == "backward"
        _kernels.summarize[grid](inputs, starts, dhidden, products, ends, *sizes, **constants, BACKWARD=is_backward)
    tensors = others if dhidden is None else (dhidden, *others)
    getattr(_kernels, kernel)[grid](inputs, starts, products, ends, *tensors, *sizes, **constants)
