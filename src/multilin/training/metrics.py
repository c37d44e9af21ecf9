"""What is measured while training: the running sums behind each line of metrics.jsonl."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Meter:
    """Sums losses, tokens and time between two lines of metrics.jsonl, and over the whole run.

    Time spent validating and saving counts as `seconds` of the run but not against `tokens_per_second`. What a
    resumed run needs for its next line to equal the uninterrupted one is in `state_dict()`.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.tokens = 0
        self.skipped_steps = 0
        self.last_loss = float("nan")
        self._step_loss: torch.Tensor | None = None
        self._loss_sum, self._loss_steps = 0.0, 0
        self._earlier_seconds, self._started = 0.0, time.perf_counter()
        self._window_tokens, self._window_started = 0, self._started

    @property
    def seconds(self) -> float:
        """Time spent in the run so far, earlier sittings included."""
        return self._earlier_seconds + time.perf_counter() - self._started

    def start(self) -> None:
        """Start the clock of this sitting."""
        self._started = self._window_started = time.perf_counter()

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the share of the step's loss that one forward pass found."""
        self._step_loss = loss if self._step_loss is None else self._step_loss + loss

    def take_step_loss(self) -> torch.Tensor:
        """The loss of the step whose forward passes are done."""
        loss, self._step_loss = self._step_loss, None
        assert loss is not None, "a step ended without a forward pass"
        return loss

    def end_step(self, loss: float) -> None:
        """Count a step that was applied."""
        self._loss_sum += loss
        self._loss_steps += 1
        self._count_tokens()

    def skip_step(self) -> None:
        """Count a step that was read but not applied; its loss does not count."""
        self.skipped_steps += 1
        self._count_tokens()

    def _count_tokens(self) -> None:
        self.tokens += self.tokens_per_step
        self._window_tokens += self.tokens_per_step

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count against the tokens per second."""
        before = time.perf_counter()
        yield
        self._window_started += time.perf_counter() - before

    def line(
        self, step: int, *, learning_rate: float, grad_norm: float, average: Callable[[float], float]
    ) -> dict[str, Any]:
        """The line for this step; the next one begins here. `average` takes the mean over devices.

        The loss is that of the last line where every step since was skipped.
        """
        if self._loss_steps:
            self.last_loss = average(self._loss_sum / self._loss_steps)
        speed = self._window_tokens / max(time.perf_counter() - self._window_started, 1e-9)
        self._loss_sum, self._loss_steps = 0.0, 0
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
        """Everything to continue from, as plain data."""
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "skipped_steps": self.skipped_steps,
            "last_loss": self.last_loss,
            "loss_sum": self._loss_sum,
            "loss_steps": self._loss_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.tokens, self._earlier_seconds, self.last_loss = state["tokens"], state["seconds"], state["last_loss"]
        self._loss_sum, self._loss_steps = state["loss_sum"], state["loss_steps"]
        self.skipped_steps = state["skipped_steps"]
