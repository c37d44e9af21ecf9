"""How the kernels of block outer products are started, for floats and for pairs rounded to int8."""

from typing import NamedTuple

import torch
from torch import Tensor

WIDEST = 64  # numbers of a right block: a chunk holds all of them
_PARTS = 8  # of the left blocks, at most, whose sums for dright are kept


def refuses(right_width: int) -> str | None:
    """The reason against a call with right blocks so wide."""
    return None if right_width <= WIDEST else f"right blocks of {right_width} numbers are wider than {WIDEST}"


class Chunk(NamedTuple):
    """Blocks, and numbers of the left and of the right block, whose pairs are made at a time."""

    BN: int
    BK: int
    BJ: int
    DENSE: bool


def chunk_of(num_blocks: int, width: int, right_width: int, dtype: torch.dtype) -> Chunk:
    """Chunks of about 128 bytes of pairs, and of no fewer pairs than tensor cores sum over."""
    wanted = 128 // dtype.itemsize
    rights, lefts = power_of_two(right_width), power_of_two(width)
    lefts = min(lefts, max(wanted // rights, 1))
    blocks = min(max(wanted // (lefts * rights), 1), power_of_two(num_blocks)) if lefts >= width else 1
    while blocks * lefts * rights < (32 if dtype == torch.int8 else 16):
        blocks, lefts = (blocks * 2, lefts) if lefts >= width else (blocks, lefts * 2)
    return Chunk(blocks, lefts, rights, rights == right_width and (blocks == 1 or lefts == width))


def contract(
    left: Tensor, right: Tensor, weight: Tensor, *, pair_scale: Tensor | None = None, factor: Tensor | None = None
) -> Tensor:
    """Pairs of left (R, N, K) and right (R, N, J), contracted by weight (D, N, K, J): (R, D) of the type of left.

    With an int8 weight, pairs are divided by pair_scale (R, 1) and rounded, and the result is multiplied by it and by
    factor, a tensor of one number.
    """
    from multilin.ops.block_outer.gpu_kernels import forward as kernel
    from multilin.ops.triton_kernels.launch import block_of, dense_rows, num_processors

    (num_rows, blocks, width), other, num_outs = left.shape, right.shape[-1], len(weight)
    if num_rows * num_outs == 0:
        return left.new_empty(num_rows, num_outs)
    chunk, tile = chunk_of(blocks, width, other, weight.dtype), block_of(num_rows, _rows_of_tile(weight))
    num_chunks = _parts(blocks, chunk.BN) * _parts(width, chunk.BK)
    # Enough programs for the card, each with a few chunks.
    programs = _parts(num_rows, tile) * _parts(num_outs, 64)
    per_split = _parts(num_chunks, max(1, min(2 * num_processors(left.device) // programs, num_chunks // 4)))
    num_splits = _parts(num_chunks, per_split)
    sums = torch.float32 if factor is None else torch.int32
    dtype = left.dtype if num_splits == 1 else sums
    result = torch.empty((num_splits, num_rows, num_outs), dtype=dtype, device=left.device)
    lefts, rights = dense_rows(left.flatten(1)), dense_rows(right.flatten(1))
    kernel[lambda meta: (_parts(num_rows, tile), _parts(num_outs, meta["BD"]), num_splits)](
        lefts, rights, pair_scale, weight.contiguous(), factor if num_splits == 1 else None, result,
        num_rows, lefts.stride(0), rights.stride(0), num_outs, per_split,
        blocks, width, other, **chunk._asdict(), BR=tile,
    )  # fmt: skip
    if num_splits == 1:
        return result[0]
    total = result.sum(dim=0, dtype=sums)
    return (total if factor is None or pair_scale is None else total * (pair_scale * factor)).to(left.dtype)


def gradients_of_factors(
    dresult: Tensor, left: Tensor, right: Tensor, weight: Tensor,
    *, row_scale: Tensor | None = None, factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of left and right from dresult (R, D), which is of the type of the weight.

    They are multiplied by row_scale (R, 1) and factor, a tensor of one number, where those are given.
    """
    from multilin.ops.block_outer.gpu_kernels import backward_factors as kernel
    from multilin.ops.triton_kernels.launch import block_of, dense_rows

    (num_rows, blocks, width), other, num_outs = left.shape, right.shape[-1], len(weight)
    if num_rows * num_outs == 0:
        return torch.zeros_like(left), torch.zeros_like(right)
    chunk, tile = chunk_of(blocks, width, other, weight.dtype), block_of(num_rows, _rows_of_tile(weight))
    num_parts = min(_PARTS, _parts(width, chunk.BK))
    per_part = _parts(_parts(width, chunk.BK), num_parts)
    dleft = torch.empty(left.shape, dtype=left.dtype, device=left.device)
    dtype = right.dtype if num_parts == 1 else torch.float32
    dright = torch.empty((num_parts, *right.shape), dtype=dtype, device=left.device)
    lefts, rights, dresult = (dense_rows(x) for x in (left.flatten(1), right.flatten(1), dresult))
    kernel[(_parts(num_rows, tile), _parts(blocks, chunk.BN), num_parts)](
        lefts, rights, weight.contiguous(), dresult, row_scale, factor, dleft, dright,
        num_rows, lefts.stride(0), rights.stride(0), dresult.stride(0), num_outs, per_part,
        blocks, width, other, **chunk._asdict(), BR=tile,
    )  # fmt: skip
    return dleft, dright[0] if num_parts == 1 else dright.sum(dim=0).to(right.dtype)


def gradient_of_weight(
    dresult: Tensor, left: Tensor, right: Tensor, *, dtype: torch.dtype, shape: torch.Size,
    pair_scale: Tensor | None = None, factor: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of the weight, of this type and shape, from dresult (R, D).

    Pairs are divided by pair_scale (R, 1) and rounded where it is given; they get it back where dresult is a float. The
    gradient is multiplied by factor (D,) where that is given.
    """
    from multilin.ops.block_outer.gpu_kernels import backward_weight as kernel
    from multilin.ops.triton_kernels.launch import block_of, dense_rows

    (num_rows, blocks, width), other, num_outs = left.shape, right.shape[-1], dresult.shape[1]
    if num_rows * num_outs == 0:
        return left.new_zeros(shape, dtype=dtype)
    chunk = chunk_of(blocks, width, other, dresult.dtype)
    num_chunks = _parts(blocks, chunk.BN) * _parts(width, chunk.BK)
    dweight = torch.empty(shape, dtype=dtype, device=left.device)
    lefts, rights, dresult = (dense_rows(x) for x in (left.flatten(1), right.flatten(1), dresult))
    kernel[lambda meta: (_parts(num_outs, meta["BD"]), num_chunks)](
        lefts, rights, pair_scale, dresult, factor, dweight,
        num_rows, lefts.stride(0), rights.stride(0), dresult.stride(0), num_outs,
        blocks, width, other, **chunk._asdict(), BR=max(32, block_of(num_rows, 128 // dresult.dtype.itemsize)),
    )  # fmt: skip
    return dweight


def _rows_of_tile(weight: Tensor) -> int:
    return 64 if weight.dtype == torch.float32 else 128


def _parts(size: int, part: int) -> int:
    return -(-size // part)


def power_of_two(size: int) -> int:
    """The least that holds `size`."""
    return 1 << (size - 1).bit_length()
