"""Progress of work: bars on a terminal, single lines elsewhere."""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from multilin.errors import duration
from multilin.training.progress import TrainingProgress
from multilin.training.run_folder import RunFolder
from multilin.training.time_limit import forecast_end

# Without a terminal the output is read later or by a program: enough lines to follow, few enough to keep.
SECONDS_BETWEEN_LINES = 15.0
BITS = "validation_bits_per_byte"
BAR_PARTS = 100_000  # steps of the bar of a run
ALMOST_OVER = 0.98  # share of a run after which there is no forecast; runs by the clock rarely end at exactly 1


class StageBar:
    """Shows a `multilin.data.progress.Progress` on stderr, from the first call until `close`.

    A terminal shows one line with a bar; other outputs get a plain line every `SECONDS_BETWEEN_LINES` seconds.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._console: Console | None = None
        self._last_print = 0.0

    def __call__(self, stage: str, done: int, total: int | None = None) -> None:
        """Show the stage with a percentage, or with the bytes of text that are done if the total is not known."""
        if self._console is None:
            self._console, self._last_print = Console(stderr=True), time.monotonic()
        amount = decimal(done) if total is None else f"{done / max(total, 1):.0%}"
        if not self._console.is_terminal:
            if (now := time.monotonic()) - self._last_print >= SECONDS_BETWEEN_LINES:
                self._console.print(f"{stage} {amount}", highlight=False, markup=False)
                self._last_print = now
            return
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._progress.add_task(stage, amount="")
            self._progress.start()
        (task,) = self._progress.tasks
        if (task.description, task.total) != (stage, total):
            self._progress.reset(task.id, description=stage, total=total)
        self._progress.update(task.id, completed=done, amount=amount)

    def close(self) -> None:
        """Remove the line."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def show_progress() -> closing[StageBar]:
    """A `StageBar` that is closed when the block ends."""
    return closing(StageBar())


class TrainingDisplay(TrainingProgress):
    """Shows the progress of a run on stdout, within a `with` block.

    A terminal shows step, bar, loss, validation bits per byte, tokens per second and time left. Other outputs get a
    line for the first line of metrics.jsonl, for every validation, and otherwise every `SECONDS_BETWEEN_LINES` seconds.

    Attributes:
        forecast_of: folder of the run whose validations also show a forecast of the final score; None for no forecast.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.forecast_of: Path | None = None
        self._validations: list[tuple[int, float]] = []  # steps and bits per byte
        self._stages = StageBar()
        self._latest: dict[str, Any] = {}
        self._progress: Progress | None = None
        self._max_steps: int | None = 0
        self._share = 0.0
        self._last_print = 0.0
        self._ahead: Callable[[float], float] | None = None
        self._first_line: tuple[float, float] | None = None  # its time and share; kernels are compiled before it
        self._validation = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def prepare(self, stage: str, done: int, total: int | None = None) -> None:
        """Show how much of the text is prepared."""
        self._stages(stage, done, total)

    def message(self, text: str) -> None:
        """Print one line of text (above the bar, if there is one)."""
        self._stages.close()
        self.console.print(text, soft_wrap=True, markup=False)

    def ahead(self, seconds: Callable[[float], float]) -> None:
        """During the next run, also show the time left for this run and for all runs after it."""
        self._ahead = seconds

    def validation(self, summary: str) -> None:
        """Print the description of the validation text, but only once if several runs use the same text."""
        if summary != self._validation:
            self._validation = summary
            self.message(f"validation: {summary}")

    def start(self, step: int, max_steps: int | None) -> None:
        """Begin to display a training run that has already done `step` steps."""
        self._stages.close()
        self._max_steps, self._latest, self._last_print = max_steps, {}, float("-inf")
        self._first_line = None
        if self.forecast_of and step:
            lines = RunFolder(self.forecast_of).read_metrics()
            self._validations = [(line["step"], line[BITS]) for line in lines if BITS in line]
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(), console=self.console, expand=True,
            )  # fmt: skip
            done = round(BAR_PARTS * step / max_steps) if max_steps else 0
            self._progress.add_task(self._place(step), total=BAR_PARTS, completed=done, figures="")
            self._progress.start()

    def step(self, step: int, share: float) -> None:
        """Move the bar."""
        self._share = share
        if self._progress:
            self._progress.update(
                self._progress.task_ids[0], completed=round(BAR_PARTS * share), description=self._place(step)
            )

    def line(self, line: dict[str, Any]) -> None:
        """Show the figures of a line of metrics.jsonl."""
        line = line | self._left() | self._forecast(line)
        self._latest |= line
        if self._progress:
            self._progress.update(self._progress.task_ids[0], figures=format_figures(self._latest))
        elif "validation_loss" in line or time.monotonic() - self._last_print >= SECONDS_BETWEEN_LINES:
            self._last_print = time.monotonic()
            self.message(f"{self._place(line['step'])}  {format_figures(line)}")

    def _left(self) -> dict[str, float]:
        """The seconds left for this run and all runs after it; empty before this run's second line of metrics."""
        now = time.monotonic()
        began, share = self._first_line = self._first_line or (now, self._share)
        if self._ahead is None or self._share <= share:
            return {}
        whole = (now - began) / (self._share - share)
        left = (1 - self._share) * whole + self._ahead(whole)
        return {"seconds_left": left} if left >= 1 else {}

    def _forecast(self, line: dict[str, Any]) -> dict[str, tuple[float, float]]:
        """Forecast the bits per byte at the end of the run, and the forecast's error, from the validations so far."""
        if self.forecast_of is None or BITS not in line:
            return {}
        self._validations.append((line["step"], line[BITS]))
        validations = [(step * self._share / line["step"], bits) for step, bits in self._validations]
        found = forecast_end(validations) if self._share < ALMOST_OVER else None
        return {} if found is None else {"forecast": found}

    def _place(self, step: int) -> str:
        """The progress of the run: the step and the number of steps, or the share that is done."""
        if self._max_steps:
            return f"step {step}/{self._max_steps}"
        return f"step {step} ({100 * self._share:.0f} % of the run)"

    def stop(self) -> None:
        """Stop the bars, so that the terminal works as before."""
        self._stages.close()
        if self._progress:
            self._progress.stop()
            self._progress = None


def format_figures(line: dict[str, Any]) -> str:
    """The main figures of a line of metrics.jsonl as text."""
    parts = [f"loss {line['loss']:.3f}" if "loss" in line else "every step was skipped"]
    if BITS in line:
        parts.append(f"validation {line[BITS]:.3f} bits per byte")
    if "forecast" in line:
        expected, error = line["forecast"]
        parts.append(f"forecast for the end: {expected:.2f} ± {2 * error:.2f}")
    if "validation_accuracy" in line:
        parts.append(f"validation {100 * line['validation_accuracy']:.1f} % right")
    parts.append(f"{line['tokens_per_second']:,.0f} tokens/s")
    if "seconds_left" in line:
        parts.append(f"all runs: about {duration(line['seconds_left'])} left")
    return "  ".join(parts)
