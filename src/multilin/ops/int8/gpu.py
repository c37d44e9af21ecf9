"""The steps of int8 products on a GPU: rounding in one kernel each, and products that leave the tensor cores scaled.

The products of pairs of `int8_block_outer` are rounded and multiplied in registers and never written. Every step is an
operator, so that torch.compile traces through them; seeds are tensors of the CPU, read inside. The kernels are in
`gpu_kernels` here and in `block_outer`.
"""

import torch
from torch import Tensor

from multilin.ops.block_outer import gpu as block_outer
from multilin.ops.block_outer.gpu import power_of_two
from multilin.ops.int8.portable import PortableSteps, draw_seed, sum_of_parts
from multilin.ops.int8.rounding import Rounded
from multilin.ops.kernels import LazyModule, dense_rows, operator

_kernels, _launch = LazyModule("multilin.ops.int8.gpu_kernels"), LazyModule("multilin.ops.kernels.gpu_launch")


def refuses(*inputs: Tensor) -> str | None:
    """The reason against factors of pairs that are too wide; x of a linear map may be any."""
    return block_outer.refuses(*inputs) if len(inputs) == 2 else None


def _fake_rows(x: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    return values, x.new_empty((x.shape[0], 1), dtype=torch.float32)


@operator("int8_round_rows", _fake_rows)
def _round_rows(x: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    x = dense_rows(x)
    (num_rows, width), (values, scale) = x.shape, _fake_rows(x, seed)
    if num_rows:
        _kernels.round_rows[(num_rows,)](
            x, values, scale, width, x.stride(0), 0 if seed is None else int(seed),
            RANDOM=seed is not None, BW=_launch.block_of(width, 4096),
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
    "int8_scaled_product", lambda left, scale, right, *more: left.new_empty((len(left), right.shape[1]), dtype=more[-1])
)
def _scaled_product(
    left: Tensor, row_scale: Tensor, right: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    # Tensor cores read int8 along the sum only.
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


@operator("int8_scale_of_pairs", lambda left, right: left.new_empty((len(left), 1), dtype=torch.float32))
def _scale_of_pairs(left: Tensor, right: Tensor) -> Tensor:
    (num_rows, blocks, width), other = left.shape, right.shape[-1]
    scale = torch.empty((num_rows, 1), dtype=torch.float32, device=left.device)
    lefts, rights = dense_rows(left.flatten(1)), dense_rows(right.flatten(1))
    at_once = min(power_of_two(width), 256)
    if num_rows:
        _kernels.scale_of_pairs[(-(-num_rows // 4),)](
            lefts, rights, scale, num_rows, lefts.stride(0), rights.stride(0), blocks, width, other,
            BR=4, BN=min(power_of_two(blocks), max(256 // at_once, 1)), BK=at_once, BJ=power_of_two(other),
        )  # fmt: skip
    return scale


class GpuSteps(PortableSteps):
    """As `PortableSteps`, for float32, bf16 and float16."""

    @staticmethod
    def round_rows(x: Tensor, seed: Tensor | None = None) -> Rounded:
        """One scale per row; with a seed rounded without bias."""
        return Rounded(*_round_rows(x.detach(), seed))

    @staticmethod
    def round_columns_randomly(x: Tensor, row_scale: Tensor) -> Rounded:
        """The transpose (width, R) of row_scale * x with one scale (width, 1) per column of x, rounded without bias."""
        return Rounded(*_round_columns(x, row_scale.float(), draw_seed()))

    @classmethod
    def scaled_product(
        cls, left: Rounded, right: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """left @ right * factor + bias."""
        return _scaled_product(left.values, left.scale, right, factor.float(), bias, dtype)

    @classmethod
    def outer(cls, left: Tensor, right: Tensor, values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounded pairs contracted by an int8 weight (D, N, K, J)."""
        return block_outer.contract(left, right, values, _scale_of_pairs(left, right), factor.float()).to(dtype)

    @classmethod
    def gradients_of_factors(
        cls, dresult: Tensor, left: Tensor, right: Tensor, values: Tensor, factor: Tensor, backward: str
    ) -> tuple[Tensor, Tensor]:
        """Gradients of left and right."""
        row_scale = None
        if backward == "int8":
            dresult, row_scale = cls.round_rows(dresult, draw_seed())
        else:
            values = values.to(dresult.dtype)
        return block_outer.gradients_of_factors(dresult, left, right, values, row_scale, factor.float())

    @classmethod
    def gradient_of_pairs_weight(
        cls, dresult: Tensor, left: Tensor, right: Tensor, factor: float, backward: str, dtype: torch.dtype
    ) -> Tensor:
        """Gradient of the weight (D, N, K, J), from pairs that are rounded again."""
        scale = _scale_of_pairs(left, right)
        if backward != "int8":
            dweight = block_outer.gradient_of_weight(dresult, left, right, torch.float32, scale, None)
            return (dweight * factor).to(dtype)

        def gradient(part: slice) -> Tensor:
            columns, column_scale = cls.round_columns_randomly(dresult[part], scale[part] * factor)
            inputs = columns.t(), left[part], right[part]
            return block_outer.gradient_of_weight(*inputs, torch.float32, scale[part], column_scale)

        return sum_of_parts(gradient, len(dresult)).to(dtype)
