"""The choice of the next token from logits, one sequence at a time: the same code for every engine."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from multilin.inference.random_numbers import RandomNumbers
from multilin.inference.settings import GenerationSettings

Logits = NDArray[np.float32]


def choose_token(
    logits_V: Logits, settings: GenerationSettings, seen: Mapping[int, int], numbers: RandomNumbers
) -> int:
    """The next token of one sequence; see `choose_tokens`."""
    return choose_tokens(logits_V[None], [settings], [seen], [numbers])[0]


def choose_tokens(
    logits_BV: Logits, settings: Sequence[GenerationSettings], seen: Sequence[Mapping[int, int]],
    numbers: Sequence[RandomNumbers],
) -> list[int]:  # fmt: skip
    """The next token of each sequence, which depends on nothing of the others.

    In this order: the logits of tokens seen are divided by the repetition penalty where they are above 0, multiplied
    with it elsewhere; the presence penalty and the frequency penalty times their number are taken from those of tokens
    generated; the bias is added; greedily the largest is taken. Otherwise logits are divided by the
    temperature, and the softmax over the tokens that top_k, then top_p, then min_p leave is drawn from.

    Args:
        logits_BV: (B, V) of all tokens; they are changed.
        settings: of each sequence, see GenerationSettings.
        seen: the tokens of each so far, and how often each was generated; 0 for those of the prompt alone.
        numbers: of each; moved on by one number, unless the choice is greedy.
    """
    for logits_V, own, own_seen in zip(logits_BV, settings, seen, strict=True):
        adjust(logits_V, own, own_seen)
    drawn = [row for row, own in enumerate(settings) if not own.greedy]
    tokens: list[int] = logits_BV.argmax(axis=1).tolist() if len(drawn) < len(settings) else [0] * len(settings)
    plain = [row for row in drawn if not (settings[row].top_k or settings[row].top_p or settings[row].min_p)]
    if plain:
        ends = logits_BV[plain].astype(np.float64)  # in place from here on: large arrays are slow to allocate
        ends -= ends.max(axis=1, keepdims=True)
        ends /= np.array([settings[row].temperature for row in plain])[:, None]
        np.cumsum(np.exp(ends, out=ends), axis=1, out=ends)
        for row, end in zip(plain, ends, strict=True):
            place = int(np.searchsorted(end, numbers[row].uniform() * end[-1], side="right"))
            tokens[row] = min(place, len(end) - 1)
    for row in set(drawn) - set(plain):
        few, shares = candidates(logits_BV[row], settings[row])
        end = np.cumsum(shares)
        place = np.searchsorted(end, numbers[row].uniform() * end[-1], side="right")
        tokens[row] = int(few[min(int(place), len(few) - 1)])
    return tokens


def adjust(logits_V: Logits, settings: GenerationSettings, seen: Mapping[int, int]) -> None:
    """Apply the penalties and the bias in place."""
    if settings.repetition_penalty != 1.0 and seen:
        tokens = np.fromiter(seen, np.int64, len(seen))
        logits = logits_V[tokens]
        factor = settings.repetition_penalty
        logits_V[tokens] = np.where(logits > 0, logits / factor, logits * factor)
    if settings.presence_penalty or settings.frequency_penalty:
        for token, count in seen.items():
            if count:
                logits_V[token] -= settings.presence_penalty + settings.frequency_penalty * count
    for name, bias in settings.logit_bias.items():
        logits_V[int(name)] += bias


def candidates(logits_V: Logits, settings: GenerationSettings) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that are drawn from, the likeliest first where some are left out, and their probabilities."""
    top_k, top_p, min_p = settings.top_k or 0, settings.top_p or 1.0, settings.min_p or 0.0
    tokens = np.arange(len(logits_V))
    if 0 < top_k < len(tokens):
        tokens = np.argpartition(-logits_V, top_k - 1)[:top_k]
    if len(tokens) < len(logits_V) or top_p < 1.0:
        tokens = tokens[np.argsort(-logits_V[tokens], kind="stable")]
    logits = logits_V[tokens].astype(np.float64) / settings.temperature
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    if top_p < 1.0:
        # As many as reach the share, the last one included.
        num_kept = int(np.searchsorted(np.cumsum(shares), top_p) + 1)
        tokens, shares = tokens[:num_kept], shares[:num_kept]
    if min_p > 0.0:
        is_kept = shares >= min_p * shares.max()
        tokens, shares = tokens[is_kept], shares[is_kept]
    return tokens, shares
