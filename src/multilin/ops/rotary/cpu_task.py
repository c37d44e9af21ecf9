"""What the kernel of `rotary` is told."""

import ctypes

_FIELDS = (
    "num_rows", "width", "head_size", "block",  # x is (rows, width), a row all heads of a position
    "num_parts",  # of the rows, that run at the same time
    "is_inverse",  # 1 turns back
    "x", "x_row",  # address, and bytes from one row to the next
    "cos", "sin",  # float32 (rows, head_size / 2) in one piece
    "result",  # (rows, width) in one piece
)  # fmt: skip


class Task(ctypes.Structure):
    """The fields above."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS]
