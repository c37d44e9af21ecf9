"""Start the CPU kernels of minGRU's recurrence, in `cpu_kernels`; each direction is one pass over memory.

Threads divide the texts, and also the channels if the texts do not divide evenly.
"""

from collections.abc import Callable

from torch import Tensor

from multilin.ops.kernels import LazyModule

_kernels, _launch = (
    LazyModule("multilin.ops.linear_recurrence.cpu_kernels"),
    LazyModule("multilin.ops.kernels.cpu_launch"),
)


def forward(inputs: Tensor, before: Tensor, starts: Tensor | None, hidden: Tensor, after: Tensor) -> None:
    """Write the hidden states to `hidden`, and the last hidden state to `after`."""
    _start(_kernels.forward, before, inputs, starts, hidden, after)


def backward(
    inputs: Tensor, before: Tensor, starts: Tensor | None, hidden: Tensor, dhidden: Tensor, dafter: Tensor,
    dinputs: Tensor, dbefore: Tensor,
) -> None:  # fmt: skip
    """Write the gradient of the inputs to `dinputs`, and the gradient of `before` to `dbefore`."""
    nothing = hidden.new_zeros(hidden.shape[-1])
    _start(_kernels.backward, before, inputs, starts, nothing, hidden, dhidden, dafter, dinputs.flatten(2), dbefore)


def _start(kernel: Callable[..., None], before: Tensor, inputs: Tensor, starts: Tensor | None, *others: Tensor) -> None:
    threads = _launch.num_threads(inputs.numel())
    num_pieces = threads if len(inputs) % threads else 1
    starts = None if starts is None else starts.float().flatten()
    _launch.launch_parts(
        kernel, inputs.numel(), num_pieces, before, inputs.flatten(2), starts, *others,
        num_parts=len(inputs) * num_pieces,
    )  # fmt: skip
