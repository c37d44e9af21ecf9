"""What the kernels of `tile_norm` are told."""

import ctypes

_FIELDS = (
    "num_rows", "width", "tile",  # x is (rows, width)
    "num_parts",  # of the rows, that run at the same time
    "x", "x_row",  # address, and bytes from one row to the next
    "result", "result_row",  # likewise; backward its gradient
    "scales",  # float32 (rows, width / tile), or 0
    "dx",  # (rows, width) in one piece; backward
)  # fmt: skip


class Task(ctypes.Structure):
    """The fields above; what is not set is 0."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS]
