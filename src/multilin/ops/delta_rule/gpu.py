"""Starting the GPU kernel of the steps that follow each other, chunk after chunk; the kernel is in `gpu_kernels`."""

from torch import Tensor

from multilin.ops.kernels import LazyModule, operator

WIDEST = 256  # numbers of a key: one program holds the memory of all of them
BLOCK = 32  # numbers of a value for which a program holds the memory
# Not tuned: NVIDIA's assembler makes faulty code for Hopper of such kernels with narrower blocks and pipelined loads.
COMPILED = {"num_warps": 4, "num_stages": 1}
_kernels, _launch = LazyModule("multilin.ops.delta_rule.gpu_kernels"), LazyModule("multilin.ops.kernels.gpu_launch")


def refuses(queries: Tensor, *_: object) -> str | None:
    """The reason against keys that are too wide."""
    return None if queries.shape[3] <= WIDEST else f"keys of {queries.shape[3]} numbers are wider than {WIDEST}"


def write(
    num_chunks: int, added: Tensor, read: Tensor | None, k_to_end: Tensor, over_chunk: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `portable.write`."""
    return _write(added, read, k_to_end, over_chunk, None, memory, False)


def write_backward(
    num_chunks: int, dadded: Tensor, read: Tensor | None, k_to_end: Tensor, over_chunk: Tensor, through_q: Tensor,
    dmemory: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `portable.write_backward`."""
    return _write(dadded, read, k_to_end, over_chunk, through_q, dmemory, True)


def _fake_write(
    added: Tensor, read: Tensor | None, k_to_end: Tensor, over_chunk: Tensor, more: Tensor | None, memory: Tensor,
    is_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (rows, _, value_width), width = added.shape, k_to_end.shape[2]
    return added.new_empty(added.shape), added.new_empty((rows, width, value_width)), memory.new_empty(memory.shape)


@operator("delta_rule_write", _fake_write)
def _write(
    added: Tensor, read: Tensor | None, k_to_end: Tensor, over_chunk: Tensor, more: Tensor | None, memory: Tensor,
    is_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Either of both; `more` is what is added to the memory besides."""
    results = _fake_write(added, read, k_to_end, over_chunk, more, memory, is_backward)
    if results[1].numel() == 0:
        return results[0], results[1], memory.clone()
    tensors = (None if x is None else x.contiguous() for x in (added, read, k_to_end, over_chunk, more, memory))
    (num_rows, chunk, value_width), (num_memories, width, _) = added.shape, memory.shape
    _kernels.write[num_memories, -(-value_width // BLOCK)](
        *tensors, *results, num_rows // num_memories, chunk, D=width, E=value_width, BC=_launch.block_of(chunk, 64),
        BD=_launch.block_of(width, WIDEST), BE=BLOCK, BACKWARD=is_backward, **COMPILED,
    )  # fmt: skip
    return results
