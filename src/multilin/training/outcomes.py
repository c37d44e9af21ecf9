"""The ways in which a run ends: with a result, by a signal, or with a failure that one sentence explains."""

import dataclasses
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of `train`: the model, its scores, and the run folder.

    Attributes:
        output: the run folder; `AutoModelForCausalLM.from_pretrained(output)` loads the model.
        steps, tokens: optimizer steps taken and training tokens read, over the whole run.
        seconds: time that the whole run took.
        loss: mean training loss over the steps of the last line of metrics.jsonl, in nats per token
            (with label smoothing, if any).
        validation_loss, validation_bits_per_byte: scores after the last step, in nats per token and bits per byte of
            text (NaN for a task).
        validation_accuracy: the share of right answers for a task; None for a text.
        model, tokenizer: the trained model, in evaluation mode, and its tokenizer.
    """

    output: Path
    steps: int
    tokens: int
    seconds: float
    loss: float
    validation_loss: float
    validation_bits_per_byte: float
    validation_accuracy: float | None
    model: Any = dataclasses.field(repr=False)
    tokenizer: Any = dataclasses.field(repr=False)


class TrainingFailed(RuntimeError):
    """The error for a run that cannot continue. The last complete checkpoint of the run is kept."""


class TrainingInterrupted(Exception):
    """The error for a run that a signal ended after a checkpoint; the message says how to resume the run.

    Attributes:
        exit_code: the exit status that shells expect after this signal: 130 for SIGINT, 143 for SIGTERM.
    """

    # The default is for pickle, which creates an exception from its message alone and then sets its attributes.
    def __init__(self, message: str, signal_number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StopRequest:
    """Context in which SIGINT and SIGTERM do not end the program but are recorded in `signal_number`.

    A second signal acts as usual, for users who cannot wait for the run's last step and checkpoint. Python delivers
    signals to the main thread only; in other threads the context does nothing.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
