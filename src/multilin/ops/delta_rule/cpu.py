"""The steps of `elementwise` by CPU kernels, in place and in one pass over memory."""

import torch
from torch import Tensor

from multilin.ops.kernels import LazyModule, operator

_kernels, _launch = LazyModule("multilin.ops.delta_rule.cpu_kernels"), LazyModule("multilin.ops.kernels.cpu_launch")


def weigh(scores: Tensor, overlaps: Tensor | None, logs: Tensor, rates: Tensor | None) -> tuple[None, Tensor | None]:
    """See `elementwise.weigh`."""
    if overlaps is None or rates is None:
        _weigh(scores, _none_of(scores), *_split(logs), _none_of(scores[:, 0]))
        return None, None
    return None, _weigh(scores, overlaps, *_split(logs), rates)


def unweigh(
    dscores: Tensor, dsystem: Tensor | None, scores: Tensor, overlaps: Tensor | None, decays: None, logs: Tensor,
    rates: Tensor | None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """See `elementwise.unweigh`."""
    if dsystem is None or overlaps is None or rates is None:
        none = _none_of(scores)
        return None, _unweigh(dscores, none, scores, none.clone(), *_split(logs), _none_of(scores[:, 0]))[1]
    drates, dlogs = _unweigh(dscores, dsystem, scores, overlaps, *_split(logs), rates)
    return drates, dlogs


def rescale(
    dq: Tensor, dk: Tensor, dknown: Tensor | None, dread: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    from_start: Tensor, to_end: Tensor, rates: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `elementwise.rescale`."""
    if dread is None or dknown is None or rates is None:
        dknown, dread, rates = map(_none_of, (v, k, from_start))
    return _rescale(dq, dk, dknown, dread, q, k, v, from_start, to_end, rates)


def _split(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Two float32 tensors whose sum is the float64 tensor to about 48 bits."""
    high = logs.float()
    return high, (logs - high).float()


def _none_of(x: Tensor) -> Tensor:
    return x.new_empty(0, *x.shape[1:])


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator("delta_rule_weigh", lambda scores, overlaps, *_: _empty_like(overlaps), changed=("scores", "overlaps"))
def _weigh(scores: Tensor, overlaps: Tensor, high: Tensor, low: Tensor, rates: Tensor) -> Tensor:
    system, given = _empty_like(overlaps), (high, low, rates, _empty_like(high), scores, overlaps)
    _launch.launch_parts(_kernels.weigh, scores.numel(), *given, system)
    return system


@operator(
    "delta_rule_unweigh",
    lambda dscores, dsystem, scores, overlaps, high, low, rates: (_empty_like(rates), _empty_like(high)),
    changed=("dscores", "dsystem"),
)
def _unweigh(
    dscores: Tensor, dsystem: Tensor, scores: Tensor, overlaps: Tensor, high: Tensor, low: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor]:
    results, given = (_empty_like(rates), _empty_like(high)), (high, low, rates, _empty_like(high))
    _launch.launch_parts(_kernels.unweigh, scores.numel(), *given, dscores, dsystem, scores, overlaps, *results)
    return results


@operator(
    "delta_rule_rescale",
    lambda dq, dk, dknown, dread, q, k, v, from_start, *_: q.new_empty(4, *from_start.shape),
    changed=("dq", "dk", "dknown"),
)
def _rescale(
    dq: Tensor, dk: Tensor, dknown: Tensor, dread: Tensor, q: Tensor, k: Tensor, v: Tensor, from_start: Tensor,
    to_end: Tensor, rates: Tensor,
) -> Tensor:  # fmt: skip
    dots = torch.empty(4, *from_start.shape, dtype=torch.float32)
    factors = [x.flatten() for x in (from_start, to_end, rates)]
    _launch.launch_parts(_kernels.rescale, q.numel(), *factors, dq, dk, dknown, dread, q, k, v, dots.flatten(1))
    return dots
