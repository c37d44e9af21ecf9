"""The random numbers of sampling: PyTorch's default generator on a CPU, the Mersenne Twister, without PyTorch."""

import secrets

import numpy as np
from numpy.typing import NDArray

from multilin.errors import InputError

STATE_BYTES = 5056  # of the state as torch.get_rng_state() has it
_KEYS = 624
_LAYOUT = np.dtype(
    [("seed", "<u8"), ("left", "<i4"), ("is_seeded", "<i4"), ("next", "<u8"), ("key", "<u8", _KEYS), ("rest", "u1", 40)]
)


class RandomNumbers:
    """A generator of uniform numbers.

    Args:
        seed: the same seed gives the same numbers; None takes a new one.
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
        """A generator that goes on from a state.

        Raises:
            InputError: no state of this generator.
        """
        refusal = InputError("rng_state is no state of a generator of random numbers")
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
