"""Element-wise steps of the delta rule in PyTorch, for n chunks of C tokens."""

import torch
from torch import Tensor


def weigh(
    scores: Tensor, overlaps: Tensor | None, logs: Tensor, rates: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Multiply scores and overlaps, in place, by P_ts = 2^(G_t - G_s) for s <= t, else 0.

    Args:
        scores, overlaps: (n, C, C) Q K^T and K K^T; both are changed. In `overlaps`, only numbers below the diagonal
            count.
        logs: (n, C) G to the base 2, in float64, because in float32 one large log would cost the other logs precision.
        rates: (n, C) b; None where there are no overlaps.

    Returns:
        P, or None if `unweigh` computes P again; and b times the changed overlaps.
    """
    is_later_CC = torch.ones(*scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
    decays = (logs[:, :, None] - logs[:, None]).to(scores.dtype).masked_fill_(is_later_CC, -torch.inf).exp2_()
    scores.mul_(decays)
    if overlaps is None or rates is None:
        return decays, None
    return decays, overlaps.mul_(decays) * rates[..., None]


def unweigh(
    dscores: Tensor, dsystem: Tensor | None, scores: Tensor, overlaps: Tensor | None, decays: Tensor, logs: Tensor,
    rates: Tensor | None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Compute the terms that pairs of tokens add to the gradients of b and of the logs of decays.

    Args:
        dscores: gradient of the changed scores, which becomes the gradient of Q K^T.
        dsystem: gradient of b times the changed overlaps, in which only numbers below the diagonal count; it becomes
            X + X^T where X is the gradient of K K^T.
        scores, overlaps, decays: scores and overlaps as `weigh` changed them, and the decays that `weigh` returned.
        logs, rates: as given to `weigh`.
    """
    by_pair, drates = dscores * scores, None
    dscores.mul_(decays)
    if dsystem is not None and overlaps is not None and rates is not None:
        by_system = dsystem.tril_(-1) * overlaps
        drates = by_system.sum(dim=2)
        by_pair.addcmul_(by_system, rates[..., None])
        dsystem.mul_(decays * rates[..., None])
        dsystem.add_(dsystem.mT.clone())
    # A pair's gradient belongs to all logs between its tokens. In float64, because the two sums cancel in part.
    dsums = by_pair.sum(dim=2, dtype=torch.float64) - by_pair.sum(dim=1, dtype=torch.float64)
    return drates, dsums.flip(1).cumsum(dim=1).flip(1)


def rescale(
    dq: Tensor, dk: Tensor, dknown: Tensor | None, dread: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    from_start: Tensor, to_end: Tensor, rates: Tensor | None,
) -> list[Tensor] | Tensor:  # fmt: skip
    """Turn gradients of products with e^G, e^(G_C - G) and b, in place, into gradients of q, k and v.

    Args:
        dq, dk, dknown, dread: (n, C, D or E) gradients of e^G q, e^(G_C - G) k, b v and - b e^G k; the first three
            become gradients of q, k (with the share of `dread`) and v. Without rates, the last two are None.
        q, k, v: the factors of these products.
        from_start, to_end, rates: (n, C) e^G, e^(G_C - G) and b.

    Returns:
        Sums over the width of dq q, dk k, dread k and dknown v, with the gradients from before the change, (n, C) each.
    """
    dots = [(x * y).sum(dim=2) for x, y in ((dq, q), (dk, k), (dread, k), (dknown, v)) if x is not None]
    dq.mul_(from_start[..., None])
    dk.mul_(to_end[..., None])
    if dread is not None and dknown is not None and rates is not None:
        dk.addcmul_(dread, (from_start * rates)[..., None], value=-1)
        dknown.mul_(rates[..., None])
    return dots
