"""The work around each step: the finite check, the metrics, and when to validate, save and stop."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from multilin.errors import plural
from multilin.training.metrics import Meter
from multilin.training.outcomes import StopRequest, TrainingFailed
from multilin.training.processes import on_any_device
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe
from multilin.training.time_limit import TimeLimit


class StepCallback(TrainerCallback):  # type: ignore[misc]
    """Follows every optimizer step of a run and decides what comes after it.

    Args:
        recipe: says how often to log, validate and save, and what to do if a loss or gradient is not finite.
        meter: sums losses, tokens and time.
        progress: told of each step and each complete line of metrics.
        writers: each stores every complete line of metrics.
        stop_request: notes a signal that asks the run to end.
        describe_batch: step to the blocks it reads, for the message about a loss that is not finite.
        find_nonfinite: repeats the passes of a step, and says where they first are not finite if it finds that.
        limit: the clock of a run that ends after a given time at most.

    Attributes:
        is_finished: whether the last step was made.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        meter: Meter,
        progress: TrainingProgress,
        writers: Sequence[Callable[[dict[str, Any]], None]],
        stop_request: StopRequest,
        describe_batch: Callable[[int], str],
        find_nonfinite: Callable[[], str | None],
        limit: TimeLimit | None = None,
    ) -> None:
        self.plan, self.skips_nonfinite = recipe.training, recipe.optimizer.nonfinite == "skip"
        self.meter, self.progress, self.writers = meter, progress, writers
        self.stop_request, self.describe_batch, self.limit = stop_request, describe_batch, limit
        self.find_nonfinite = find_nonfinite
        self.is_finished = False
        self.grad_norm: torch.Tensor | float = 0.0  # set by the trainer when it clips
        self._step_loss: float | None = None  # of a step that was applied
        self._step_norm = self._learning_rate = 0.0
        self._line: dict[str, Any] | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock; a run that is resumed after its end makes no further step."""
        self.meter.start()
        if self.limit is not None:
            self.limit.start()
        is_ended = self.limit is not None and self.limit.is_ended
        control.should_training_stop = self.is_finished = is_ended or state.global_step >= args.max_steps
        if state.global_step:
            how = "is complete" if self.is_finished else "continues"
            self.progress.message(f"{how} after step {state.global_step}")
        self.progress.start(state.global_step, args.max_steps if self.limit is None else None)

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse a step that would spoil the weights, or leave it out.

        Raises:
            TrainingFailed: the loss or the gradient is not finite; the weights are still those of the step before.
        """
        step, loss = state.global_step + 1, self.meter.take_step_loss()
        # One transfer for both: on a GPU each one waits for all work in flight.
        both = torch.stack([loss.float(), torch.as_tensor(self.grad_norm, device=loss.device).float()])
        step_loss, step_norm = both.tolist()
        finite = math.isfinite(step_loss) and math.isfinite(step_norm)
        if self.skips_nonfinite and on_any_device(not finite):
            if self.meter.skipped_steps == 0 and not finite:
                place = self.find_nonfinite()
                warnings.warn(
                    f"the loss or the gradient of step {step} is not finite, in the batch of "
                    f"{self.describe_batch(step)}{f', {place}' if place else ''}: this step and others like it are "
                    "left out, and counted as skipped_steps in metrics.jsonl",
                    stacklevel=2,
                )
            kwargs["optimizer"].zero_grad(set_to_none=True)  # without gradients an optimizer leaves everything as it is
            self._step_loss = None
            return
        self._step_loss, self._step_norm = step_loss, step_norm
        if not finite:
            name, value = ("gradient norm", step_norm) if math.isfinite(step_loss) else ("loss", step_loss)
            place = f", {found}" if (found := self.find_nonfinite()) else ""
            raise TrainingFailed(
                f"the {name} of step {step} is {value}{place}, in the batch of {self.describe_batch(step)}"
            )

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the learning rate the step was made with, before the schedule moves on."""
        self._learning_rate = float(kwargs["optimizer"].param_groups[0]["lr"])
        if self.limit is not None:
            self.limit.advance(state.global_step + 1)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Measure the step and decide what follows it."""
        step = state.global_step
        last = self.is_finished = step >= args.max_steps or (self.limit is not None and self.limit.is_over)
        if self.limit is not None:
            self.limit.is_ended = last
        may_pause = self.limit is None or self.limit.leaves_a_pause
        stop = on_any_device(self.stop_request.signal_number is not None)
        self.meter.end_step(self._step_loss)
        self.progress.step(step, step / args.max_steps if self.limit is None else self.limit.share)
        control.should_evaluate = last or (may_pause and _due(step, self.plan.eval_every_steps))
        control.should_save = last or stop or (may_pause and _due(step, self.plan.save_every_steps))
        control.should_training_stop = last or stop
        if control.should_evaluate or _due(step, self.plan.log_every_steps):
            self._line = self.meter.line(step, learning_rate=self._learning_rate, grad_norm=self._step_norm)
            if self.skips_nonfinite:
                self._line["skipped_steps"] = self.meter.skipped_steps
        if last and self.meter.skipped_steps >= step:
            self._finish_line()
            raise TrainingFailed(f"the loss or the gradient of each of the {plural(step, 'step')} was not finite")
        if not control.should_evaluate:
            self._finish_line()
        return control

    def place(self, state: TrainerState) -> str:
        """How far the run is, for a message."""
        if self.limit is None:
            return f"step {state.global_step} of {state.max_steps}"
        return f"step {state.global_step}, {100 * self.limit.share:.0f} % of the run"

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """A block that validates or saves: its time is none of training, but of the run."""
        with self.meter.paused(), contextlib.nullcontext() if self.limit is None else self.limit.pause(name):
            yield

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the line of a step that was validated."""
        self._finish_line(**kwargs["metrics"])

    def _finish_line(self, **figures: float) -> None:
        if self._line is not None:
            # JSON has no nan and infinity.
            self._line = {k: v for k, v in (self._line | figures).items() if v is not None and math.isfinite(v)}
            for write in self.writers:
                write(self._line)
            self.progress.line(self._line)
            self._line = None


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
