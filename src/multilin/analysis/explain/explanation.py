"""What a model reads in a text: its weights on earlier tokens, and how removing each token changes predictions.

Each token is removed in turn, and the model reads the text again.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from multilin.errors import InputError
from multilin.layers.reading import Reading, record_readings
from multilin.model import MultilinForCausalLM
from multilin.model.match import find_matches
from multilin.runs.load import longest_text

NUM_GUESSES = 3

ATTENTION = "A weight is the token's share in this head's softmax attention, as transformers reports it."
MEAN = (
    "A weight is the mean over all layers and heads of the token's share. For the position's own token, the share of "
    "the own term is added."
)
FEWEST_RANKED = 3  # fewest tokens for a rank correlation
MOST_LOGITS = 2**24  # in one forward pass


@dataclass(frozen=True)
class Removal:
    """Effects of removing tokens, in nats; [t, s] is the effect of removing token s <= t on the prediction after t.

    loss_change_TS: increase of -ln p of the token that follows; nan after the last token.
    divergence_TS: Kullback-Leibler divergence sum_w p(w) ln(p(w) / q(w)) of the predictions with (p) and without (q)
        the token.
    Both arrays are nan for the start token, which is never removed, and for s > t, because t reads no later tokens.
    """

    loss_change_TS: NDArray[np.float64]
    divergence_TS: NDArray[np.float64]


def next_token_log_probabilities(
    model: PreTrainedModel, ids_BT: Tensor, kept: int = 0, positions_BT: Tensor | None = None
) -> Tensor:
    """Log probabilities (B, T, V) of next tokens in float64, at the last `kept` positions; at all positions for 0."""
    arguments: dict[str, Any] = {"input_ids": ids_BT, "use_cache": False, "logits_to_keep": kept}
    if positions_BT is not None and "position_ids" in inspect.signature(model.forward).parameters:
        # Without a mask, transformers would read a gap in the positions as the start of another text.
        arguments |= {"position_ids": positions_BT, "attention_mask": torch.ones_like(ids_BT)}
    with torch.inference_mode():
        logits: Tensor = model(**arguments).logits
    return logits.double().log_softmax(dim=-1)


def measure_removal(
    model: PreTrainedModel, ids_T: Tensor, *, batch_size: int = 16, progress: Callable[[int], None] = lambda done: None
) -> Removal:
    """Remove each token except the first in turn, and read the text again without it.

    If the model has positions, the other tokens keep their positions; otherwise, removing an early token would mostly
    measure the shift of all later tokens. A window that contains the gap reaches one token further back. The prediction
    after a removed token s is the prediction after token s - 1. `progress` is called with the number of tokens done.

    Cost: T - 1 forward passes over T - 1 tokens.
    """
    num_tokens, place_T = len(ids_T), torch.arange(len(ids_T), device=ids_T.device)
    whole_TV = next_token_log_probabilities(model, ids_T[None])[0]
    batch_size = max(1, min(batch_size, MOST_LOGITS // whole_TV.numel()))
    loss_change_TS, divergence_TS = (np.full((num_tokens, num_tokens), np.nan) for _ in range(2))
    for first in range(1, num_tokens, batch_size):
        removed = range(first, min(first + batch_size, num_tokens))
        left_BK = torch.stack([place_T[place_T != place] for place in removed])
        # Only predictions from the first removed token on can change.
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
    """How well the weights of tokens agree with the effects of removing them.

    correlation: mean over positions of Spearman's rank correlation between the weights of the tokens that a position
        reads and the divergences at this position after their removal; None if no position reads enough tokens.
    nearness: the same correlation, but with tokens ranked by nearness to the position instead of by weight.
    positions: number of positions in the mean.
    """

    correlation: float | None
    nearness: float | None
    positions: int


def agreement(weights_TS: NDArray[np.float64], removal: Removal, nearest: int, farthest: int | None) -> Agreement:
    """Compare the size of weights with the effects of removing tokens.

    The start token is left out, because it is never removed. A position's own token is left out, because it reaches the
    prediction in other ways too. `nearest` and `farthest` are the limits of the distances that a position reads.
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
    """Spearman's rank correlation, with mean ranks for ties; None if all values of one argument are equal."""
    ranks = np.stack([_ranks(left), _ranks(right)])
    return None if 0 in np.ptp(ranks, axis=1) else float(np.asarray(np.corrcoef(ranks))[0, 1])


def _ranks(values: NDArray[np.generic]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


@dataclass(frozen=True)
class Step:
    """One step of a layer in which positions read each other.

    layer: number of the layer, from 1; 0 is the mean over all layers.
    name: name of the step in its layer; empty if the layer has only one.
    reading: weights of one text, in float64 on the CPU.
    agreements: one for each head, and the last for the mean over the heads; empty if removal was not measured.
    """

    layer: int
    name: str
    reading: Reading
    agreements: list[Agreement]

    @property
    def label(self) -> str:
        """A readable name, such as `layer 2, pool_queries`."""
        if self.layer == 0:
            return "mean of all layers"
        return f"layer {self.layer}{', ' if self.name else ''}{self.name}"

    @property
    def weights_HTS(self) -> NDArray[np.float64]:
        """(H, T, T) weights of the tokens."""
        return self.reading.weights_BHTS[0].numpy()


@dataclass(frozen=True)
class Explanation:
    """The weights with which a model read a text of T tokens, and the effects of removing each token.

    token_ids: (T,) the text.
    losses: (T - 1,) -ln p of each token after the start token, in nats.
    guesses: the likeliest next tokens after each token, as pairs (id, probability).
    steps: the steps of all layers, preceded by their mean if every weight is a share; empty if no weights can be read.
    removal: effects of removing tokens; None if they were not measured.
    matches: the longest match of each token, as a pair (predicted id, length), with length 0 where there is none; empty
        for a model without it.
    """

    token_ids: list[int]
    losses: NDArray[np.float64]
    guesses: list[list[tuple[int, float]]]
    steps: list[Step]
    removal: Removal | None
    matches: list[tuple[int, int]] = field(default_factory=list)

    @property
    def last_weights_S(self) -> NDArray[np.float64] | None:
        """The weights of the first step at the last position, as the mean over heads; None without steps."""
        return self.steps[0].weights_HTS.mean(axis=0)[-1] if self.steps else None

    @property
    def last_effects_S(self) -> NDArray[np.float64] | None:
        """The divergences at the last position; nan for the last token, whose effect is by far the largest."""
        return None if self.removal is None else np.append(self.removal.divergence_TS[-1, :-1], np.nan)


def explain(
    model: PreTrainedModel,
    token_ids: list[int],
    *,
    remove: bool = True,
    batch_size: int = 16,
    progress: Callable[[int], None] = lambda done: None,
) -> Explanation:
    """Record the weights with which each position reads a text, and the effect of removing each token.

    Args:
        model: a causal language model of transformers, in evaluation mode. For models that multilin does not define,
            the weights are the attention weights, if the model returns them.
        token_ids: the text, its start token first.
        remove: measure the effects of removing each token.
        batch_size: sequences in one forward pass, each without one token.
        progress: called with the number of tokens removed.

    Raises:
        InputError: the text has no token after the start token, or more tokens than the model can read.
    """
    num_tokens, longest = len(token_ids), longest_text(model.config)
    if num_tokens < 2:
        raise InputError("text: no token given; give some text to explain")
    if longest is not None and num_tokens > longest:
        raise InputError(
            f"text: {num_tokens:,} tokens given, the start token included, but this model reads at most {longest}; "
            "give a shorter text"
        )
    ids_T = torch.tensor(token_ids, device=model.device)
    log_probabilities_TV = next_token_log_probabilities(model, ids_T[None])[0]
    losses_K = -log_probabilities_TV[:-1].gather(1, ids_T[1:, None])[:, 0]
    likeliest = log_probabilities_TV.exp().topk(min(NUM_GUESSES, log_probabilities_TV.shape[-1]), dim=-1)
    guesses = [
        list(zip(ids, shares, strict=True))
        for ids, shares in zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    ]
    removal = measure_removal(model, ids_T, batch_size=batch_size, progress=progress) if remove else None
    steps = [_step(*reading, removal) for reading in _readings(model, ids_T)]
    found = find_matches(model, ids_T[None])
    matches = [] if found is None else list(zip(*(numbers_BT[0].tolist() for numbers_BT in found), strict=True))
    return Explanation(token_ids, losses_K.cpu().numpy(), guesses, steps, removal, matches)


def largest(values_S: NDArray[np.float64], number: int) -> list[int]:
    """The indices of the `number` values with the largest absolute values, the largest first, without 0 and nan."""
    sizes_S = np.abs(np.nan_to_num(values_S))
    return [int(place) for place in np.argsort(-sizes_S, kind="stable")[:number] if sizes_S[place]]


def by_character(values_S: NDArray[np.float64], lengths: list[int]) -> NDArray[np.float64]:
    """Turn values (..., S) of tokens into (..., C) of characters: the largest value in magnitude among their tokens."""
    starts = np.cumsum([0, *lengths[:-1]])
    high, low = (function.reduceat(values_S, starts, axis=-1) for function in (np.fmax, np.fmin))
    return np.where(-low > high, low, high)


def _step(layer: int, name: str, reading: Reading, removal: Removal | None) -> Step:
    if removal is None:
        return Step(layer, name, reading, [])
    weights_HTS = reading.weights_BHTS[0].numpy()
    heads = list(weights_HTS) if len(weights_HTS) == 1 else [*weights_HTS, np.abs(weights_HTS).mean(axis=0)]
    compared = [agreement(weights_TS, removal, reading.nearest, reading.farthest) for weights_TS in heads]
    return Step(layer, name, reading, compared)


def _readings(model: PreTrainedModel, ids_T: Tensor) -> list[tuple[int, str, Reading]]:
    """The layer, name and reading of every step; their mean comes first if all weights are shares."""
    readings = _own_readings(model, ids_T) if isinstance(model, MultilinForCausalLM) else attentions(model, ids_T)
    if len(readings) > 1 and all(reading.is_share for _, _, reading in readings):
        return [(0, "", _mean([reading for _, _, reading in readings])), *readings]
    return readings


def _own_readings(model: MultilinForCausalLM, ids_T: Tensor) -> list[tuple[int, str, Reading]]:
    with record_readings(model.model.layers) as recorded, torch.inference_mode():
        model(ids_T[None], use_cache=False, logits_to_keep=1)
    readings = []
    for path, reading in recorded:
        layer, _, name = path.partition(".")
        readings.append((int(layer) + 1, name.rpartition(".")[2], _on_cpu(reading)))
    return readings


def attentions(model: PreTrainedModel, ids_T: Tensor) -> list[tuple[int, str, Reading]]:
    """The attention of a model of transformers; empty if the model has none or cannot return it."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")  # other implementations do not compute the weights
        with torch.inference_mode():
            weights = model(input_ids=ids_T[None], use_cache=False, output_attentions=True).attentions
    except (ValueError, NotImplementedError):
        weights = None
    finally:
        model.set_attn_implementation(before)
    return [
        (layer, "", _on_cpu(Reading(ATTENTION, weights_BHTS, 0, None)))
        for layer, weights_BHTS in enumerate(weights or (), start=1)
        if weights_BHTS is not None
    ]


def _on_cpu(reading: Reading) -> Reading:
    values: list[Any] = [value.double().cpu() if isinstance(value, Tensor) else value for value in reading]
    return Reading(*values)


def _mean(readings: list[Reading]) -> Reading:
    weights = [reading.weights_BHTS.mean(dim=1) for reading in readings]
    own = [reading.own_BHT for reading in readings]
    weights = [w if o is None else w + torch.diag_embed(o.mean(dim=1)) for w, o in zip(weights, own, strict=True)]
    nulls = [reading.null_BHT.mean(dim=1) for reading in readings if reading.null_BHT is not None]
    reach = [reading.farthest for reading in readings if reading.farthest is not None]
    return Reading(
        MEAN,
        torch.stack(weights).mean(dim=0)[:, None],
        min(reading.nearest for reading in readings),
        max(reach) if len(reach) == len(readings) else None,
        null_BHT=torch.stack(nulls).sum(dim=0)[:, None] / len(readings) if nulls else None,
    )
