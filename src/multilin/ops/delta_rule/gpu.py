"""Start the GPU kernels for the triangular systems, and for the steps that process chunk after chunk.

The kernels are in `gpu_kernels`.
"""

from functools import partial

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule, operator

WIDEST = 128  # numbers of a key: a program holds the memory's rows for all of them in registers
LONGEST = 64  # tokens of a chunk
_kernels, _launch = LazyModule("multilin.ops.delta_rule.gpu_kernels"), LazyModule("multilin.ops.kernels.gpu_launch")


def refuses(queries: Tensor, *_: object) -> str | None:
    """Why the kernels cannot take keys of this width, or None if they can."""
    return None if queries.shape[3] <= WIDEST else f"keys of {queries.shape[3]} numbers are wider than {WIDEST}"


@operator("delta_rule_invert", partial(torch.empty_like, memory_format=torch.contiguous_format))
def invert(lower: Tensor) -> Tensor:
    """See `portable.invert`."""
    inverse = torch.empty_like(lower, memory_format=torch.contiguous_format)
    if lower.numel():
        length = lower.shape[1]
        _kernels.invert[len(lower),](lower.contiguous(), inverse, length, BC=_launch.block_of(length, LONGEST))
    return inverse


def write(
    num_chunks: int, added: Tensor, read: Tensor | None, k_to_end: Tensor, over_chunk: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `portable.write`."""
    return _write(num_chunks, added, read, k_to_end, over_chunk, None, memory)


def write_backward(
    num_chunks: int, dadded: Tensor, read: Tensor | None, k_to_end: Tensor, over_chunk: Tensor, through_q: Tensor,
    dmemory: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `portable.write_backward`."""
    return _write(num_chunks, dadded, read, k_to_end, over_chunk, through_q, dmemory)


def _fake_write(
    num_chunks: int, added: Tensor, read: Tensor | None, k_to_end: Tensor, over_chunk: Tensor, through_q: Tensor | None,
    memory: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (rows, _, value_width), width = added.shape, k_to_end.shape[2]
    return added.new_empty(added.shape), added.new_empty((rows, width, value_width)), memory.new_empty(memory.shape)


@operator("delta_rule_write", _fake_write)
def _write(
    num_chunks: int, added: Tensor, read: Tensor | None, k_to_end: Tensor, over_chunk: Tensor, through_q: Tensor | None,
    memory: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `portable.write`, or `portable.write_backward` if `through_q` is given."""
    inputs = (added, read, k_to_end, over_chunk, through_q, memory)
    results = _fake_write(num_chunks, *inputs)
    if results[1].numel() == 0:
        return added.clone(), results[1], memory.clone()
    tensors = (None if x is None else x.contiguous() for x in inputs)
    (_, chunk, value_width), (num_memories, width, _) = added.shape, memory.shape
    _kernels.write[lambda way: (num_memories, -(-value_width // way["BE"]))](
        *tensors, *results, num_chunks, chunk, D=width, E=value_width, BC=_launch.block_of(chunk, LONGEST),
        BD=_launch.block_of(width, WIDEST), PRODUCTS=_launch.float32_products(),
    )  # fmt: skip
    return results
