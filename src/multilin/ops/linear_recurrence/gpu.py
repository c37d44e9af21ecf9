"""Starting the GPU kernels of minGRU's recurrence; the kernels are in `gpu_kernels`.

Where texts and channels alone do not fill the card, time is cut in parts, of which a kernel first finds what they do
to the state before them; inputs are then read twice each way.
"""

from typing import Any

from torch import Tensor

from multilin.ops.kernels import LazyModule

CHUNK = 64  # positions that are scanned side by side
BLOCK = 32  # channels of a program
MAX_PARTS = 64  # of one text's time
_kernels = LazyModule("multilin.ops.linear_recurrence.gpu_kernels")
_launch = LazyModule("multilin.ops.kernels.gpu_launch")


def forward(inputs: Tensor, before: Tensor, starts: Tensor | None, hidden: Tensor, after: Tensor) -> None:
    """Fill in the hidden states and the last of them."""
    _start("forward", inputs, starts, hidden, before, hidden, after)


def backward(
    inputs: Tensor, before: Tensor, starts: Tensor | None, hidden: Tensor, dhidden: Tensor, dafter: Tensor,
    dinputs: Tensor, dbefore: Tensor,
) -> None:  # fmt: skip
    """Fill in the gradients of the inputs and of h before them."""
    _start("backward", inputs, starts, dhidden, dhidden, before, hidden, dafter, dinputs, dbefore)


def _start(kernel: str, inputs: Tensor, starts: Tensor | None, terms: Tensor, *others: Tensor) -> None:
    """Start a kernel, after the one that sums up the parts of time if there are several."""
    if inputs.numel() == 0:
        return
    num_texts, num_time, _, width = inputs.shape
    chunk = _launch.block_of(num_time, CHUNK)
    programs = num_texts * -(-width // BLOCK)
    parts = max(1, min(-(-4 * _launch.num_processors(inputs.device) // programs), MAX_PARTS, num_time // (4 * chunk)))
    length = -(-num_time // (parts * chunk)) * chunk
    parts = -(-num_time // length)
    starts = None if starts is None else starts.to(inputs.device).contiguous().byte()
    sizes: dict[str, Any] = {"T": num_time, "D": width, "length": length, "CHUNK": chunk, "BLOCK": BLOCK}
    grid, sums = (-(-width // BLOCK), parts, num_texts), None
    if parts > 1:
        sums = inputs.new_empty((2, num_texts, parts, width), dtype=others[-1].dtype)
        _kernels.summarize[grid](inputs, starts, terms, *sums, **sizes, BACKWARD=kernel == "backward")
    products, ends = (None, None) if sums is None else sums
    getattr(_kernels, kernel)[grid](inputs, starts, products, ends, *others, **sizes)
