"""The recurrence of minGRU in PyTorch operations, in chunks: for any device, autograd, torch.compile and export.

Within a chunk, h is the h that starts from 0, plus (product of all 1 - z so far) * (h before the chunk). Chunks are
computed in parallel. The h before each chunk follow the same recurrence, CHUNK times shorter. The factors are exp of
sums of log(1 - z), because rounding 1 - z loses digits of a small z, with the same error at every token with the same
gate. Factors lie in [0, 1], and nothing is divided or subtracted.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from multilin.ops.linear_recurrence.reference import make_positive

CHUNK = 32


def linear_recurrence(inputs_BT2D: Tensor, before_BD: Tensor, starts_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `multilin.ops.linear_recurrence`."""
    gates_BTD, candidates_BTD = inputs_BT2D.to(before_BD.dtype).unbind(2)
    logs_BTD = -softplus(gates_BTD)
    if starts_BT is not None:
        logs_BTD = logs_BTD.masked_fill(starts_BT[..., None], float("-inf"))
    products_BTD, hidden_BTD = _scan(logs_BTD, torch.sigmoid(gates_BTD) * make_positive(candidates_BTD))
    hidden_BTD = torch.addcmul(hidden_BTD, products_BTD, before_BD[:, None])
    return hidden_BTD.to(inputs_BT2D.dtype), hidden_BTD[:, -1]


def _scan(logs_BTD: Tensor, terms_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp of the sum of the logs up to each position, and h_t = exp(log_t) h_(t-1) + term_t from h = 0."""
    num_time = logs_BTD.shape[1]
    if num_time <= CHUNK:
        return _walk(logs_BTD.exp(), terms_BTD)
    fill = (0, 0, 0, -num_time % CHUNK)
    logs_BNKD, terms_BNKD = (pad(x, fill).unflatten(1, (-1, CHUNK)) for x in (logs_BTD, terms_BTD))
    products_BNKD, hidden_BNKD = _walk(logs_BNKD.exp(), terms_BNKD)
    past_products_BND, past_BND = _scan(logs_BNKD.sum(2), hidden_BNKD[:, :, -1])
    past_BN1D = pad(past_BND[:, :-1], (0, 0, 1, 0))[:, :, None]
    past_products_BN1D = pad(past_products_BND[:, :-1], (0, 0, 1, 0), value=1.0)[:, :, None]
    hidden_BNKD = torch.addcmul(hidden_BNKD, products_BNKD, past_BN1D)
    return (products_BNKD * past_products_BN1D).flatten(1, 2)[:, :num_time], hidden_BNKD.flatten(1, 2)[:, :num_time]


def _walk(factors: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
    """Like `_scan`, but with factors instead of logs, position by position along the second-last axis."""
    steps = zip(factors.unbind(-2), terms.unbind(-2), strict=True)
    products, hidden = ([x] for x in next(steps))
    for factor, term in steps:
        products.append(factor * products[-1])
        hidden.append(torch.addcmul(term, factor, hidden[-1]))
    return torch.stack(products, dim=-2), torch.stack(hidden, dim=-2)
