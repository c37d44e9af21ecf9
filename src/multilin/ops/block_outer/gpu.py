"""Block outer products on a GPU: pairs live in registers only, forward and backward.

Forward, a program makes the pairs of a tile of rows and of a chunk of blocks, and multiplies them with a tile of the
weight. Where rows are few, as while decoding, the chunks are split over programs whose sums are added in a fixed order.
Backward, the gradient of the pairs is a tile of registers too, contracted with either factor where it was made; the
weight's gradient makes the pairs again. The kernels are in `gpu_kernels`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from multilin.ops.numba_kernels.rows import runs_directly

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 64  # numbers of a right block: a chunk holds all of them
_PARTS = 8  # of the left blocks, at most, whose sums for dright are kept


def block_outer(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """See `multilin.ops.block_outer`; all three of one type."""
    lefts, rights = (x.reshape(-1, *x.shape[-2:]) for x in (left, right))
    compute = _run_forward if runs_directly(left, right, weight) else _forward
    result: Tensor = compute(lefts, rights, weight)
    return result.view(*left.shape[:-2], len(weight))


def refuses(right_width: int) -> str | None:
    """The reason against a call with right blocks so wide."""
    return None if right_width <= WIDEST else f"right blocks of {right_width} numbers are wider than {WIDEST}"


@torch.library.custom_op("multilin::block_outer_gpu", mutates_args=())
def _forward(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    return _run_forward(left, right, weight)


@_forward.register_fake
def _result_shape(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], weight.shape[0])


@torch.library.custom_op("multilin::block_outer_gpu_backward", mutates_args=())
def _backward(dresult: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _run_backward(dresult, left, right, weight)


@_backward.register_fake
def _gradient_shapes(dresult: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return left.new_empty(left.shape), right.new_empty(right.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dresult: Tensor) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = _backward(dresult, *ctx.saved_tensors)
    return gradients


_forward.register_autograd(_differentiate, setup_context=_save)


class Chunk(NamedTuple):
    """Blocks, and numbers of the left and of the right block, whose pairs are made at a time."""

    BN: int
    BK: int
    BJ: int
    DENSE: bool


def chunk_of(num_blocks: int, width: int, right_width: int, dtype: torch.dtype) -> Chunk:
    """Chunks of about 64 pairs, 32 in float32, whose products take more registers."""
    wanted = 32 if dtype == torch.float32 else 64
    rights, lefts = _power_of_two(right_width), _power_of_two(width)
    lefts = min(lefts, max(wanted // rights, 1))
    blocks = min(max(wanted // (lefts * rights), 1), _power_of_two(num_blocks)) if lefts >= width else 1
    while blocks * lefts * rights < 16:  # the least that tensor cores sum over
        blocks, lefts = (blocks * 2, lefts) if lefts >= width else (blocks, lefts * 2)
    return Chunk(blocks, lefts, rights, rights == right_width and (blocks == 1 or lefts == width))


def _run_forward(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    from multilin.ops.block_outer.gpu_kernels import forward as kernel
    from multilin.ops.triton_kernels.launch import block_of, dense_rows, num_processors

    (num_rows, blocks, width), other, num_outs = left.shape, right.shape[-1], len(weight)
    if num_rows * num_outs == 0:
        return left.new_empty(num_rows, num_outs)
    chunk, tile = chunk_of(*weight.shape[1:], left.dtype), block_of(num_rows, _tile_of_rows(left))
    num_chunks = _parts(blocks, chunk.BN) * _parts(width, chunk.BK)
    # Enough programs for the card, each with a few chunks.
    programs = _parts(num_rows, tile) * _parts(num_outs, 64)
    per_split = _parts(num_chunks, max(1, min(2 * num_processors(left.device) // programs, num_chunks // 4)))
    num_splits = _parts(num_chunks, per_split)
    dtype = left.dtype if num_splits == 1 else torch.float32
    result = torch.empty((num_splits, num_rows, num_outs), dtype=dtype, device=left.device)
    left, right = dense_rows(left.flatten(1)), dense_rows(right.flatten(1))
    kernel[lambda meta: (_parts(num_rows, tile), _parts(num_outs, meta["BD"]), num_splits)](
        left, right, weight.contiguous(), result, num_rows, left.stride(0), right.stride(0), num_outs, per_split,
        blocks, width, other, **chunk._asdict(), BR=tile,
    )  # fmt: skip
    return result[0] if num_splits == 1 else result.sum(dim=0).to(left.dtype)


def _run_backward(dresult: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from multilin.ops.block_outer.gpu_kernels import backward_factors, backward_weight
    from multilin.ops.triton_kernels.launch import block_of, dense_rows

    (num_rows, blocks, width), other, num_outs = left.shape, right.shape[-1], len(weight)
    if num_rows * num_outs == 0:
        return torch.zeros_like(left), torch.zeros_like(right), torch.zeros_like(weight)
    chunk, tile = chunk_of(*weight.shape[1:], left.dtype), block_of(num_rows, _tile_of_rows(left))
    num_parts = min(_PARTS, _parts(width, chunk.BK))
    per_part = _parts(_parts(width, chunk.BK), num_parts)
    weight, dresult = weight.contiguous(), dense_rows(dresult)
    dleft = torch.empty(left.shape, dtype=left.dtype, device=left.device)
    dtype = right.dtype if num_parts == 1 else torch.float32
    dright = torch.empty((num_parts, *right.shape), dtype=dtype, device=left.device)
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=left.device)
    lefts, rights = dense_rows(left.flatten(1)), dense_rows(right.flatten(1))
    strides = lefts.stride(0), rights.stride(0), dresult.stride(0)
    backward_factors[(_parts(num_rows, tile), _parts(blocks, chunk.BN), num_parts)](
        lefts, rights, weight, dresult, dleft, dright, num_rows, *strides, num_outs, per_part,
        blocks, width, other, **chunk._asdict(), BR=tile,
    )  # fmt: skip
    num_chunks = _parts(blocks, chunk.BN) * _parts(width, chunk.BK)
    backward_weight[lambda meta: (_parts(num_outs, meta["BD"]), num_chunks)](
        lefts, rights, dresult, dweight, num_rows, *strides, num_outs,
        blocks, width, other, **chunk._asdict(), BR=min(tile, 64),
    )  # fmt: skip
    return dleft, dright[0] if num_parts == 1 else dright.sum(dim=0).to(right.dtype), dweight


def _tile_of_rows(x: Tensor) -> int:
    return 64 if x.dtype == torch.float32 else 128


def _parts(size: int, part: int) -> int:
    return -(-size // part)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
