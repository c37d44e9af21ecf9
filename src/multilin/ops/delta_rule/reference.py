"""The gated delta rule, computed straight from its equation, token by token."""

import torch
from torch import Tensor


def delta_rule(
    queries_BTHD: Tensor, keys_BTHD: Tensor, values_BTHE: Tensor, log_decays_BTH: Tensor | None,
    rates_BTH: Tensor | None, memory_BHDE: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `multilin.ops.delta_rule`; the arguments include padding and starts. Return results and the last memory."""
    results = []
    for t in range(queries_BTHD.shape[1]):
        queries_BHD, keys_BHD, written_BHE = queries_BTHD[:, t], keys_BTHD[:, t], values_BTHE[:, t]
        if log_decays_BTH is not None:
            memory_BHDE = memory_BHDE * log_decays_BTH[:, t, :, None, None].exp()
        if rates_BTH is not None:
            found_BHE = (keys_BHD[..., None, :] @ memory_BHDE)[..., 0, :]
            written_BHE = rates_BTH[:, t, :, None] * (written_BHE - found_BHE)
        memory_BHDE = memory_BHDE + keys_BHD[..., None] * written_BHE[..., None, :]
        results.append((queries_BHD[..., None, :] @ memory_BHDE)[..., 0, :])
    return torch.stack(results, dim=1) if results else values_BTHE, memory_BHDE
