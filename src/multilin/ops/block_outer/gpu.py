"""Block outer products on a GPU, for floats and for pairs rounded to int8: pairs live in registers only.

Forward, a program makes the pairs of a tile of rows and of a chunk of blocks, and multiplies them with a tile of the
weight. Where rows are few, as while decoding, the chunks are split over programs whose sums are added in a fixed order.
Backward, the gradient of the pairs is a tile of registers too, contracted with either factor where it was made; the
weight's gradient makes the pairs again. The kernels are in `gpu_kernels`.
"""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule, dense_rows, operator

_kernels, _launch = LazyModule("multilin.ops.block_outer.gpu_kernels"), LazyModule("multilin.ops.kernels.gpu_launch")
WIDEST = 64  # numbers of a right block: a chunk holds all of them
_PARTS = 8  # of the left blocks, at most, whose sums for dright are kept


def refuses(left: Tensor, right: Tensor, *_: object) -> str | None:
    """The reason against right blocks that are too wide."""
    width = right.shape[-1]
    return None if width <= WIDEST else f"right blocks of {width} numbers are wider than {WIDEST}"


def block_outer(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """See `multilin.ops.block_outer`; all three of one type."""
    lefts, rights = (x.reshape(-1, *x.shape[-2:]) for x in (left, right))
    result: Tensor = contract(lefts, rights, weight)
    return result.view(*left.shape[:-2], len(weight))


def _chunk_of(num_blocks: int, width: int, right_width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Blocks BN, and numbers of the left (BK) and of the right block (BJ), whose pairs are made at a time.

    Chunks of about 128 bytes of pairs, and of no fewer pairs than tensor cores sum over; DENSE: see `weight_places`.
    """
    wanted = 128 // dtype.itemsize
    rights, lefts = power_of_two(right_width), power_of_two(width)
    lefts = min(lefts, max(wanted // rights, 1))
    blocks = min(max(wanted // (lefts * rights), 1), power_of_two(num_blocks)) if lefts >= width else 1
    while blocks * lefts * rights < (32 if dtype == torch.int8 else 16):
        blocks, lefts = (blocks * 2, lefts) if lefts >= width else (blocks, lefts * 2)
    is_dense = rights == right_width and (blocks == 1 or lefts == width)
    return {"BN": blocks, "BK": lefts, "BJ": rights, "DENSE": is_dense}


def _factors(left: Tensor, right: Tensor, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of every kernel: both factors with their strides and number of rows, and its constants."""
    (num_rows, blocks, width), other = left.shape, right.shape[-1]
    lefts, rights = dense_rows(left.flatten(1)), dense_rows(right.flatten(1))
    constants = {"N": blocks, "K": width, "J": other, **_chunk_of(blocks, width, other, dtype)}
    return (lefts, rights, num_rows, lefts.stride(0), rights.stride(0)), constants


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _differentiate(ctx: Any, dresult: Tensor) -> tuple[Tensor | None, ...]:
    left, right, weight = ctx.saved_tensors
    dleft, dright = gradients_of_factors(dresult, left, right, weight)
    return dleft, dright, gradient_of_weight(dresult, left, right, weight.dtype), None, None


@operator(
    "block_outer_gpu", lambda left, right, weight, *_: left.new_empty(len(left), len(weight)), _save, _differentiate
)
def contract(
    left: Tensor, right: Tensor, weight: Tensor, pair_scale: Tensor | None = None, factor: Tensor | None = None
) -> Tensor:
    """Pairs of left (R, N, K) and right (R, N, J), contracted by weight (D, N, K, J): (R, D) of the type of left.

    With an int8 weight, pairs are divided by pair_scale (R, 1) and rounded, and the result is multiplied by it and by
    factor, a tensor of one number.
    """
    (num_rows, blocks, width), num_outs = left.shape, len(weight)
    if num_rows * num_outs == 0:
        return left.new_empty(num_rows, num_outs)
    factors, constants = _factors(left, right, weight.dtype)
    tile = _launch.block_of(num_rows, _rows_of_tile(weight))
    num_chunks = _parts(blocks, constants["BN"]) * _parts(width, constants["BK"])
    # Enough programs for the card, each with a few chunks.
    programs = _parts(num_rows, tile) * _parts(num_outs, 64)
    per_split = _parts(num_chunks, max(1, min(2 * _launch.num_processors(left.device) // programs, num_chunks // 4)))
    num_splits = _parts(num_chunks, per_split)
    sums = torch.float32 if factor is None else torch.int32
    dtype = left.dtype if num_splits == 1 else sums
    result = torch.empty((num_splits, num_rows, num_outs), dtype=dtype, device=left.device)
    _kernels.forward[lambda meta: (_parts(num_rows, tile), _parts(num_outs, meta["BD"]), num_splits)](
        *factors, pair_scale, weight.contiguous(), factor if num_splits == 1 else None, result, num_outs, per_split,
        **constants, BR=tile,
    )  # fmt: skip
    if num_splits == 1:
        return result[0]
    total = result.sum(dim=0, dtype=sums)
    return (total if factor is None or pair_scale is None else total * (pair_scale * factor)).to(left.dtype)


@operator(
    "block_outer_gpu_factors", lambda _, left, right, *__: (left.new_empty(left.shape), right.new_empty(right.shape))
)
def gradients_of_factors(
    dresult: Tensor, left: Tensor, right: Tensor, weight: Tensor,
    row_scale: Tensor | None = None, factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of left and right from dresult (R, D), which is of the type of the weight.

    They are multiplied by row_scale (R, 1) and factor, a tensor of one number, where those are given.
    """
    (num_rows, blocks, width), num_outs = left.shape, len(weight)
    if num_rows * num_outs == 0:
        return torch.zeros_like(left), torch.zeros_like(right)
    factors, constants = _factors(left, right, weight.dtype)
    tile = _launch.block_of(num_rows, _rows_of_tile(weight))
    num_parts = min(_PARTS, _parts(width, constants["BK"]))
    per_part = _parts(_parts(width, constants["BK"]), num_parts)
    dleft = torch.empty(left.shape, dtype=left.dtype, device=left.device)
    dtype = right.dtype if num_parts == 1 else torch.float32
    dright = torch.empty((num_parts, *right.shape), dtype=dtype, device=left.device)
    dresult = dense_rows(dresult)
    _kernels.backward_factors[(_parts(num_rows, tile), _parts(blocks, constants["BN"]), num_parts)](
        *factors, weight.contiguous(), dresult, dresult.stride(0), row_scale, factor, dleft, dright, num_outs, per_part,
        **constants, BR=tile,
    )  # fmt: skip
    return dleft, dright[0] if num_parts == 1 else dright.sum(dim=0).to(right.dtype)


def _fake_gradient_of_weight(dresult: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *_: Any) -> Tensor:
    return left.new_empty((dresult.shape[1], *left.shape[1:], right.shape[-1]), dtype=dtype)


@operator("block_outer_gpu_weight", _fake_gradient_of_weight)
def gradient_of_weight(
    dresult: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype,
    pair_scale: Tensor | None = None, factor: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of the weight (D, N, K, J), of this type, from dresult (R, D).

    Pairs are divided by pair_scale (R, 1) and rounded where it is given; they get it back where dresult is a float. The
    gradient is multiplied by factor (D,) where that is given.
    """
    (num_rows, blocks, width), num_outs = left.shape, dresult.shape[1]
    dweight = _fake_gradient_of_weight(dresult, left, right, dtype)
    if num_rows * num_outs == 0:
        return dweight.zero_()
    factors, constants = _factors(left, right, dresult.dtype)
    num_chunks = _parts(blocks, constants["BN"]) * _parts(width, constants["BK"])
    dresult = dense_rows(dresult)
    _kernels.backward_weight[lambda meta: (_parts(num_outs, meta["BD"]), num_chunks)](
        *factors, pair_scale, dresult, dresult.stride(0), factor, dweight, num_outs,
        **constants, BR=max(32, _launch.block_of(num_rows, 128 // dresult.dtype.itemsize)),
    )  # fmt: skip
    return dweight


def _rows_of_tile(weight: Tensor) -> int:
    return 64 if weight.dtype == torch.float32 else 128


def _parts(size: int, part: int) -> int:
    return -(-size // part)


def power_of_two(size: int) -> int:
    """The least that holds `size`."""
    return 1 << (size - 1).bit_length()
