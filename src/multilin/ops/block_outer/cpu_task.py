"""What the kernels of `block_outer` are told; all tensors lie in one piece."""

import ctypes

_FIELDS = (
    "num_rows", "num_blocks", "left_width", "right_width",  # R, N, K, J
    "num_parts",  # of the rows, that run at the same time
    "left", "right",  # (R, N, K) and (R, N, J)
    "pairs",  # (R, N, K, J), or their gradient
    "dleft", "dright",  # as left and right
)  # fmt: skip


class Task(ctypes.Structure):
    """The fields above; what is not set is 0."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS]
