"""The steps of int8 products on a GPU: each rounding is one kernel, and products are scaled in the kernel.

Every step is an operator, so that torch.compile can trace the step; operators read seeds from CPU tensors. The kernels
are in `gpu_kernels`.
"""

import torch
from torch import Tensor

from multilin.ops.int8.portable import PortableSteps, draw_seed, num_pairs
from multilin.ops.int8.rounding import Rounded
from multilin.ops.kernels import LazyModule, dense_rows, operator

_kernels, _launch = LazyModule("multilin.ops.int8.gpu_kernels"), LazyModule("multilin.ops.kernels.gpu_launch")


def _empty_rows(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Allocate tensors for the integers and scales of rows of this width."""
    num_rows = x.shape[0]  # unlike len(x), a symbol in graphs for any size
    return x.new_empty((num_rows, width), dtype=torch.int8), x.new_empty((num_rows, 1), dtype=torch.float32)


@operator("int8_round_rows", lambda x, _: _empty_rows(x, x.shape[1]))
def _round_rows(x: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    x = dense_rows(x)
    values, scale = _empty_rows(x, x.shape[1])
    if len(x):
        _kernels.round_rows[(len(x),)](
            x, None, values, scale, x.shape[1], x.stride(0), 0, 0 if seed is None else int(seed),
            RANDOM=seed is not None, BW=_launch.block_of(x.shape[1], 4096), K=1, J=1,
        )  # fmt: skip
    return values, scale


@operator("int8_round_pairs", lambda left, right: _empty_rows(left, num_pairs(left, right)))
def _round_pairs(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = _empty_rows(left, num_pairs(left, right))
    lefts, rights = dense_rows(left.flatten(1)), dense_rows(right.flatten(1))
    if len(left):
        _kernels.round_rows[(len(left),)](
            lefts, rights, values, scale, values.shape[1], lefts.stride(0), rights.stride(0), 0,
            RANDOM=False, BW=_launch.block_of(values.shape[1], 4096), K=left.shape[2], J=right.shape[2],
        )  # fmt: skip
    return values, scale


def _fake_columns(x: Tensor, row_scale: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape
    return x.new_empty((width, num_rows), dtype=torch.int8), x.new_empty((width, 1), dtype=torch.float32)


@operator("int8_round_columns", _fake_columns)
def _round_columns(x: Tensor, row_scale: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    x, row_scale = dense_rows(x), row_scale.contiguous()
    (num_rows, width), (values, scale) = x.shape, _fake_columns(x, row_scale, seed)
    if num_rows * width == 0:
        return values, scale.zero_()
    largest = torch.zeros(width, dtype=torch.int32, device=x.device)
    tile = {"BR": 64, "BW": 64}
    columns = -(-width // tile["BW"])
    parts = max(1, min(num_rows // tile["BR"], 4 * _launch.num_processors(x.device) // columns))
    _kernels.largest_of_columns[(columns, parts)](
        x, row_scale, largest, num_rows, width, x.stride(0), -(-num_rows // parts), **tile
    )
    _kernels.round_columns[(-(-num_rows // tile["BR"]), columns)](
        x, row_scale, largest, values, scale, num_rows, width, x.stride(0), int(seed), **tile
    )
    return values, scale


@operator(
    "int8_scaled_product",
    lambda left, scale, right, *more: left.new_empty((left.shape[0], right.shape[1]), dtype=more[-1]),
)
def _scaled_product(
    left: Tensor, row_scale: Tensor, right: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    # Tensor cores read int8 only along the axis of the sum.
    left, columns = left.contiguous(), right.t().contiguous()
    num_rows, num_columns = len(left), len(columns)
    result = torch.empty((num_rows, num_columns), dtype=dtype, device=left.device)
    tile = _launch.block_of(num_rows, 128)
    if result.numel():
        _kernels.scaled_product[lambda meta: (-(-num_rows // tile), -(-num_columns // meta["BN"]))](
            left, columns, row_scale.contiguous(), factor, None if bias is None else bias.contiguous(), result,
            num_rows, num_columns, left.shape[1], BM=tile, enable_fp_fusion=False,
        )  # fmt: skip
    return result


class GpuSteps(PortableSteps):
    """The steps of `PortableSteps` for float32, bf16 and float16."""

    @staticmethod
    def round_rows(x: Tensor, seed: Tensor | None = None) -> Rounded:
        """Round rows with one scale per row; with a seed, round stochastically without bias."""
        return Rounded(*_round_rows(x.detach(), seed))

    @staticmethod
    def round_columns_randomly(x: Tensor, row_scale: Tensor) -> Rounded:
        """Round row_scale * x without bias: the transpose (width, R), and one scale (width, 1) per column of x."""
        return Rounded(*_round_columns(x, row_scale.float(), draw_seed()))

    @classmethod
    def scaled_product(
        cls, left: Rounded, right: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """left @ right * factor + bias."""
        return _scaled_product(left.values, left.scale, right, factor.float(), bias, dtype)

    @classmethod
    def round_pairs(cls, left: Tensor, right: Tensor) -> Rounded:
        """Round the products (R, N K J) of left (R, N, K) and right (R, N, J), with one scale per row."""
        return Rounded(*_round_pairs(left, right))
