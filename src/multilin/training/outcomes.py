"""How a run ends: with a result, by a signal, or by a failure that one sentence explains."""

import dataclasses
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        output: the run folder; `AutoModelForCausalLM.from_pretrained(output)` loads the model.
        steps, tokens: optimizer steps taken and training tokens read, all sittings of the run together.
        seconds: time spent, all sittings together.
        loss: mean training loss over the steps of the last line of metrics.jsonl, in nats per token
            (with label smoothing, if any).
        validation_loss, validation_bits_per_byte: after the last step, in nats per token and bits per byte of text
            (not a number for a task).
        validation_accuracy: of a task, the share of right answers; None for a text.
        model, tokenizer: as trained, the model in evaluation mode.
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
    """The run cannot go on; the message is one sentence and the last complete checkpoint stands."""


class TrainingInterrupted(Exception):
    """A signal ended the run after a checkpoint; the message says how to resume.

    Attributes:
        exit_code: what a shell expects of a program that this signal ended: 130 for SIGINT, 143 for SIGTERM.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
