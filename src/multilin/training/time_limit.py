"""The clock of a run that ends after a given time at most: how far it is, whether another step fits, how it may end."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any

import numpy as np

from multilin.training.outcomes import TrainingFailed
from multilin.training.processes import mean_over_processes

ENDING = 3.0  # seconds for the plot, the model card and the end of the program
FIRST_SAVE = 1.0  # seconds that a checkpoint is expected to take before one was written
FORWARD = 0.5  # of the time of a training step, at most, is that of its forward pass
MOST_GUESSED = 0.1  # of the run for the last validation, before one was made
FIRST_SHARE, SPACING = 0.35, 0.15  # of a run: the earliest forecast, and the least between the validations behind it
# After these shares of a run it goes on so many times as fast as before, and the relative error of that: from 64 runs.
_SHARES, _SLOPES, _ERRORS = (0.4, 0.6, 0.8, 1.0), (0.422, 0.573, 0.541, 1.0), (0.0299, 0.0116, 0.0055, 0.0)
_STEP_WEIGHT = 0.2  # of the last step in the running mean of their seconds


class TimeLimit:
    """Seconds that a run may use, from the start of the command to its end, and how far it is.

    The clock stands still between two sittings of a run. What follows the last step, a validation and writing the
    model twice, is kept back: as much time as it took before. The rest, from the first step on, is for training.

    Args:
        minutes: of all sittings together.
        max_steps: after which the run ends before its time.
        began: `time.monotonic()` when this sitting began.
        validation_steps: tokens of a validation, in tokens of a step.

    Attributes:
        share: of the run that is over, from 0 to 1: of the time for training, or of the steps where that is more; the
            same in every process.
        is_ended: whether the last step was made, after which the model is validated and written.
    """

    def __init__(self, minutes: float, max_steps: int, began: float, validation_steps: float) -> None:
        self.seconds, self.max_steps, self._began, self._earlier = 60 * minutes, max_steps, began, 0.0
        self.share, self.is_ended = 0.0, False
        self._first: float | None = None  # seconds used before the first step
        self._last = self._step = 0.0  # seconds used after the last step, and the mean of a step
        self._validation_steps = validation_steps
        self._pauses = {"validation": 0.0, "saving": 0.0}  # seconds that the last one took

    @property
    def used(self) -> float:
        """Seconds used, those of earlier sittings included."""
        return self._earlier + monotonic() - self._began

    @property
    def kept_back(self) -> float:
        """Seconds that what follows the last step will take."""
        guess = min(FORWARD * self._validation_steps * self._step, MOST_GUESSED * self.seconds)
        return ENDING + (self._pauses["validation"] or guess) + 2 * (self._pauses["saving"] or FIRST_SAVE)

    @property
    def is_over(self) -> bool:
        """True if less than half a step fits into the remaining time."""
        return self._room < 0.5 * self._step

    @property
    def leaves_a_pause(self) -> bool:
        """False if a validation and a checkpoint would take most of what is left."""
        return self._room > 2 * (self.kept_back - ENDING)

    @property
    def _room(self) -> float:
        return self.seconds - self.kept_back - self._last

    def start(self) -> None:
        """The first step of this sitting begins.

        Raises:
            TrainingFailed: no time is left for it.
        """
        self._last = mean_over_processes(self.used)
        if self._first is None:
            self._first = self._last
            if self._room <= 0:
                raise TrainingFailed(
                    f"training.minutes: {self.seconds / 60:g} given, but {self._last:.0f} s were gone before the first "
                    f"step, and {self.kept_back:.0f} s are kept for the end; give more"
                )
        else:
            self._first += self._last - self._earlier  # what came before this sitting's first step is no training

    def advance(self, step: int) -> None:
        """So many steps were made; every process calls this after each."""
        assert self._first is not None, "the clock was not started"
        used = mean_over_processes(self.used)
        seconds = used - self._last
        # The first step may compile kernels, so that the mean falls at once and rises slowly.
        self._step = min(seconds, self._step + _STEP_WEIGHT * (seconds - self._step)) if self._step else seconds
        self._last = used
        whole = max(self.seconds - self.kept_back - self._first, 1e-9)
        self.share = max(self.share, min(1.0, (used - self._first) / whole), step / self.max_steps)

    def num_steps(self, step: int) -> float:
        """Steps of the whole run, if the rest goes as fast as those up to this one."""
        return max(step, 1) / max(self.share, 1e-9)

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """A validation or a save, which will be done once more at the end; the time it takes is noted."""
        begin = monotonic()
        yield
        self._pauses[name] = mean_over_processes(monotonic() - begin)
        self._last += self._pauses[name]

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from, as plain data; called in every process."""
        return {
            "used": mean_over_processes(self.used), "share": self.share, "first": self._first, "step": self._step,
            "pauses": dict(self._pauses), "is_ended": self.is_ended,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` gave."""
        self._earlier, self.share, self._first = state["used"], state["share"], state["first"]
        self._step, self._pauses, self.is_ended = state["step"], dict(state["pauses"]), state["is_ended"]


def forecast_end(validations: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Bits per byte to expect at the end of a run whose learning rate falls linearly to 0, and their standard error.

    With v after a share s of the run, and v' after an earlier one s', it ends with about

        v (v / v')^(k(s) (1 - s) / (s - s'))

    k was fitted to runs that were validated after every fifth of their way, and is a straight line between these.

    Args:
        validations: share of the run that was over, and bits per byte. The last one counts, and the last one `SPACING`
            before it.

    Returns:
        None before `FIRST_SHARE` of the run, or without two validations that are so far apart.
    """
    share, bits = validations[-1]
    earlier = next(((s, b) for s, b in reversed(validations) if s <= share - SPACING), None)
    if earlier is None or share < FIRST_SHARE:
        return None
    straight_on = math.log(bits / earlier[1]) * (1 - share) / (share - earlier[0])
    expected = bits * math.exp(float(np.interp(share, _SHARES, _SLOPES)) * straight_on)
    return expected, expected * float(np.interp(share, _SHARES, _ERRORS))
