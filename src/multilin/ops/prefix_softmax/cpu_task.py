"""What a CPU kernel is told: one structure of sizes, addresses and strides for all kernels, filled where it is called.

Kernels take addresses because rows may lie apart (slices of a fused projection), which costs them nothing and a copy
would cost as much as the kernel. Strides are in bytes; inside a row, heads and components are contiguous.
"""

import ctypes

ROWS = 32  # positions whose values and gradients stay in the cache between two passes over them

_SIZES = (
    "num_batch", "num_time", "num_heads", "width",  # B, T, H, D
    "window",  # tokens read, for the windowed kernels
    "num_parts",  # parts of time that run at the same time; pieces are the square of it
    "is_gated",  # 1 where y is not simply the running mean: an own term, a null token, rounding to bf16
    "keeps",  # 1 where the weights of all positions are kept for the backward pass
)  # fmt: skip
_INPUTS = (
    "logits", "logits_batch", "logits_row",  # float32 (B, T, H)
    "own", "own_batch", "own_row",  # float32 (B, T, H), or 0
    "starts", "starts_batch",  # bool (B, T), or 0
    "values", "values_batch", "values_row",  # (B, T, H, D)
    "state_logits", "state_values",  # float32 (B, H) and (B, H, D), or 0
)  # fmt: skip
_OUTPUTS = (
    "means", "means_batch", "means_row",  # (B, T, H, D)
    "rounding",  # what bf16 means lack, as means, or 0
    "weights",  # float32 (B, planes, T, H)
    "checkpoints",  # float32 (B, pieces of ROWS, H, D): the running mean before each
    "final_logits", "final_values",  # float32 (B, H) and (B, H, D), or 0
    "summaries",  # float32 (B, pieces, 3 H + H D): what a piece of time does to the state, or 0
)  # fmt: skip
_GRADIENTS = (
    "dmeans", "dmeans_batch", "dmeans_row",  # (B, T, H, D)
    "dfinal_logits", "dfinal_values",  # float32 (B, H) and (B, H, D), or 0
    "dlogits", "down",  # float32 (B, T, H); down or 0
    "dvalues", "dvalues_batch", "dvalues_row",  # (B, T, H, D)
    "dstate_logits", "dstate_values",  # float32 (B, H) and (B, H, D), or 0
)  # fmt: skip


class Task(ctypes.Structure):
    """The fields above, and `null`: the logit of the null token, -inf where there is none. What is not set is 0."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (*_SIZES, *_INPUTS, *_OUTPUTS, *_GRADIENTS)),
        ("null", ctypes.c_double),
    ]
