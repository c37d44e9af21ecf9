"""Measures a training run: keeps the running sums from which each line of metrics.jsonl is computed."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from multilin.training.processes import mean_over_processes

_SUMS = ("tokens", "skipped_steps", "last_loss", "loss_sum", "loss_steps")


class Meter:
    """Sums losses, tokens and time between two lines of metrics.jsonl, and over the whole run.

    Time spent validating and saving is part of `seconds`, but `tokens_per_second` leaves it out. A run that is resumed
    with `state_dict()` writes the same lines as an uninterrupted run.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.tokens, self.skipped_steps = 0, 0
        self.last_loss: float | None = None
        self.loss_sum, self.loss_steps = 0.0, 0
        self._earlier_seconds, self._started = 0.0, time.perf_counter()
        self._window_tokens, self._window_started = 0, self._started

    @property
    def seconds(self) -> float:
        """Seconds spent in the run so far, including the time before it was resumed."""
        return self._earlier_seconds + time.perf_counter() - self._started

    def start(self) -> None:
        """Start the clock, before the first step of a new or resumed run."""
        self._started = self._window_started = time.perf_counter()

    def end_step(self, loss: float | None) -> None:
        """Count a step and its loss; a loss of None means that the step was skipped after its tokens were read."""
        if loss is None:
            self.skipped_steps += 1
        else:
            self.loss_sum += loss
            self.loss_steps += 1
        self.tokens += self.tokens_per_step
        self._window_tokens += self.tokens_per_step

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time is left out of the tokens per second."""
        before = time.perf_counter()
        yield
        self._window_started += time.perf_counter() - before

    def line(self, step: int, *, learning_rate: float, grad_norm: float) -> dict[str, Any]:
        """Return the line of metrics.jsonl for this step, and reset the sums.

        The loss is the mean over steps and devices; if all steps were skipped, it is the previous line's loss or None.
        """
        if self.loss_steps:
            self.last_loss = mean_over_processes(self.loss_sum / self.loss_steps)
        speed = self._window_tokens / max(time.perf_counter() - self._window_started, 1e-9)
        self.loss_sum, self.loss_steps = 0.0, 0
        self._window_tokens, self._window_started = 0, time.perf_counter()
        return {
            "step": step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "loss": self.last_loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "tokens_per_second": round(speed, 1),
        }

    def state_dict(self) -> dict[str, Any]:
        """The meter's state as plain data, for any number of devices; every process calls this."""
        sums = {name: getattr(self, name) for name in _SUMS}
        return {"seconds": self.seconds} | sums | {"loss_sum": mean_over_processes(self.loss_sum)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` gave."""
        self._earlier_seconds = state["seconds"]
        for name in _SUMS:
            setattr(self, name, state[name])
