"""Progress of work: bars on a terminal, single lines elsewhere."""

import contextlib
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from multilin.analysis.budget.law import shipped_law
from multilin.files import write_whole
from multilin.settings.inputs import read_json, to_json
from multilin.training.progress import TrainingProgress
from multilin.training.run_folder import EXPECTED_FILE, RunFolder

# Without a terminal the output is read later or by a program: enough lines to follow, few enough to keep.
SECONDS_BETWEEN_LINES = 15.0
BAR_PARTS = 100_000  # of the bar of a run
ALMOST_OVER = 0.98  # share of a run after which its end is no longer forecast; by the clock it rarely ends at 1 exactly
UNLIKE = 0.1  # share of the expected tokens: a run that is off by more is told why it missed


class StageBar:
    """A `multilin.data.progress.Progress` on stderr, from its first call until it is closed.

    On a terminal one line with a bar; elsewhere a plain line every `SECONDS_BETWEEN_LINES`.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._console: Console | None = None
        self._last_print = 0.0

    def __call__(self, stage: str, done: int, total: int | None = None) -> None:
        """Show the stage with a percentage, or with the bytes of text done where the total is not known."""
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
    """Shows a run on stdout, within a `with` block.

    On a terminal: step, bar, loss, validation bits per byte, tokens per second, time left. Elsewhere: a plain line
    for the first line of metrics.jsonl, every validation, and then every `SECONDS_BETWEEN_LINES`.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._stages = StageBar()
        self._latest: dict[str, Any] = {}
        self._progress: Progress | None = None
        self._max_steps: int | None = 0
        self._share = 0.0
        self._last_print = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def prepare(self, stage: str, done: int, total: int | None = None) -> None:
        """Show how far the text is prepared."""
        self._stages(stage, done, total)

    def message(self, text: str) -> None:
        """Print one line of text (above the bar, if there is one)."""
        self._stages.close()
        self.console.print(text, soft_wrap=True, markup=False)

    def start(self, step: int, max_steps: int | None) -> None:
        """Begin the display of training, after `step` steps."""
        self._stages.close()
        self._max_steps, self._latest, self._last_print = max_steps, {}, float("-inf")
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
        self._latest |= line
        if self._progress:
            self._progress.update(self._progress.task_ids[0], figures=format_figures(self._latest))
        elif "validation_loss" in line or time.monotonic() - self._last_print >= SECONDS_BETWEEN_LINES:
            self._last_print = time.monotonic()
            self.message(f"{self._place(line['step'])}  {format_figures(line)}")

    def _place(self, step: int) -> str:
        """How far the run is: the step of all steps, or the share of the run."""
        if self._max_steps:
            return f"step {step}/{self._max_steps}"
        return f"step {step} ({100 * self._share:.0f} % of the run)"

    def stop(self) -> None:
        """Leave the terminal as it was."""
        self._stages.close()
        if self._progress:
            self._progress.stop()
            self._progress = None


class ExpectingDisplay(TrainingDisplay):
    """Also says what is expected: with every validation where it leads, and at the end what was expected before.

    A file of the run keeps that, so that a resumed run knows; earlier validations are in its metrics.

    Attributes:
        expected: bits per byte of the validation text. expected_tokens: that it was expected with.
        can_forecast: the learning rate falls linearly, as in the runs that the forecasts come from.
    """

    def __init__(self, output: str) -> None:
        super().__init__()
        self.expected: float | None = None
        self.expected_tokens = 0
        self.can_forecast = False
        self._validations: list[tuple[int, float]] = []  # steps and bits per byte
        self._output = output

    def start(self, step: int, max_steps: int | None) -> None:
        """Begin the display of training, after `step` steps."""
        super().start(step, max_steps)
        file = Path(self._output, EXPECTED_FILE)
        if self.expected is not None:
            content = {"bits_per_byte": self.expected, "tokens": self.expected_tokens}
            write_whole(file, to_json(content) + "\n")
        elif max_steps is None and file.is_file():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a damaged file only says less
                content = read_json(file, "run")
                self.expected_tokens, self.expected = int(content["tokens"]), float(content["bits_per_byte"])
                self._validations = [
                    (line["step"], line["validation_bits_per_byte"])
                    for line in RunFolder(self._output).read_metrics()
                    if "validation_bits_per_byte" in line
                ]

    def line(self, line: dict[str, Any]) -> None:
        """Show the figures of a line of metrics.jsonl, and where a validation leads."""
        if self.expected is not None and self.can_forecast and "validation_bits_per_byte" in line:
            self._validations.append((line["step"], line["validation_bits_per_byte"]))
            validations = [(step * self._share / line["step"], bits) for step, bits in self._validations]
            if self._share < ALMOST_OVER and (forecast := shipped_law().forecast(validations, self.expected)):
                line = line | {"forecast": forecast}
        super().line(line)

    def say_reached(self, bits_per_byte: float, tokens: int) -> None:
        """Print what was reached, with so many tokens, beside what was expected."""
        if self.expected is not None:
            text = f"reached {bits_per_byte:.3f} bits per byte; expected were {self.expected:.2f}"
            if abs(tokens - self.expected_tokens) > UNLIKE * self.expected_tokens:
                text += f", with {self.expected_tokens / 1e6:.2f} M tokens, but {tokens / 1e6:.2f} M were read"
            self.message(text)


def format_figures(line: dict[str, Any]) -> str:
    """The main figures of a line of metrics.jsonl as text."""
    parts = [f"loss {line['loss']:.3f}" if "loss" in line else "every step was left out"]
    if "validation_bits_per_byte" in line:
        parts.append(f"validation {line['validation_bits_per_byte']:.3f} bits per byte")
    if "forecast" in line:
        expected, error = line["forecast"]
        parts.append(f"the end about {expected:.2f} ± {2 * error:.2f}")
    if "validation_accuracy" in line:
        parts.append(f"validation {100 * line['validation_accuracy']:.1f} % right")
    return "  ".join([*parts, f"{line['tokens_per_second']:,.0f} tokens/s"])
