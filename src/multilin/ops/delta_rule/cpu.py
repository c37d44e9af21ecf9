"""As `elementwise`, compiled for a CPU: one pass over each matrix instead of ten; the kernels are in `cpu_kernels`."""

from typing import Any

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule, operator

_kernels, _launch = LazyModule("multilin.ops.delta_rule.cpu_kernels"), LazyModule("multilin.ops.kernels.cpu_launch")


def weigh(scores: Tensor, overlaps: Tensor | None, logs_nC: Tensor, rates_nC: Tensor | None) -> tuple[Any, ...]:
    """See `elementwise.weigh`."""
    if overlaps is None or rates_nC is None:
        return *_weigh(scores, scores[:0], logs_nC, scores[:0, 0])[:2], None, None
    return _weigh(scores, overlaps, logs_nC, rates_nC)


def unweigh(
    dscores: Tensor, dsystem: Tensor | None, pairs: Tensor, scores: Tensor, overlaps: Tensor | None,
    rates_nC: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """See `elementwise.unweigh`."""
    if dsystem is None or overlaps is None or rates_nC is None:
        dscores, _, _, dlogs = _unweigh(dscores, dscores[:0], pairs, scores, scores[:0], scores[:0, 0])
        return dscores, None, None, dlogs
    return _unweigh(dscores, dsystem, pairs, scores, overlaps, rates_nC)


def rescale(
    dq: Tensor, dk: Tensor, dread: Tensor | None, dknown: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    from_start_nC: Tensor, to_end_nC: Tensor, rates_nC: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """See `elementwise.rescale`."""
    if dread is None or dknown is None or rates_nC is None:
        dq, dk, _, dots = _rescale(dq, dk, dk[:0], v[:0], q, k, v, from_start_nC, to_end_nC, from_start_nC[:0])
        return dq, dk, None, dots
    return _rescale(dq, dk, dread, dknown, q, k, v, from_start_nC, to_end_nC, rates_nC)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_weigh(scores: Tensor, overlaps: Tensor, logs: Tensor, rates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_like(scores), _empty_like(scores), _empty_like(overlaps), _empty_like(overlaps)


@operator("delta_rule_weigh", _fake_weigh)
def _weigh(scores: Tensor, overlaps: Tensor, logs: Tensor, rates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results, high = _fake_weigh(scores, overlaps, logs, rates), logs.float()
    low = (logs - high).float()
    _launch.launch_parts(_kernels.weigh, scores.numel(), high, low, rates, scores, overlaps, *results)
    return results


def _fake_unweigh(
    dscores: Tensor, dsystem: Tensor, pairs: Tensor, scores: Tensor, overlaps: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_like(dscores), _empty_like(dsystem), _empty_like(rates), _empty_like(scores[:, 0])


@operator("delta_rule_unweigh", _fake_unweigh)
def _unweigh(
    dscores: Tensor, dsystem: Tensor, pairs: Tensor, scores: Tensor, overlaps: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = (dscores, dsystem, pairs, scores, overlaps, rates)
    results = _fake_unweigh(*given)
    _launch.launch_parts(_kernels.unweigh, scores.numel(), *given, *results)
    return results


def _fake_rescale(
    dq: Tensor, dk: Tensor, dread: Tensor, dknown: Tensor, q: Tensor, k: Tensor, v: Tensor, from_start: Tensor,
    to_end: Tensor, rates: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dots = torch.empty(4, *from_start.shape, dtype=dq.dtype, device=dq.device)
    return _empty_like(dq), _empty_like(dk), _empty_like(dknown), dots


@operator("delta_rule_rescale", _fake_rescale)
def _rescale(
    dq: Tensor, dk: Tensor, dread: Tensor, dknown: Tensor, q: Tensor, k: Tensor, v: Tensor, from_start: Tensor,
    to_end: Tensor, rates: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows, factors = (dq, dk, dread, dknown, q, k, v), [x.flatten() for x in (from_start, to_end, rates)]
    results = _fake_rescale(*rows, from_start, to_end, rates)
    _launch.launch_parts(_kernels.rescale, q.numel(), *rows, *factors, *results[:3], results[3].flatten(1))
    return results
