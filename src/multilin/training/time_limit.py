"""The clock of a run with a time limit: how far the run is, whether another step fits, and a forecast of its end."""

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
FORWARD = 0.5  # share of a training step's time, at most, that its forward pass takes
MOST_GUESSED = 0.1  # share of the run, at most, reserved for the last validation before one was timed
FIRST_SHARE, SPACING = 0.35, 0.15  # shares of a run: before the first forecast, and between a forecast's validations
# By share of a run: the slope of the rest relative to the slope before, and a forecast's relative error; from 64 runs.
_SHARES, _SLOPES, _ERRORS = (0.4, 0.6, 0.8, 1.0), (0.422, 0.573, 0.541, 1.0), (0.0299, 0.0116, 0.0055, 0.0)
_STEP_WEIGHT = 0.2  # weight of the last step in the running mean of seconds per step


class TimeLimit:
    """The time that a run may use, from the start of the command to its end, and how far the run is.

    The clock stops between the end of a command and the command that resumes the run. Time is reserved for the work
    after the last step: a validation and two saves, each expected to take as long as the latest one did. The remaining
    time, from the first step on, is for training.

    Args:
        minutes: minutes for the whole run, including the time before it was resumed.
        max_steps: steps after which the run ends even if time is left.
        began: `time.monotonic()` when this command began.
        validation_steps: number of tokens of a validation, divided by the number of tokens of a step.

    Attributes:
        share: the share of the run that is over, from 0 to 1, the same in every process. This is the larger of two
            shares: of the time for training and of the steps.
        is_ended: whether the last step was made, after which the model is validated and written.
    """

    def __init__(self, minutes: float, max_steps: int, began: float, validation_steps: float) -> None:
        self.seconds, self.max_steps, self._began, self._earlier = 60 * minutes, max_steps, began, 0.0
        self.share, self.is_ended = 0.0, False
        self._first: float | None = None  # seconds used before the first step
        self._last = self._step = 0.0  # seconds used up to the last step, and mean seconds of a step
        self._validation_steps = validation_steps
        self._pauses = {"validation": 0.0, "saving": 0.0}  # seconds that the latest validation and save took

    @property
    def used(self) -> float:
        """Seconds that the run has used, including the time before it was resumed."""
        return self._earlier + monotonic() - self._began

    @property
    def kept_back(self) -> float:
        """Seconds that are reserved for the work after the last step."""
        guess = min(FORWARD * self._validation_steps * self._step, MOST_GUESSED * self.seconds)
        return ENDING + (self._pauses["validation"] or guess) + 2 * (self._pauses["saving"] or FIRST_SAVE)

    @property
    def is_over(self) -> bool:
        """True if less than half a step fits into the remaining time."""
        return self._room < 0.5 * self._step

    @property
    def leaves_a_pause(self) -> bool:
        """False if a validation and a checkpoint would take most of the remaining time."""
        return self._room > 2 * (self.kept_back - ENDING)

    @property
    def _room(self) -> float:
        return self.seconds - self.kept_back - self._last

    def start(self) -> None:
        """Note that the first step of this command begins.

        Raises:
            TrainingFailed: no time is left for a step.
        """
        self._last = mean_over_processes(self.used)
        if self._first is None:
            self._first = self._last
            if self._room <= 0:
                raise TrainingFailed(
                    f"training.minutes: {self.seconds / 60:g} given, but {self._last:.0f} s had passed before the "
                    f"first step, and {self.kept_back:.0f} s are reserved for the end; give more minutes"
                )
        else:
            self._first += self._last - self._earlier  # time before a command's first step is not training

    def advance(self, step: int) -> None:
        """Note that `step` steps were made; every process calls this method after each step."""
        assert self._first is not None, "the clock was not started"
        used = mean_over_processes(self.used)
        seconds = used - self._last
        # The first step may compile kernels, so the mean falls at once and rises slowly.
        self._step = min(seconds, self._step + _STEP_WEIGHT * (seconds - self._step)) if self._step else seconds
        self._last = used
        whole = max(self.seconds - self.kept_back - self._first, 1e-9)
        self.share = max(self.share, min(1.0, (used - self._first) / whole), step / self.max_steps)

    def num_steps(self, step: int) -> float:
        """The number of steps of the whole run, if the remaining steps are as fast as the steps so far."""
        return max(step, 1) / max(self.share, 1e-9)

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Measure the time of a validation or a save; the same time is reserved for the end of the run."""
        begin = monotonic()
        yield
        self._pauses[name] = mean_over_processes(monotonic() - begin)
        self._last += self._pauses[name]

    def state_dict(self) -> dict[str, Any]:
        """The clock's state as plain data; every process calls this."""
        return {
            "used": mean_over_processes(self.used), "share": self.share, "first": self._first, "step": self._step,
            "pauses": dict(self._pauses), "is_ended": self.is_ended,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` gave."""
        self._earlier, self.share, self._first = state["used"], state["share"], state["first"]
        self._step, self._pauses, self.is_ended = state["step"], dict(state["pauses"]), state["is_ended"]


def forecast_end(validations: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Forecast a run's final bits per byte, and their standard error, if the learning rate falls linearly to 0.

    If v is the bits per byte at a share s of the run, and v' at an earlier share s', the forecast is

        v (v / v')^(k(s) (1 - s) / (s - s'))

    k(s) was fitted to runs that were validated after every fifth of the run, and is interpolated in between.

    Args:
        validations: pairs of the share of the run that was over, and the bits per byte. The forecast uses the last
            pair, and the latest pair that is at least `SPACING` before the last.

    Returns:
        The forecast and its error; None before `FIRST_SHARE` of the run, or without two validations `SPACING` apart.
    """
    share, bits = validations[-1]
    earlier = next(((s, b) for s, b in reversed(validations) if s <= share - SPACING), None)
    if earlier is None or share < FIRST_SHARE:
        return None
    straight_on = math.log(bits / earlier[1]) * (1 - share) / (share - earlier[0])
    expected = bits * math.exp(float(np.interp(share, _SHARES, _SLOPES)) * straight_on)
    return expected, expected * float(np.interp(share, _SHARES, _ERRORS))
