"""The running softmax mean in linear time by PyTorch operations: on any device, for autograd, compile and export.

One summary token (log of the total weight, mean) replaces each chunk of tokens. The past of a chunk is then a prefix
softmax over the summaries of the earlier chunks: the same problem, CHUNK times shorter. A window of k tokens is the
beginning of one block of k tokens and the end of the block before (van Herk, Gil-Werman), so two such scans suffice for
any k. Means are only merged, with weights in [0, 1]; nothing is subtracted.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from multilin.ops.prefix_softmax import reference
from multilin.ops.prefix_softmax.reference import PrefixSoftmaxState, last_tokens, read_state_first
from multilin.ops.ring import Ring
from multilin.ops.softmax import softmax

CHUNK = 32  # tokens of a chunk, in which all pairs are compared; the fastest of 16 to 64 on CPUs
SHORT = 16  # up to this number of tokens the reference is faster


def prefix_softmax(
    logits_BTH: Tensor, values_BTHD: Tensor, *, window: int | None = None, own_logits: Tensor | None = None,
    null_logit: float | None = None, state: PrefixSoftmaxState | None = None, starts: Tensor | None = None,
    needs_state: bool = True,
) -> tuple[Tensor, PrefixSoftmaxState | None]:  # fmt: skip
    """See `multilin.ops.prefix_softmax`."""
    values_BTHD, num_new = values_BTHD.to(logits_BTH.dtype), logits_BTH.shape[1]
    if window is None:
        totals_BTH, means_BTHD = _read_all(logits_BTH, values_BTHD, state, starts)
    elif num_new <= SHORT:
        return reference.prefix_softmax(
            logits_BTH, values_BTHD, window=window, own_logits=own_logits, null_logit=null_logit, state=state,
            starts=starts, needs_state=needs_state,
        )  # fmt: skip
    else:
        tokens = read_state_first(logits_BTH, values_BTHD, state, starts)
        is_cut = window < tokens[0].shape[1]
        totals_BTH, means_BTHD = _scan_window(*tokens, window) if is_cut else _scan(*tokens)
    if not needs_state:
        state = None
    elif window is None:
        state = PrefixSoftmaxState(totals_BTH[:, -1:].double(), means_BTHD[:, -1:])
    else:
        state = last_tokens(*tokens, window - 1)
    totals_BTH, means_BTHD = totals_BTH[:, -num_new:], means_BTHD[:, -num_new:]
    if own_logits is not None:
        totals_BTH, means_BTHD = _merge(totals_BTH, means_BTHD, own_logits, values_BTHD)
    elif null_logit is not None:
        means_BTHD = means_BTHD * torch.sigmoid(totals_BTH - null_logit)[..., None].to(means_BTHD.dtype)
    return means_BTHD, state


def _read_all(
    logits_BTH: Tensor, values_BTHD: Tensor, state: PrefixSoftmaxState | None, starts_BT: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Like `_scan`, but also over the state's summary token."""
    if state is None:
        return _scan(logits_BTH, values_BTHD, starts_BT)
    past_B1H, past_B1HD = state.logits_BSH, state.values_BSHD.to(values_BTHD.dtype)
    if starts_BT is None and logits_BTH.shape[1] == 1:
        return _merge(past_B1H, past_B1HD, logits_BTH, values_BTHD)
    if starts_BT is not None:
        past_B1H = past_B1H.masked_fill((starts_BT.cumsum(dim=1) > 0)[..., None], -torch.inf)
    return _merge(*_scan(logits_BTH, values_BTHD, starts_BT), past_B1H, past_B1HD)


def from_ring(logits_BTH: Tensor, values_BTHD: Tensor, ring: Ring, *, window: int, null_logit: float | None) -> Tensor:
    """The means at a few new tokens, which read a ring; in each row, padding may only come last."""
    kept_logits, kept_values = (x.to(logits_BTH.dtype) for x in ring.tokens)
    num_new = logits_BTH.shape[1]
    scores_BHTS = kept_logits.transpose(1, 2)[:, :, None]
    scores_BHTT = logits_BTH.transpose(1, 2)[:, :, None]
    if num_new > 1 or ring.num_kept >= window:  # otherwise the next token reads all kept tokens
        index_T = torch.arange(num_new, device=logits_BTH.device)
        distance_TT = index_T[:, None] - index_T
        is_hidden_TT = (distance_TT < 0) | (distance_TT >= window)
        scores_BHTS = scores_BHTS.masked_fill((ring.distances(num_new) >= window)[:, None], -torch.inf)
        scores_BHTT = scores_BHTT.masked_fill(is_hidden_TT, -torch.inf)
    weights = softmax(torch.cat([scores_BHTS, scores_BHTT], dim=-1), null_logit)
    values_BHTD = values_BTHD.to(logits_BTH.dtype).transpose(1, 2)
    means_BHTD = weights[..., :-num_new] @ kept_values.transpose(1, 2) + weights[..., -num_new:] @ values_BHTD
    return means_BHTD.transpose(1, 2)


def _scan(logits_BTH: Tensor, values_BTHD: Tensor, starts_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """For each position, the log of the total weight and the mean of all tokens of its text up to this position."""
    num_batch, num_time = logits_BTH.shape[:2]
    if num_time <= CHUNK:
        return _scan_chunk(logits_BTH, values_BTHD, starts_BT)
    logits_NKH, values_NKHD, starts_NK = _blocks(logits_BTH, values_BTHD, starts_BT, CHUNK)
    chunks = _scan_chunk(logits_NKH, values_NKHD, starts_NK)
    totals_BNKH, means_BNKHD = (x.unflatten(0, (num_batch, -1)) for x in chunks)
    starts_BNK = None if starts_NK is None else starts_NK.unflatten(0, (num_batch, -1))

    past_BNH, past_BNHD = _scan(
        totals_BNKH[:, :, -1], means_BNKHD[:, :, -1], None if starts_BNK is None else starts_BNK.any(dim=2)
    )
    past_BNKH = pad(past_BNH[:, :-1], (0, 0, 1, 0), value=-torch.inf)[:, :, None]
    past_BNKHD = pad(past_BNHD[:, :-1], (0, 0, 0, 0, 1, 0))[:, :, None]
    if starts_BNK is not None:
        past_BNKH = past_BNKH.masked_fill((starts_BNK.cumsum(dim=2) > 0)[..., None], -torch.inf)
    totals_BNKH, means_BNKHD = _merge(totals_BNKH, means_BNKHD, past_BNKH, past_BNKHD)
    return totals_BNKH.flatten(1, 2)[:, :num_time], means_BNKHD.flatten(1, 2)[:, :num_time]


def _scan_chunk(logits_BKH: Tensor, values_BKHD: Tensor, starts_BK: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the same as `_scan`, by comparing all pairs of positions."""
    scores_BHKK = reference.visible_scores(logits_BKH, starts_BK, None, logits_BKH.shape[1])
    top_BHK1 = scores_BHKK.detach().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores_BHKK.dtype).min)
    weights_BHKK = torch.exp(scores_BHKK - top_BHK1)
    total_BHK1 = weights_BHKK.sum(dim=-1, keepdim=True)
    is_empty_BHK1 = total_BHK1 == 0
    divisor_BHK1 = total_BHK1.masked_fill(is_empty_BHK1, 1.0)  # without zeros, so that gradients stay finite
    log_total_BHK1 = (divisor_BHK1.log() + top_BHK1).masked_fill(is_empty_BHK1, -torch.inf)
    return log_total_BHK1.squeeze(-1).transpose(1, 2), reference.weighted_sum(weights_BHKK / divisor_BHK1, values_BKHD)


def _scan_window(
    logits_BTH: Tensor, values_BTHD: Tensor, starts_BT: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    """For each position, the log of the total weight and the mean of the last `window` tokens of its text."""
    num_batch, num_time = logits_BTH.shape[:2]
    logits_NKH, values_NKHD, starts_NK = _blocks(logits_BTH, values_BTHD, starts_BT, window)
    own = _scan(logits_NKH, values_NKHD, starts_NK)
    if starts_NK is not None:  # the next block reads only the text with which this block ends
        text_NK = starts_NK.cumsum(dim=1)
        logits_NKH = logits_NKH.masked_fill((text_NK != text_NK[:, -1:])[..., None], -torch.inf)
    suffixes = (x.flip(1) for x in _scan(logits_NKH.flip(1), values_NKHD.flip(1), None))
    totals_BNKH, means_BNKHD, suffix_BNKH, suffix_BNKHD = (x.unflatten(0, (num_batch, -1)) for x in (*own, *suffixes))

    # A position at offset r of its block also reads the block before, from offset r + 1 on; its last position does not.
    before_BNKH = pad(suffix_BNKH[:, :-1, 1:], (0, 0, 0, 1, 1, 0), value=-torch.inf)
    before_BNKHD = pad(suffix_BNKHD[:, :-1, 1:], (0, 0, 0, 0, 0, 1, 1, 0))
    if starts_NK is not None:
        is_after_start_BNK = starts_NK.unflatten(0, (num_batch, -1)).cumsum(dim=2) > 0
        before_BNKH = before_BNKH.masked_fill(is_after_start_BNK[..., None], -torch.inf)
    totals_BNKH, means_BNKHD = _merge(totals_BNKH, means_BNKHD, before_BNKH, before_BNKHD)
    return totals_BNKH.flatten(1, 2)[:, :num_time], means_BNKHD.flatten(1, 2)[:, :num_time]


def _merge(logits_a: Tensor, values_a: Tensor, logits_b: Tensor, values_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two tokens: the log of their total weight, and their mean; the first value if both logits are -inf."""
    difference = logits_b - logits_a.clamp(min=torch.finfo(logits_a.dtype).min)  # clamped: -inf - -inf would be nan
    difference = difference.to(values_a.dtype)
    log_total = torch.maximum(logits_a, logits_b) + softplus(-difference.abs())
    share = difference[..., None]
    return log_total, values_a * torch.sigmoid(-share) + values_b * torch.sigmoid(share)


def _blocks(
    logits_BTH: Tensor, values_BTHD: Tensor, starts_BT: Tensor | None, length: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cut texts into blocks of this length, (B * blocks, length, ...); tokens without weight fill the last block."""
    extra = -logits_BTH.shape[1] % length
    logits, values = pad(logits_BTH, (0, 0, 0, extra), value=-torch.inf), pad(values_BTHD, (0, 0, 0, 0, 0, extra))
    starts = None if starts_BT is None else pad(starts_BT, (0, extra)).reshape(-1, length)
    return logits.reshape(-1, length, logits.shape[2]), values.reshape(-1, length, *values.shape[2:]), starts
