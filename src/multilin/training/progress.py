"""The object that a training run reports its progress to, so that the library never prints."""

from collections.abc import Callable
from typing import Any


class TrainingProgress:
    """The receiver of the progress of a run, which ignores it; a subclass overrides the methods that it needs.

    Only the main process of a run reports.
    """

    def prepare(self, stage: str, done: int, total: int | None = None) -> None:
        """The text is being prepared; arguments as for `multilin.data.progress.Progress`."""

    def message(self, text: str) -> None:
        """Something a user should know, in one line."""

    def ahead(self, seconds: Callable[[float], float]) -> None:
        """Other runs follow the next one: how long they all take, given the seconds of the next one."""

    def validation(self, summary: str) -> None:
        """What is validated on, in words."""

    def start(self, step: int, max_steps: int | None) -> None:
        """Training begins, after `step` of `max_steps` steps; None for a run that ends by the clock."""

    def step(self, step: int, share: float) -> None:
        """A step is done, and this share of the run, from 0 to 1."""

    def line(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl is complete."""

    def stop(self) -> None:
        """Training has ended or failed."""
