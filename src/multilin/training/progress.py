"""The object that a training run reports its progress to, so that the library never prints."""

from collections.abc import Callable
from typing import Any


class TrainingProgress:
    """Receives the progress of a run and ignores it; a subclass overrides the methods that it needs.

    Only the main process of a run reports.
    """

    def prepare(self, stage: str, done: int, total: int | None = None) -> None:
        """The text is being prepared; the arguments are the same as for `multilin.data.progress.Progress`."""

    def message(self, text: str) -> None:
        """Receive a message for the user, of one line."""

    def ahead(self, seconds: Callable[[float], float]) -> None:
        """Several runs follow: all of them take `seconds(s)` seconds if the next run takes s seconds."""

    def validation(self, summary: str) -> None:
        """Receive a description of the validation text."""

    def start(self, step: int, max_steps: int | None) -> None:
        """Training begins, after `step` of `max_steps` steps; `max_steps` is None for a run with a time limit."""

    def step(self, step: int, share: float) -> None:
        """A step is done; `share`, from 0 to 1, is the part of the run that is done."""

    def line(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl is complete."""

    def stop(self) -> None:
        """Training has ended or failed."""
