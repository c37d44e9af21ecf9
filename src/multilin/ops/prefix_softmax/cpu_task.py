"""Arguments of the CPU kernels of the prefix softmax."""

import ctypes

ROWS = 32  # positions whose values and gradients stay in the cache between two passes over them

_SIZES = (
    "num_time", "num_heads", "width",  # T, H, D
    "num_parts",  # of the time of a text, which run at the same time; pieces are the square of it
    "part",  # the one of a kernel's call, or its piece
    "window",  # tokens read, for the windowed kernels
    "is_gated",  # 1 where y is not simply the running mean: an own term, a null token, rounding to bf16
)  # fmt: skip
TENSORS = (
    "logits", "own", "values", "starts", "state_logits", "state_values",
    "means", "weights", "checkpoints", "rounding", "summaries", "final_logits", "final_values",
    "dmeans", "dfinal_logits", "dfinal_values", "dlogits", "dvalues", "down", "dstate_logits", "dstate_values",
)  # fmt: skip
STRIDES = {name: (f"{name}_batch", f"{name}_row") for name in TENSORS}
NUM_TENSORS, FIRST_TENSOR, NUM_NUMBERS = len(TENSORS), len(_SIZES), len(_SIZES) + 3 * len(TENSORS) + 1


class Task(ctypes.Structure):
    """Arguments of a kernel. Of every tensor the address, 0 if absent, and the bytes between texts and positions."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((field, ctypes.c_int64) for name in TENSORS for field in (name, *STRIDES[name])),
        ("null", ctypes.c_double),  # logit of the null token, -inf where there is none
    ]
