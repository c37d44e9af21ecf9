"""The recurrence of minGRU on a CPU, one pass over memory each way; the kernels are in `cpu_kernels`.

Work is divided by texts, and by channels where these do not divide evenly among the threads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule, operator

_kernels, _launch = (
    LazyModule("multilin.ops.linear_recurrence.cpu_kernels"),
    LazyModule("multilin.ops.kernels.cpu_launch"),
)


def linear_recurrence(inputs_BT2D: Tensor, before_BD: Tensor, starts_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `multilin.ops.linear_recurrence`."""
    return _forward(inputs_BT2D, before_BD, None if starts_BT is None else starts_BT.float())


def _start(kernel: Callable[..., None], before: Tensor, inputs: Tensor, starts: Tensor | None, *others: Tensor) -> None:
    threads = _launch.num_threads(inputs.numel())
    num_pieces = threads if len(inputs) % threads else 1
    starts = None if starts is None else starts.flatten()
    _launch.launch_parts(
        kernel, inputs.numel(), num_pieces, before.contiguous(), inputs.flatten(2).contiguous(), starts, *others,
        num_parts=len(inputs) * num_pieces,
    )  # fmt: skip


def _fake_forward(inputs: Tensor, before: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inputs[:, :, 0], memory_format=torch.contiguous_format), torch.empty_like(before)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[0])


def _differentiate(ctx: Any, dhidden: Tensor, dafter: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_backward(dhidden, dafter, *ctx.saved_tensors), None


@operator("linear_recurrence", _fake_forward, _save, _differentiate)
def _forward(inputs: Tensor, before: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Hidden states, and the last of them in float32."""
    hidden, after = _fake_forward(inputs, before, starts)
    _start(_kernels.forward, before, inputs, starts, hidden, after)
    return hidden, after


def _fake_backward(dhidden: Tensor, dafter: Tensor, inputs: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inputs, memory_format=torch.contiguous_format), torch.empty_like(dafter)


@operator("linear_recurrence_backward", _fake_backward)
def _backward(
    dhidden: Tensor, dafter: Tensor, inputs: Tensor, before: Tensor, starts: Tensor | None, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the inputs and of h before them."""
    dinputs, dbefore = _fake_backward(dhidden, dafter, inputs)
    given = (hidden.new_zeros(hidden.shape[-1]), hidden.contiguous(), dhidden.contiguous(), dafter.contiguous())
    _start(_kernels.backward, before, inputs, starts, *given, dinputs.flatten(2), dbefore)
    return dinputs, dbefore
