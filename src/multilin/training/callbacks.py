"""What happens around each step: the finite check, the metrics, and when to validate, save and stop."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from multilin.training.metrics import Meter
from multilin.training.outcomes import TrainingFailed
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import TrainingRecipe
from multilin.training.signals import StopRequest


class StepCallback(TrainerCallback):  # type: ignore[misc]
    """Follows every optimizer step of a run and decides what comes after it.

    Args:
        plan: how often to log, validate and save.
        meter: sums losses, tokens and time.
        progress: told of each step and each complete line of metrics.
        writers: each stores every complete line of metrics.
        stop_request: notes a signal that asks the run to end.
        describe_batch: step to the blocks it reads, for the message about a loss that is not finite.
        skips_nonfinite: leave out a step whose loss or gradient is not finite, instead of ending the run.
    """

    def __init__(
        self,
        *,
        plan: TrainingRecipe,
        meter: Meter,
        progress: TrainingProgress,
        writers: Sequence[Callable[[dict[str, Any]], None]],
        stop_request: StopRequest,
        describe_batch: Callable[[int], str],
        skips_nonfinite: bool = False,
    ) -> None:
        self.skips_nonfinite = skips_nonfinite
        self.plan, self.meter, self.progress, self.writers = plan, meter, progress, writers
        self.stop_request, self.describe_batch = stop_request, describe_batch
        self.grad_norm: torch.Tensor | float = 0.0  # set by the trainer when it clips
        self._step_loss = self._step_norm = self._learning_rate = 0.0
        self._skips = False
        self._line: dict[str, Any] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self.meter.start()
        self.progress.start(state.global_step, args.max_steps)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse a step that would spoil the weights, or leave it out.

        Raises:
            TrainingFailed: the loss or the gradient is not finite; the weights are still those of the step before.
        """
        loss, norm = self.meter.take_step_loss(), self.grad_norm
        # One transfer for both: on a GPU each one waits for all work in flight.
        loss_and_norm = torch.stack([loss.float(), torch.as_tensor(norm, device=loss.device).float()])
        step_loss, step_norm = loss_and_norm.tolist()
        finite = math.isfinite(step_loss) and math.isfinite(step_norm)
        self._skips = _on_any_device(not finite) if self.skips_nonfinite else False
        if self._skips:
            self._warn_of_skipping(state.global_step + 1)
            kwargs["optimizer"].zero_grad(set_to_none=True)  # without gradients an optimizer leaves everything as it is
            return
        self._step_loss, self._step_norm = step_loss, step_norm
        if not finite:
            what, value = ("gradient norm", step_norm) if math.isfinite(step_loss) else ("loss", step_loss)
            step = state.global_step + 1
            raise TrainingFailed(f"the {what} of step {step} is {value}, in the batch of {self.describe_batch(step)}")

    def _warn_of_skipping(self, step: int) -> None:
        if self.meter.skipped_steps == 0:
            warnings.warn(
                f"the loss or the gradient of step {step} is not finite, in the batch of {self.describe_batch(step)}: "
                "this step and others like it are left out, and counted as skipped_steps in metrics.jsonl",
                stacklevel=2,
            )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the learning rate the step was made with, before the schedule moves on."""
        self._learning_rate = float(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Measure the step and decide what follows it."""
        step = state.global_step
        last = step >= args.max_steps
        stop = _on_any_device(self.stop_request.signal_number is not None)
        if self._skips:
            self.meter.skip_step()
        else:
            self.meter.end_step(self._step_loss)
        self.progress.step(step)
        control.should_evaluate = last or _due(step, self.plan.eval_every_steps)
        control.should_save = last or stop or _due(step, self.plan.save_every_steps)
        control.should_training_stop = last or stop
        if control.should_evaluate or _due(step, self.plan.log_every_steps):
            self._line = self.meter.line(
                step,
                learning_rate=self._learning_rate,
                grad_norm=self._step_norm,
                average=_mean_over_devices,
            )
            if self.skips_nonfinite:
                self._line["skipped_steps"] = self.meter.skipped_steps
        if not control.should_evaluate:
            self._finish_line()
        return control

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Complete the line of a step that was validated."""
        if self._line is not None:
            self._line |= kwargs["metrics"]
        self._finish_line()

    def _finish_line(self) -> None:
        if self._line is not None:
            for write in self.writers:
                write(self._line)
            self.progress.line(self._line)
            self._line = None


def _on_any_device(flag: bool) -> bool:
    return flag if PartialState().num_processes == 1 else _mean_over_devices(float(flag)) > 0


def _mean_over_devices(value: float) -> float:
    state = PartialState()
    if state.num_processes == 1:
        return value
    return float(reduce(torch.tensor(value, device=state.device), reduction="mean"))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
