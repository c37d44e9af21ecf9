"""What the delta rule does to numbers one by one, from PyTorch operations, for n chunks of C tokens."""

from typing import Any

import torch
from torch import Tensor


def weigh(scores: Tensor, overlaps: Tensor | None, logs_nC: Tensor, rates_nC: Tensor | None) -> tuple[Any, ...]:
    """P_ts = 2^(G_t - G_s) for s <= t, else 0; scores and overlaps times P; and b overlaps P: (n, C, C) each.

    Args:
        scores, overlaps: (n, C, C) Q K^T and K K^T; both are overwritten.
        logs_nC: G to the base 2, in float64, as one large log would cost the others their digits.
        rates_nC: b; None, also of the last two results, where there are no overlaps.
    """
    is_later_CC = torch.ones(*scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
    pairs = (logs_nC[:, :, None] - logs_nC[:, None]).to(scores.dtype).masked_fill_(is_later_CC, -torch.inf).exp2_()
    scores.mul_(pairs)
    if overlaps is None or rates_nC is None:
        return pairs, scores, None, None
    return pairs, scores, overlaps.mul_(pairs), overlaps * rates_nC[..., None]


def unweigh(
    dscores: Tensor, dsystem: Tensor | None, pairs: Tensor, scores: Tensor, overlaps: Tensor | None,
    rates_nC: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of Q K^T, of K K^T as X + X^T, of the rates, and of the logs of decays.

    Args:
        dscores, dsystem: gradients of the weighed scores, and of the system's matrix rates * overlaps, in which only
            numbers below the diagonal count; both are overwritten.
        pairs, scores, overlaps: results of `weigh`.
        rates_nC: b.
    """
    by_pair = dscores * scores
    dscores.mul_(pairs)
    drates = None
    if dsystem is not None and overlaps is not None and rates_nC is not None:
        by_system = dsystem.tril_(-1) * overlaps
        drates = by_system.sum(dim=2)
        by_pair.addcmul_(by_system, rates_nC[..., None])
        dsystem.mul_(pairs * rates_nC[..., None])
        dsystem = dsystem + dsystem.mT
    # The gradient of a pair belongs to all logs between the two. In float64, where parts of pairs on one side cancel.
    dsums_nC = by_pair.sum(dim=2, dtype=torch.float64) - by_pair.sum(dim=1, dtype=torch.float64)
    return dscores, dsystem, drates, dsums_nC.flip(1).cumsum(dim=1).flip(1)


def rescale(
    dq: Tensor, dk: Tensor, dread: Tensor | None, dknown: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    from_start_nC: Tensor, to_end_nC: Tensor, rates_nC: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients through e^G, e^(G_C - G) and b: of q, k and v (None without rates), and products (4, n, C) of tokens.

    Args:
        dq, dk, dread, dknown: (n, C, D or E) gradients of e^G q, e^(G_C - G) k, - b e^G k and b v; overwritten.
        q, k, v: what these are made of; the products are those with q, k, k and v.
        from_start_nC, to_end_nC, rates_nC: e^G, e^(G_C - G) and b.
    """
    dots = [(x * y).sum(dim=2) for x, y in ((dq, q), (dk, k), (dread, k), (dknown, v)) if x is not None]
    dq.mul_(from_start_nC[..., None])
    dk.mul_(to_end_nC[..., None])
    if dread is not None and dknown is not None and rates_nC is not None:
        dk.addcmul_(dread, (from_start_nC * rates_nC)[..., None], value=-1)
        dknown.mul_(rates_nC[..., None])
    return dq, dk, dknown, dots
