"""Pieces of memory and of work, in kernels."""

from typing import Any

from numba import carray, njit

from multilin.ops.numba_kernels.intrinsics import to_float32_pointer


@njit
def floats(address: int, rows: int, columns: int) -> Any:
    """The (rows, columns) float32 array at an address."""
    return carray(to_float32_pointer(address), (rows, columns))


@njit
def part_of_rows(num_rows: int, num_parts: int, part: int) -> tuple[int, int]:
    """First row of a part, and the one after its last."""
    return num_rows * part // num_parts, num_rows * (part + 1) // num_parts
