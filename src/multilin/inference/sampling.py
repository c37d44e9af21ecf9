"""The choice of the next token from logits, and its random numbers; every engine uses this code.

The random numbers equal the numbers of PyTorch's default generator on a CPU (Mersenne Twister); PyTorch is not
imported.
"""

import secrets
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from multilin.errors import InputError
from multilin.inference.settings import GenerationSettings

Logits = NDArray[np.float32]

STATE_BYTES = 5056  # bytes of the state that torch.get_rng_state() returns
_KEYS = 624
_LAYOUT = np.dtype(
    [("seed", "<u8"), ("left", "<i4"), ("is_seeded", "<i4"), ("next", "<u8"), ("key", "<u8", _KEYS), ("rest", "u1", 40)]
)


class RandomNumbers:
    """A generator of uniform numbers.

    Args:
        seed: the same seed gives the same numbers; None takes a new seed.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._bits = np.random.MT19937()
        self._seed = secrets.randbits(32) if seed is None else seed
        self._bits._legacy_seeding(self._seed & 0xFFFFFFFF)
        self._generator = np.random.Generator(self._bits)

    def uniform(self) -> float:
        """The next number, at least 0 and less than 1, with 53 random bits."""
        return float(self._generator.random())

    @property
    def state(self) -> NDArray[np.uint8]:
        """The state of the generator in the format of `torch.get_rng_state`, (5056,)."""
        state = self._bits.state["state"]
        record = np.zeros((), _LAYOUT)
        record["seed"], record["is_seeded"], record["key"] = self._seed & 0xFFFFFFFF, 1, state["key"]
        record["left"], record["next"] = (1, 0) if state["pos"] == _KEYS else (_KEYS + 1 - state["pos"], state["pos"])
        return np.frombuffer(record.tobytes(), np.uint8).copy()

    @classmethod
    def from_state(cls, state: NDArray[np.uint8]) -> "RandomNumbers":
        """A generator that continues from a state.

        Raises:
            InputError: not a state of this generator.
        """
        refusal = InputError("rng_state is not the state of a generator of random numbers")
        if state.dtype != np.uint8 or state.shape != (STATE_BYTES,):
            raise refusal
        record = np.frombuffer(state.tobytes(), _LAYOUT)[0]
        left, position = int(record["left"]), int(record["next"])
        in_order = left == 1 or left + position == _KEYS + 1
        if record["is_seeded"] != 1 or not 1 <= left <= _KEYS or position > _KEYS or not in_order:
            raise refusal
        numbers = cls(int(record["seed"]))
        numbers._bits.state = {
            "bit_generator": "MT19937",
            "state": {"key": record["key"].astype(np.uint32), "pos": _KEYS if left == 1 else position},
        }
        return numbers


def choose_tokens(
    logits_BV: Logits, settings: Sequence[GenerationSettings], seen: Sequence[Mapping[int, int]],
    numbers: Sequence[RandomNumbers],
) -> list[int]:  # fmt: skip
    """The next token of each sequence, chosen independently of the other sequences.

    Steps, in this order:

    1. Logits of tokens in the text so far are divided by the repetition penalty if positive, else multiplied by it.
    2. The presence penalty, and the frequency penalty times the number of occurrences, are subtracted from the logits
       of tokens that were generated.
    3. The bias is added.
    4. At temperature 0 the token with the largest logit is taken. Otherwise logits are divided by the temperature;
       top_k, then top_p, then min_p leave out tokens; and the token is drawn from the softmax over the other tokens.

    Args:
        logits_BV: (B, V) logits of all tokens; changed in place.
        settings: settings of each sequence.
        seen: for each sequence, how often each of its tokens was generated; 0 for tokens that occur only in the prompt.
        numbers: the random numbers of each sequence; one number is used unless the sequence's temperature is 0.
    """
    for logits_V, own, own_seen in zip(logits_BV, settings, seen, strict=True):
        adjust(logits_V, own, own_seen)
    drawn = [row for row, own in enumerate(settings) if own.temperature > 0]
    tokens: list[int] = logits_BV.argmax(axis=1).tolist() if len(drawn) < len(settings) else [0] * len(settings)
    plain = [row for row in drawn if not (settings[row].top_k or settings[row].top_p or settings[row].min_p)]
    if plain:
        ends = logits_BV[plain].astype(np.float64)  # in place from here on: large arrays are slow to allocate
        ends -= ends.max(axis=1, keepdims=True)
        with np.errstate(over="ignore"):  # a temperature near 0 leaves only the likeliest token
            ends /= np.array([settings[row].temperature for row in plain])[:, None]
        np.cumsum(np.exp(ends, out=ends), axis=1, out=ends)
        for row, end in zip(plain, ends, strict=True):
            tokens[row] = _draw(end, numbers[row])
    for row in set(drawn) - set(plain):
        few, shares = candidates(logits_BV[row], settings[row])
        tokens[row] = int(few[_draw(np.cumsum(shares), numbers[row])])
    return tokens


def _draw(ends: NDArray[np.float64], numbers: RandomNumbers) -> int:
    """Draw an index, given the running sums of the weights of all indices."""
    return min(int(np.searchsorted(ends, numbers.uniform() * ends[-1], side="right")), len(ends) - 1)


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
    """The tokens that top_k, top_p and min_p keep, and their probabilities; sorted if some tokens are left out."""
    top_k, top_p, min_p = settings.top_k or 0, settings.top_p or 1.0, settings.min_p or 0.0
    tokens = np.arange(len(logits_V))
    if 0 < top_k < len(tokens):
        tokens = np.argpartition(-logits_V, top_k - 1)[:top_k]
    if len(tokens) < len(logits_V) or top_p < 1.0:
        tokens = tokens[np.argsort(-logits_V[tokens], kind="stable")]
    logits = logits_V[tokens].astype(np.float64)
    with np.errstate(over="ignore"):  # a temperature near 0 leaves only the likeliest token
        shares = np.exp((logits - logits.max()) / settings.temperature)
    shares /= shares.sum()
    if top_p < 1.0:
        # The fewest tokens whose shares add up to top_p.
        num_kept = int(np.searchsorted(np.cumsum(shares), top_p) + 1)
        tokens, shares = tokens[:num_kept], shares[:num_kept]
    if min_p > 0.0:
        is_kept = shares >= min_p * shares.max()
        tokens, shares = tokens[is_kept], shares[is_kept]
    return tokens, shares
