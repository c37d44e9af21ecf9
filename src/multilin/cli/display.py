"""What a person sees while a model trains: a progress bar on a terminal, a line now and then elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

# Without a terminal the output is read later or by a program: enough lines to follow, few enough to keep.
SECONDS_BETWEEN_LINES = 15.0


class Display:
    """Shows the lines of metrics.jsonl as they come.

    On a terminal: step, bar, loss, validation bits per byte, tokens per second, time left. Elsewhere: a plain line
    for the first line, every validation, and then every `SECONDS_BETWEEN_LINES`.
    """

    def __init__(self, total_steps: int, *, silent: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, quiet=silent)
        self.total_steps = total_steps
        self._latest: dict[str, Any] = {}
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._last_print = float("-inf")

    def start(self, step: int) -> None:
        """Begin at a step."""
        if self.console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}"),
            )
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self.console, expand=True)
            self._task = self._progress.add_task("", total=self.total_steps, completed=step, figures="")
            self._progress.start()

    def step(self, step: int) -> None:
        """A step is done."""
        if self._progress:
            self._progress.update(self._task, completed=step)

    def line(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl is complete."""
        self._latest |= line
        if self._progress:
            self._progress.update(self._task, completed=line["step"], figures=format_figures(self._latest))
        elif "validation_loss" in line or time.monotonic() - self._last_print >= SECONDS_BETWEEN_LINES:
            self._last_print = time.monotonic()
            self.message(f"step {line['step']}/{self.total_steps}  {format_figures(line)}")

    def message(self, text: str) -> None:
        """Print one line of text (above the bar, if there is one)."""
        self.console.print(text, soft_wrap=True, markup=False)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._progress:
            self._progress.stop()
            self._progress = None


def format_figures(line: dict[str, Any]) -> str:
    """The figures of a line that a person watches."""
    parts = [f"loss {line['loss']:.3f}"]
    if "validation_bits_per_byte" in line:
        parts.append(f"validation {line['validation_bits_per_byte']:.3f} bits per byte")
    if "validation_accuracy" in line:
        parts.append(f"validation {100 * line['validation_accuracy']:.1f} % right")
    return "  ".join([*parts, f"{line['tokens_per_second']:,.0f} tokens/s"])
