"""What a token does for the predictions after it: each is taken out of the text in turn, and the text is read again."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

FEWEST_RANKED = 3  # tokens below which a rank correlation says nothing
MOST_LOGITS = 2**24  # of one forward pass


@dataclass(frozen=True)
class Removal:
    """Effects of removing tokens, in nats; [t, s] is the effect of removing token s <= t on the prediction after t.

    loss_change_TS: increase of -ln p of the token that follows; nan after the last token.
    divergence_TS: Kullback-Leibler divergence sum_w p(w) ln(p(w) / q(w)) of the predictions with (p) and without (q)
        the token.
    Both are nan for the start token, which is not removed, and for tokens after t, which are not read.
    """

    loss_change_TS: NDArray[np.float64]
    divergence_TS: NDArray[np.float64]


def next_token_log_probabilities(
    model: PreTrainedModel, ids_BT: Tensor, kept: int = 0, positions_BT: Tensor | None = None
) -> Tensor:
    """(B, T, V) float64, or the last `kept` of T; `positions_BT` are given to models that take positions."""
    arguments: dict[str, Any] = {"input_ids": ids_BT, "use_cache": False, "logits_to_keep": kept}
    if positions_BT is not None and "position_ids" in inspect.signature(model.forward).parameters:
        # Without a mask transformers would take a gap in the positions for the start of another text.
        arguments |= {"position_ids": positions_BT, "attention_mask": torch.ones_like(ids_BT)}
    with torch.inference_mode():
        logits: Tensor = model(**arguments).logits
    return logits.double().log_softmax(dim=-1)


def measure_removal(
    model: PreTrainedModel, ids_T: Tensor, *, batch_size: int = 16, progress: Callable[[int], None] = lambda done: None
) -> Removal:
    """Remove each token but the first and read the text again.

    The other tokens keep their positions if the model has positions; otherwise the removal of an early token would
    mostly measure the shift of all others. Windows reach one token further back across the gap. The prediction after
    the removed token s is the prediction of the token before it. `progress` is called with the number of tokens done.

    Cost: T - 1 forward passes over T - 1 tokens.
    """
    num_tokens, place_T = len(ids_T), torch.arange(len(ids_T), device=ids_T.device)
    whole_TV = next_token_log_probabilities(model, ids_T[None])[0]
    batch_size = max(1, min(batch_size, MOST_LOGITS // whole_TV.numel()))
    loss_change_TS, divergence_TS = (np.full((num_tokens, num_tokens), np.nan) for _ in range(2))
    for first in range(1, num_tokens, batch_size):
        removed = range(first, min(first + batch_size, num_tokens))
        left_BK = torch.stack([place_T[place_T != place] for place in removed])
        # Before the first of them nothing has changed.
        without_BKV = next_token_log_probabilities(model, ids_T[left_BK], num_tokens - first, left_BK)
        for place, all_KV in zip(removed, without_BKV, strict=True):
            with_KV, without_KV = whole_TV[place:], all_KV[place - first :]
            divergence_TS[place:, place] = (with_KV.exp() * (with_KV - without_KV)).sum(dim=-1).cpu()
            following_K1 = ids_T[place + 1 :, None]
            change_K1 = (with_KV[:-1] - without_KV[:-1]).gather(1, following_K1)
            loss_change_TS[place:-1, place] = change_K1[:, 0].cpu()
        progress(removed[-1])
    return Removal(loss_change_TS, divergence_TS)


@dataclass(frozen=True)
class Agreement:
    """Whether tokens with larger weights are tokens whose removal changes more.

    correlation: mean over positions of Spearman's rank correlation between the weights of the tokens that the position
        reads and the divergences that their removal causes there; None if no position reads enough tokens.
    nearness: the same for the nearness of the tokens instead of their weights.
    positions: number of positions in the mean.
    """

    correlation: float | None
    nearness: float | None
    positions: int


def agreement(weights_TS: NDArray[np.float64], removal: Removal, nearest: int, farthest: int | None) -> Agreement:
    """Compare the size of weights with the effects of removing tokens.

    The start token, which is never removed, and each position's own token, which reaches the prediction without being
    read, are left out. `nearest` and `farthest` are the smallest and the largest distance that is read.
    """
    correlations, by_nearness = [], []
    for place in range(len(weights_TS)):
        first = max(1, 0 if farthest is None else place - farthest)
        last = place - max(nearest, 1)
        if last - first + 1 < FEWEST_RANKED:
            continue
        effect_S = removal.divergence_TS[place, first : last + 1]
        correlation = rank_correlation(np.abs(weights_TS[place, first : last + 1]), effect_S)
        if correlation is not None:
            correlations.append(correlation)
            by_nearness.append(rank_correlation(np.arange(last - first + 1), effect_S) or 0.0)
    if not correlations:
        return Agreement(None, None, 0)
    return Agreement(float(np.mean(correlations)), float(np.mean(by_nearness)), len(correlations))


def rank_correlation(left: NDArray[np.generic], right: NDArray[np.generic]) -> float | None:
    """Spearman's rank correlation, with mean ranks for ties; None if all values of one side are equal."""
    ranks = np.stack([_ranks(left), _ranks(right)])
    return None if 0 in np.ptp(ranks, axis=1) else float(np.asarray(np.corrcoef(ranks))[0, 1])


def _ranks(values: NDArray[np.generic]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks
