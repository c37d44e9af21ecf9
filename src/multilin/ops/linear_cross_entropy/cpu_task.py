"""What the kernel of `linear_cross_entropy` is told."""

import ctypes

_FIELDS = (
    "num_rows", "width",  # logits are (rows, V)
    "num_parts",  # of the rows, that run at the same time
    "logits",  # address; their gradient takes their place where it is made
    "bias",  # float32 (V,), or 0
    "targets",  # int64 (rows,)
    "ignored",  # the target of rows that count nothing
    "makes_gradient",  # 1 where the gradient is made
    "losses",  # float32 (rows,)
    "scores",  # float32 (parts, V), for the kernel to work in
    "dbias",  # float32 (parts, V), or 0
)  # fmt: skip


class Task(ctypes.Structure):
    """The fields above; what is not set is 0."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _FIELDS),
        ("scale", ctypes.c_double),  # factor on the logits, not on the bias
        ("smoothing", ctypes.c_double),  # share of the target that is spread over all tokens
    ]
