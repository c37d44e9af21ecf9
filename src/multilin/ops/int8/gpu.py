"""The steps of int8 products on a GPU: rounding in one kernel each, and products that leave the tensor cores scaled.

The products of pairs of `int8_block_outer` are rounded and multiplied in registers and never written. Every step is an
operator, so that torch.compile traces through them; seeds are tensors of the CPU, read inside. The kernels are in
`gpu_kernels` here and in `block_outer`.
"""

import torch
from torch import Tensor

from multilin.ops.block_outer.gpu import contract, gradient_of_weight, gradients_of_factors, power_of_two
from multilin.ops.int8.portable import LONGEST_SUM, PortableSteps, draw_seed
from multilin.ops.int8.rounded import Rounded
from multilin.ops.kernels.rows import dense_rows


class GpuSteps(PortableSteps):
    """As `PortableSteps`, for float32, bf16 and float16."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    is_traceable = True

    @staticmethod
    def round_rows(x: Tensor) -> Rounded:
        """One scale per row."""
        return Rounded(*_round_rows(x.detach(), None))

    @staticmethod
    def round_rows_randomly(x: Tensor) -> Rounded:
        """One scale per row, rounded without bias."""
        return Rounded(*_round_rows(x, draw_seed()))

    @staticmethod
    def round_columns_randomly(x: Tensor, row_scale: Tensor) -> Rounded:
        """row_scale * x with one scale (1, width) per column, rounded without bias."""
        columns, scale = _round_columns(x, row_scale.float(), draw_seed())
        return Rounded(columns.t(), scale)

    @classmethod
    def scaled_product(
        cls, left: Rounded, right: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """left @ right * factor + bias."""
        return _scaled_product(left.values, left.scale, right, factor.float(), bias, dtype)

    @classmethod
    def outer(cls, left: Tensor, right: Tensor, values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounded pairs contracted by an int8 weight (D, N, K, J)."""
        return _outer(left, right, values, factor.float(), dtype)

    @classmethod
    def gradients_of_factors(
        cls, dresult: Tensor, left: Tensor, right: Tensor, values: Tensor, factor: Tensor, backward: str
    ) -> tuple[Tensor, Tensor]:
        """Gradients of left and right."""
        if backward == "int8":
            rounded = cls.round_rows_randomly(dresult)
            return _outer_factors(rounded.values, rounded.scale, left, right, values, factor.float())
        return _outer_factors(dresult, None, left, right, values.to(dresult.dtype), factor.float())

    @classmethod
    def gradient_of_pairs_weight(
        cls, dresult: Tensor, left: Tensor, right: Tensor, factor: float, backward: str, dtype: torch.dtype
    ) -> Tensor:
        """Gradient of the weight (D, N, K, J), from pairs that are rounded again."""
        scale = _scale_of_pairs(left, right)
        if backward != "int8":
            return (_outer_weight(dresult, None, left, right, scale) * factor).to(dtype)
        total = None
        for start in range(0, max(len(dresult), 1), LONGEST_SUM):
            part = slice(start, start + LONGEST_SUM)
            columns, column_scale = _round_columns(dresult[part], scale[part] * factor, draw_seed())
            piece = _outer_weight(columns.t(), column_scale, left[part], right[part], scale[part])
            total = piece if total is None else total + piece
        assert total is not None
        return total.to(dtype)


@torch.library.custom_op("multilin::int8_round_rows", mutates_args=())
def _round_rows(x: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    from multilin.ops.int8.gpu_kernels import round_rows
    from multilin.ops.kernels.gpu_launch import block_of

    x = dense_rows(x)
    num_rows, width = x.shape
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        round_rows[(num_rows,)](
            x, values, scale, width, x.stride(0), 0 if seed is None else int(seed),
            RANDOM=seed is not None, BW=block_of(width, 4096),
        )  # fmt: skip
    return values, scale


@_round_rows.register_fake
def _rounded_rows(x: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((x.shape[0], 1), dtype=torch.float32)


@torch.library.custom_op("multilin::int8_round_columns", mutates_args=())
def _round_columns(x: Tensor, row_scale: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Integers (width, rows), since products sum over the rows; scale (1, width)."""
    from multilin.ops.int8.gpu_kernels import largest_of_columns, round_columns
    from multilin.ops.kernels.gpu_launch import num_processors

    x, row_scale = dense_rows(x), row_scale.contiguous()
    num_rows, width = x.shape
    values = torch.empty((width, num_rows), dtype=torch.int8, device=x.device)
    scale = torch.zeros((1, width), dtype=torch.float32, device=x.device)
    if num_rows * width == 0:
        return values, scale
    largest = torch.zeros(width, dtype=torch.int32, device=x.device)
    tile_of_rows, tile_of_columns = 64, 64
    columns = -(-width // tile_of_columns)
    parts = max(1, min(num_rows // tile_of_rows, 4 * num_processors(x.device) // columns))
    rows_per_part = -(-num_rows // parts)
    largest_of_columns[(columns, parts)](
        x, row_scale, largest, num_rows, width, x.stride(0), rows_per_part, BR=tile_of_rows, BW=tile_of_columns
    )
    round_columns[(-(-num_rows // tile_of_rows), columns)](
        x, row_scale, largest, values, scale, num_rows, width, x.stride(0), int(seed),
        BR=tile_of_rows, BW=tile_of_columns,
    )  # fmt: skip
    return values, scale


@_round_columns.register_fake
def _rounded_columns(x: Tensor, row_scale: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    return x.new_empty((width, rows), dtype=torch.int8), x.new_empty((1, width), dtype=torch.float32)


@torch.library.custom_op("multilin::int8_scaled_product", mutates_args=())
def _scaled_product(
    left: Tensor, row_scale: Tensor, right: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    from multilin.ops.int8.gpu_kernels import scaled_product
    from multilin.ops.kernels.gpu_launch import block_of

    # Tensor cores read int8 along the sum only.
    left, columns = left.contiguous(), right.t().contiguous()
    num_rows, num_columns = len(left), len(columns)
    result = torch.empty((num_rows, num_columns), dtype=dtype, device=left.device)
    tile = block_of(num_rows, 128)
    if result.numel():
        scaled_product[lambda meta: (-(-num_rows // tile), -(-num_columns // meta["BN"]))](
            left, columns, row_scale.contiguous(), factor, None if bias is None else bias.contiguous(), result,
            num_rows, num_columns, left.shape[1], BM=tile, enable_fp_fusion=False,
        )  # fmt: skip
    return result


@_scaled_product.register_fake
def _product_shape(
    left: Tensor, row_scale: Tensor, right: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


@torch.library.custom_op("multilin::int8_scale_of_pairs", mutates_args=())
def _scale_of_pairs(left: Tensor, right: Tensor) -> Tensor:
    from multilin.ops.int8.gpu_kernels import scale_of_pairs

    (num_rows, blocks, width), other = left.shape, right.shape[-1]
    scale = torch.empty((num_rows, 1), dtype=torch.float32, device=left.device)
    lefts, rights = dense_rows(left.flatten(1)), dense_rows(right.flatten(1))
    at_once = min(power_of_two(width), 256)
    if num_rows:
        scale_of_pairs[(-(-num_rows // 4),)](
            lefts, rights, scale, num_rows, lefts.stride(0), rights.stride(0), blocks, width, other,
            BR=4, BN=min(power_of_two(blocks), max(256 // at_once, 1)), BK=at_once, BJ=power_of_two(other),
        )  # fmt: skip
    return scale


@_scale_of_pairs.register_fake
def _scale_shape(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((left.shape[0], 1), dtype=torch.float32)


@torch.library.custom_op("multilin::int8_outer", mutates_args=())
def _outer(left: Tensor, right: Tensor, values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return contract(left, right, values, pair_scale=_scale_of_pairs(left, right), factor=factor).to(dtype)


@_outer.register_fake
def _outer_shape(left: Tensor, right: Tensor, values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty((left.shape[0], values.shape[0]), dtype=dtype)


@torch.library.custom_op("multilin::int8_outer_factors", mutates_args=())
def _outer_factors(
    dresult: Tensor, row_scale: Tensor | None, left: Tensor, right: Tensor, values: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    return gradients_of_factors(dresult, left, right, values, row_scale=row_scale, factor=factor)


@_outer_factors.register_fake
def _factor_shapes(
    dresult: Tensor, row_scale: Tensor | None, left: Tensor, right: Tensor, values: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor]:
    return left.new_empty(left.shape), right.new_empty(right.shape)


@torch.library.custom_op("multilin::int8_outer_weight", mutates_args=())
def _outer_weight(
    dresult: Tensor, column_scale: Tensor | None, left: Tensor, right: Tensor, pair_scale: Tensor
) -> Tensor:
    return gradient_of_weight(dresult, left, right, torch.float32, pair_scale=pair_scale, factor=column_scale)


@_outer_weight.register_fake
def _outer_weight_shape(
    dresult: Tensor, column_scale: Tensor | None, left: Tensor, right: Tensor, pair_scale: Tensor
) -> Tensor:
    return left.new_empty((dresult.shape[1], *left.shape[1:], right.shape[-1]), dtype=torch.float32)
