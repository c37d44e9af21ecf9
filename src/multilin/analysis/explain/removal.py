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
    """What leaving out a token changes, in nats; [t, s] is about the prediction after token t without token s <= t.

    loss_change_TS: how much -ln p of the token that really follows rises; nan after the last token, which none follows.
    divergence_TS: sum_w p(w) ln(p(w) / q(w)), p with the token and q without: how much the whole prediction changes.
    Both are nan for the start token, which stays, and for tokens after t, which are not read.
    """

    loss_change_TS: NDArray[np.float64]
    divergence_TS: NDArray[np.float64]


def next_token_log_probabilities(
    model: PreTrainedModel, ids_BT: Tensor, kept: int = 0, positions_BT: Tensor | None = None
) -> Tensor:
    """(B, T or `kept` last, V) float64. `positions_BT` are used where the model takes any."""
    arguments: dict[str, Any] = {"input_ids": ids_BT, "use_cache": False, "logits_to_keep": kept}
    if positions_BT is not None and "position_ids" in inspect.signature(model.forward).parameters:
        # Without a mask transformers would take a gap in the positions for the start of another text.
        arguments |= {"position_ids": positions_BT, "attention_mask": torch.ones_like(ids_BT)}
    with torch.inference_mode():
        logits: Tensor = model(**arguments).logits
    return logits.double().log_softmax(dim=-1)


def measure_removal(
    model: PreTrainedModel, ids_T: Tensor, *, batch_size: int = 16, progress: Callable[[int], None] | None = None
) -> Removal:
    """Take each token but the first out of the text and read the text again.

    The others keep their positions, where the model knows positions: else the removal of an early token would change
    most merely by moving all others. Windows reach one token further back past it. The prediction after token s itself,
    without it, is the one that the token before makes of what follows s.

    Args:
        model: a causal language model, in evaluation mode.
        ids_T: the text, its start token first.
        batch_size: sequences in one forward pass, at most.
        progress: called with the number of tokens done.

    Cost: T - 1 readings of T - 1 tokens.
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
        if progress is not None:
            progress(removed[-1])
    return Removal(loss_change_TS, divergence_TS)


@dataclass(frozen=True)
class Agreement:
    """Whether tokens that weigh more are tokens whose removal changes more.

    correlation: at each position the tokens it reads are ranked by weight and by the divergence that their removal
        makes there (Spearman's rank correlation), and these are averaged; None if no position reads enough tokens.
    nearness: the same with the tokens ranked by how near they are, instead of by weight.
    positions: how many were averaged.
    """

    correlation: float | None
    nearness: float | None
    positions: int


def agreement(weights_TS: NDArray[np.float64], removal: Removal, nearest: int, farthest: int | None) -> Agreement:
    """Compare the size of weights with what the removal of tokens changes.

    Left out are the start token, which is never removed, and each position's own token, which reaches the prediction
    past what is read.

    Args:
        weights_TS: (T, T) weight of token s for position t.
        removal: measured on the same text.
        nearest, farthest: the distances that are read.
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
    """Spearman's: the correlation of the ranks, ties sharing theirs; None where one side is all alike."""
    ranks_left, ranks_right = _ranks(left), _ranks(right)
    spread = ranks_left.std() * ranks_right.std()
    if spread == 0:
        return None
    return float(((ranks_left - ranks_left.mean()) * (ranks_right - ranks_right.mean())).mean() / spread)


def _ranks(values: NDArray[np.generic]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks
