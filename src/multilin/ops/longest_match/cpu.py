"""The longest match on a CPU: one table of hashes for each length, or for few tokens a comparison with each place."""

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule, operator

_COMPARED = 64  # most new tokens that are compared with each earlier place, which is faster than filling the tables
_kernels, _launch = LazyModule("multilin.ops.longest_match.cpu_kernels"), LazyModule("multilin.ops.kernels.cpu_launch")


def _empty(tokens_BT: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return tokens_BT.new_empty(tokens_BT.shape, dtype=torch.long), tokens_BT.new_empty(
        tokens_BT.shape, dtype=torch.long
    )


@operator("longest_match", _empty)
def longest_match(
    tokens_BT: Tensor, history_BS: Tensor, first_B: Tensor, begins_BT: Tensor | None, window: int, longest: int
) -> tuple[Tensor, Tensor]:
    """See `reference.longest_match`."""
    predicted_BT, length_BT = _empty(tokens_BT)
    num_time = tokens_BT.shape[1]
    begins_BT = first_B[:, None][:, :0] if begins_BT is None else begins_BT
    _launch.launch_parts(
        _kernels.search, predicted_BT.numel(), num_time <= _COMPARED, tokens_BT.contiguous(), history_BS.contiguous(),
        first_B.contiguous(), begins_BT.contiguous(), window, longest, predicted_BT, length_BT,
    )  # fmt: skip
    return predicted_BT, length_BT
