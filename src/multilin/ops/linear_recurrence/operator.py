"""The PyTorch operator around the compiled CPU and GPU kernels, with its gradients and its shapes for tracing.

The modules `cpu` and `gpu` start the kernels, with the same functions `forward` and `backward`. An argument says
which module to use, because interpreted Triton kernels also take CPU tensors.
"""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.kernels import operator
from multilin.ops.linear_recurrence import cpu, gpu

_MODULES: dict[str, Any] = {"cpu": cpu, "gpu": gpu}


def _fake_forward(kernels: str, inputs: Tensor, before: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    hidden = torch.empty_like(inputs[:, :, 0], memory_format=torch.contiguous_format)
    return hidden, torch.empty_like(before, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.kernels, *tensors = inputs
    ctx.save_for_backward(*tensors, output[0])


def _differentiate(ctx: Any, dhidden: Tensor, dafter: Tensor) -> tuple[None, Tensor, Tensor, None]:
    return None, *_backward(ctx.kernels, dhidden, dafter, *ctx.saved_tensors), None


@operator("linear_recurrence", _fake_forward, _save, _differentiate)
def linear_recurrence(kernels: str, inputs: Tensor, before: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `multilin.ops.linear_recurrence`, which calls this for at least 1 token; the last state is in float32."""
    hidden, after = _fake_forward(kernels, inputs, before, starts)
    _MODULES[kernels].forward(inputs.contiguous(), before.contiguous(), starts, hidden, after)
    return hidden, after


def _fake_backward(
    kernels: str, dhidden: Tensor, dafter: Tensor, inputs: Tensor, *_: Tensor | None
) -> tuple[Tensor, Tensor]:
    dinputs, dbefore = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (inputs, dafter))
    return dinputs, dbefore


@operator("linear_recurrence_backward", _fake_backward)
def _backward(
    kernels: str, dhidden: Tensor, dafter: Tensor, inputs: Tensor, before: Tensor, starts: Tensor | None, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the inputs and of h before them."""
    dinputs, dbefore = _fake_backward(kernels, dhidden, dafter, inputs)
    given = (x.contiguous() for x in (hidden, dhidden, dafter))
    _MODULES[kernels].backward(inputs.contiguous(), before.contiguous(), starts, *given, dinputs, dbefore)
    return dinputs, dbefore
