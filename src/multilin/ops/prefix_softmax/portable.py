"""The running softmax mean in linear time from PyTorch operations alone: on any device, for autograd, compile, export.

A chunk of tokens is summed up by one token (log of the total weight, mean), so the past of a chunk is a prefix softmax
over the chunks' summaries: the same problem, a chunk length smaller. A window of k tokens is the union of a prefix of
its own block of k and a suffix of the block before (van Herk, Gil-Werman), so it costs two such scans whatever k is.
Means are only ever merged with weights in [0, 1]; nothing is subtracted.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from multilin.ops.prefix_softmax import reference
from multilin.ops.prefix_softmax.state import PrefixSoftmaxState, last_tokens, read_state_first

CHUNK = 32  # tokens that are compared pair by pair; measured best from 16 to 64 on CPUs
SHORT = 16  # up to here the definition itself is faster


def prefix_softmax(
    logits_BTH: Tensor,
    values_BTHD: Tensor,
    *,
    window: int | None = None,
    own_logits: Tensor | None = None,
    null_logit: float | None = None,
    state: PrefixSoftmaxState | None = None,
    starts: Tensor | None = None,
    needs_state: bool = True,
) -> tuple[Tensor, PrefixSoftmaxState | None]:
    """See `multilin.ops.prefix_softmax`."""
    num_new = logits_BTH.shape[1]
    if num_new == 1 and window is None and state is not None and starts is None:
        return _read_one(logits_BTH, values_BTHD, own_logits, null_logit, state)
    if num_new <= SHORT:
        return reference.prefix_softmax(
            logits_BTH, values_BTHD, window=window, own_logits=own_logits, null_logit=null_logit, state=state,
            starts=starts, needs_state=needs_state,
        )  # fmt: skip
    logits_BSH, values_BSHD, starts_BS = read_state_first(logits_BTH, values_BTHD, state, starts)
    if window is None or window >= logits_BSH.shape[1]:
        totals_BSH, means_BSHD = _scan(logits_BSH, values_BSHD, starts_BS)
    else:
        totals_BSH, means_BSHD = _scan_window(logits_BSH, values_BSHD, starts_BS, window)

    if not needs_state:
        state = None
    elif window is None:
        state = PrefixSoftmaxState(totals_BSH[:, -1:], means_BSHD[:, -1:])
    else:
        state = last_tokens(logits_BSH, values_BSHD, starts_BS, window - 1)
    totals_BTH, means_BTHD = totals_BSH[:, -num_new:], means_BSHD[:, -num_new:]
    if own_logits is not None:
        totals_BTH, means_BTHD = _merge(totals_BTH, means_BTHD, own_logits, values_BTHD)
    elif null_logit is not None:
        means_BTHD = means_BTHD * torch.sigmoid(totals_BTH - null_logit)[..., None]
    return means_BTHD, state


def _read_one(
    logits_B1H: Tensor, values_B1HD: Tensor, own_logits_B1H: Tensor | None, null_logit: float | None,
    state: PrefixSoftmaxState,
) -> tuple[Tensor, PrefixSoftmaxState]:  # fmt: skip
    """One token after the summary of all before it."""
    past_B1H, values_B1HD = state.logits_BSH.to(logits_B1H.dtype), values_B1HD.to(logits_B1H.dtype)
    means = _mix(state.values_BSHD.to(logits_B1H.dtype), values_B1HD, past_B1H, logits_B1H)
    total_B1H = torch.logsumexp(torch.stack([past_B1H, logits_B1H]), dim=0)
    after = PrefixSoftmaxState(total_B1H, means)
    if own_logits_B1H is not None:
        means = _mix(means, values_B1HD, total_B1H, own_logits_B1H)
    elif null_logit is not None:
        means = means * torch.sigmoid(total_B1H - null_logit)[..., None]
    return means, after


def _mix(first: Tensor, second: Tensor, first_logit: Tensor, second_logit: Tensor) -> Tensor:
    """The mean of two values; the first where both logits are -inf, as there is a difference only of finite ones."""
    difference = (second_logit - first_logit.clamp(min=torch.finfo(first.dtype).min))[..., None]
    return first * torch.sigmoid(-difference) + second * torch.sigmoid(difference)


def _scan(logits_BTH: Tensor, values_BTHD: Tensor, starts_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log of the total weight and mean over all tokens of the same text up to each position."""
    num_batch, num_time = logits_BTH.shape[:2]
    if num_time <= CHUNK:
        return _scan_chunk(logits_BTH, values_BTHD, starts_BT)
    logits_BTH, values_BTHD, starts_BT = _fill_up(logits_BTH, values_BTHD, starts_BT, CHUNK)
    split, join = (num_batch, -1, CHUNK), (num_batch, -1)
    starts_BNK = None if starts_BT is None else starts_BT.unflatten(1, (-1, CHUNK))
    totals, means = _scan_chunk(
        logits_BTH.unflatten(1, (-1, CHUNK)).flatten(0, 1),
        values_BTHD.unflatten(1, (-1, CHUNK)).flatten(0, 1),
        None if starts_BNK is None else starts_BNK.flatten(0, 1),
    )
    totals_BNKH, means_BNKHD = totals.reshape(*split, *totals.shape[2:]), means.reshape(*split, *means.shape[2:])

    past_BNH, past_BNHD = _scan(
        totals_BNKH[:, :, -1], means_BNKHD[:, :, -1], None if starts_BNK is None else starts_BNK.any(dim=2)
    )
    past_BNKH = pad(past_BNH[:, :-1], (0, 0, 1, 0), value=-torch.inf)[:, :, None]
    past_BNKHD = pad(past_BNHD[:, :-1], (0, 0, 0, 0, 1, 0))[:, :, None]
    if starts_BNK is not None:
        past_BNKH = past_BNKH.masked_fill((starts_BNK.cumsum(dim=2) > 0)[..., None], -torch.inf)
    totals_BNKH, means_BNKHD = _merge(totals_BNKH, means_BNKHD, past_BNKH, past_BNKHD)
    totals_BTH, means_BTHD = totals_BNKH.reshape(*join, totals.shape[-1]), means_BNKHD.reshape(*join, *means.shape[2:])
    return totals_BTH[:, :num_time], means_BTHD[:, :num_time]


def _scan_chunk(logits_BKH: Tensor, values_BKHD: Tensor, starts_BK: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `_scan`, comparing all pairs of positions."""
    num_time = logits_BKH.shape[1]
    hidden_KK = torch.ones(num_time, num_time, dtype=torch.bool, device=logits_BKH.device).triu(1)[None, None]
    if starts_BK is not None:
        text_BK = starts_BK.cumsum(dim=1)
        hidden_KK = hidden_KK | (text_BK[:, :, None] != text_BK[:, None, :])[:, None]
    scores_BHKK = logits_BKH.transpose(1, 2)[:, :, None, :].masked_fill(hidden_KK, -torch.inf)
    top_BHK1 = _finite(scores_BHKK.detach().amax(dim=-1, keepdim=True))
    weights_BHKK = torch.exp(scores_BHKK - top_BHK1)
    total_BHK1 = weights_BHKK.sum(dim=-1, keepdim=True)
    log_total_BHK1, divisor_BHK1 = _log_total(total_BHK1, top_BHK1)
    means_BHKD = (weights_BHKK / divisor_BHK1) @ values_BKHD.transpose(1, 2)
    return log_total_BHK1.squeeze(-1).transpose(1, 2), means_BHKD.transpose(1, 2)


def _scan_window(
    logits_BTH: Tensor, values_BTHD: Tensor, starts_BT: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    """Log of the total weight and mean over the last `window` tokens of the same text, the current one included."""
    num_batch, num_time = logits_BTH.shape[:2]
    logits_BTH, values_BTHD, starts_BT = _fill_up(logits_BTH, values_BTHD, starts_BT, window)
    logits_NKH = logits_BTH.unflatten(1, (-1, window)).flatten(0, 1)
    values_NKHD = values_BTHD.unflatten(1, (-1, window)).flatten(0, 1)
    starts_NK = None if starts_BT is None else starts_BT.unflatten(1, (-1, window)).flatten(0, 1)
    own_totals, own_means = _scan(logits_NKH, values_NKHD, starts_NK)
    suffix_totals, suffix_means = (x.flip(1) for x in _scan(logits_NKH.flip(1), values_NKHD.flip(1), None))

    # At offset r of a block the window still holds the previous block from offset r + 1 on: offset `window` is empty.
    shape = (num_batch, -1, window)
    before_BNKH = pad(
        suffix_totals.reshape(*shape, *suffix_totals.shape[2:])[:, :-1, 1:], (0, 0, 0, 1), value=-torch.inf
    )
    before_BNKHD = pad(suffix_means.reshape(*shape, *suffix_means.shape[2:])[:, :-1, 1:], (0, 0, 0, 0, 0, 1))
    before_BNKH = pad(before_BNKH, (0, 0, 0, 0, 1, 0), value=-torch.inf)
    before_BNKHD = pad(before_BNKHD, (0, 0, 0, 0, 0, 0, 1, 0))
    if starts_BT is not None:
        before_BNKH, before_BNKHD = _hide_earlier_texts(before_BNKH, before_BNKHD, starts_BT.unflatten(1, (-1, window)))
    totals, means = _merge(
        own_totals.reshape(before_BNKH.shape), own_means.reshape(before_BNKHD.shape), before_BNKH, before_BNKHD
    )
    return totals.flatten(1, 2)[:, :num_time], means.flatten(1, 2)[:, :num_time]


def _hide_earlier_texts(before_BNKH: Tensor, before_BNKHD: Tensor, starts_BNK: Tensor) -> tuple[Tensor, Tensor]:
    """Cut the part of a window that lies in the previous block at the last text start.

    A start in the own block hides it all. A start in the previous block at offset o hides all before o, so the
    suffix from max(r + 1, o) is read instead of the one from r + 1: entry r of `before` holds the one from r + 1.
    """
    window = starts_BNK.shape[2]
    offset_K = torch.arange(window, device=starts_BNK.device)
    last_start_BN = torch.where(starts_BNK, offset_K, 0).amax(dim=2)
    last_start_before_BN = pad(last_start_BN[:, :-1], (1, 0))
    index_BNK = torch.maximum(offset_K, last_start_before_BN[..., None] - 1)
    before_BNKH = before_BNKH.gather(2, index_BNK[..., None].expand_as(before_BNKH))
    before_BNKHD = before_BNKHD.gather(2, index_BNK[..., None, None].expand_as(before_BNKHD))
    return before_BNKH.masked_fill((starts_BNK.cumsum(dim=2) > 0)[..., None], -torch.inf), before_BNKHD


def _merge(logits_a: Tensor, values_a: Tensor, logits_b: Tensor, values_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two tokens as one: the log of their weight together, and their mean; empty stays empty."""
    top = _finite(torch.maximum(logits_a.detach(), logits_b.detach()))
    weight_a, weight_b = torch.exp(logits_a - top), torch.exp(logits_b - top)
    log_total, divisor = _log_total(weight_a + weight_b, top)
    return log_total, (weight_a / divisor)[..., None] * values_a + (weight_b / divisor)[..., None] * values_b


def _log_total(total: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """log(total) + top, -inf where nothing was summed, and a divisor without zeros; gradients stay finite."""
    empty = total == 0
    divisor = total.masked_fill(empty, 1.0)
    return (divisor.log() + top).masked_fill(empty, -torch.inf), divisor


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -torch.inf, 0.0)


def _fill_up(
    logits_BTH: Tensor, values_BTHD: Tensor, starts_BT: Tensor | None, multiple: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Append tokens without weight up to a multiple of a block length."""
    extra = -logits_BTH.shape[1] % multiple
    return (
        pad(logits_BTH, (0, 0, 0, extra), value=-torch.inf),
        pad(values_BTHD, (0, 0, 0, 0, 0, extra)),
        None if starts_BT is None else pad(starts_BT, (0, extra)),
    )
