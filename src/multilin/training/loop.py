"""The training loop: a recipe goes in, a run folder comes out.

`train` opens the folder, reads the text, builds the model and the optimizer, loads a checkpoint, takes the steps, and
writes the model. Other modules have the details: `step.py` computes a step, `saving.py` writes and reads checkpoints,
and `fsdp.py` divides a model among devices.
"""

import contextlib
import dataclasses
import math
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from transformers import PreTrainedModel

from multilin.data.prepared import PreparedText
from multilin.data.tasks import TaskText
from multilin.errors import InputError, plural, system_error
from multilin.files.lock import locked_folder
from multilin.runs.adapters import reach
from multilin.runs.checkpoints import checkpoint_folder, checkpoint_step, read_progress
from multilin.training.assemble import build_model, check_model, read_data, report_validation, training_order
from multilin.training.host_master import HostMaster, check_host_master
from multilin.training.losses import evaluate, score_answers
from multilin.training.metrics import Meter
from multilin.training.optimizers import build_optimizer
from multilin.training.order import BlockOrder
from multilin.training.outcomes import RunResult, StopRequest, TrainingFailed, TrainingInterrupted
from multilin.training.precision import autocast_dtype, tf32_beside_bf16
from multilin.training.processes import (
    in_any_process,
    join_processes,
    rank,
    recipe_decides,
    sum_over_processes,
    wait_for_all,
    were_restarted,
)
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe
from multilin.training.report import draw_loss, write_card
from multilin.training.resolve import resolve_recipe
from multilin.training.run_folder import RunFolder
from multilin.training.saving import Saver
from multilin.training.schedules import rate_factor
from multilin.training.step import (
    Batch,
    TrainedLoss,
    clip_gradient,
    decayed_parameters,
    distribute,
    find_nonfinite_pass,
    forward_backward,
    seed_all,
    step_batches,
)
from multilin.training.time_limit import TimeLimit
from multilin.training.trackers import check_trackers, open_trackers


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: TrainingProgress | None = None,
    before_step: Callable[[int, PreTrainedModel], object] | None = None,
    began: float | None = None,
) -> RunResult:
    """Train the model that a recipe describes, and write the run to its output folder.

    Under torchrun or `accelerate launch`, every process calls this function, and the processes train together. The text
    and random numbers of a step do not depend on the number of processes, so a run may resume with another number. When
    torchrun restarts all processes because one has died, they continue from the last checkpoint.

    Args:
        recipe: what to train, on what, how, and where to.
        resume: continue the run in the output folder from its last checkpoint.
        overwrite: replace the run in the output folder.
        progress: receives the progress of the run, in the main process; None shows nothing.
        before_step: called with the number of each step, from 1, and the model, in every process.
        began: start of the time limit `training.minutes`, as a value of `time.monotonic()`; now by default.

    Raises:
        InputError: the recipe, the text or the output folder cannot be used; nothing was written.
        TrainingFailed: the loss is not finite, or the disk is full; the last checkpoint is kept.
        TrainingInterrupted: SIGINT or SIGTERM stopped the run after a checkpoint.
    """
    began = time.monotonic() if began is None else began
    folder, given = RunFolder(recipe.output), recipe
    with recipe_decides(recipe.training), _failures_in_one_sentence(folder):
        recipe = resolve_recipe(folder.with_its_batch(given) if resume else given)
        device = join_processes()
        if were_restarted():
            resume = folder.last_checkpoint() is not None or (folder.recipe.exists() and not overwrite)
            overwrite = overwrite and not resume
            recipe = resolve_recipe(folder.with_its_batch(given)) if resume else recipe  # processes may be fewer
        if recipe.training.master == "host":
            check_host_master(recipe.training, device)
        if progress is None or rank() != 0:
            progress = TrainingProgress()
        with _opened(folder, recipe, resume=resume, overwrite=overwrite) as checkpoint:
            knows_vocabulary = recipe.model.start is not None or recipe.tokenizer.kind is not None
            if knows_vocabulary:
                check_model(recipe, checkpoint=checkpoint)
            with _main_process_first():
                text = read_data(recipe, progress.prepare, checkpoint)
            if not knows_vocabulary:
                check_model(recipe, len(text.tokenizer), checkpoint)
            seed_all(recipe.training.seed)
            model = build_model(recipe, text, checkpoint)
            if rank() == 0:
                if isinstance(text, PreparedText):
                    report_validation(recipe, text, progress)
                folder.begin(recipe, text, checkpoint)
            if recipe.training.lora is not None:
                progress.message(reach(model))
            if checkpoint is None and resume:
                progress.message(f"no checkpoint in {folder.checkpoints}: training starts at the first step")
            wait_for_all()
            with StopRequest() as stop, tf32_beside_bf16(recipe.training.precision):
                run = _build_run(recipe, text, folder, model, device, progress, began)
                try:
                    if checkpoint is not None:
                        _load(run, checkpoint)
                    _take_steps(run, stop, before_step)
                    run.saver.finish()
                finally:
                    progress.stop()
                    run.close()
            if not run.is_finished:
                raise _interrupted(run, stop)
            return _finish(run)


@dataclasses.dataclass
class _Run:
    """All that the steps of a run need.

    model: computes the gradients. master: the module that the optimizer changes; with `master: host` it is not `model`.
    loss: the loss of the model, compiled and distributed among processes.
    step: number of the last completed step.
    is_finished: whether the run has completed all its steps.
    """

    recipe: Recipe
    text: PreparedText | TaskText
    folder: RunFolder
    device: torch.device
    progress: TrainingProgress
    model: PreTrainedModel
    master: PreTrainedModel
    host: HostMaster | None
    loss: nn.Module
    order: BlockOrder
    optimizer: torch.optim.Optimizer
    base_rates: list[float]
    saver: Saver
    meter: Meter
    limit: TimeLimit | None
    log: list[Callable[[dict[str, Any]], object]]
    close: Callable[[], object]
    step: int = 0
    is_finished: bool = False

    @property
    def state(self) -> dict[str, Any]:
        """The plain data that a checkpoint keeps besides weights and optimizer; every process calls this method."""
        clock = {} if self.limit is None else {"clock": self.limit.state_dict()}
        return {"step": self.step, "meter": self.meter.state_dict(), **clock}

    @property
    def place(self) -> str:
        """How far the run is, for a message."""
        if self.limit is None:
            return f"step {self.step} of {self.recipe.training.num_steps}"
        return f"step {self.step}, {100 * self.limit.share:.0f} % of the run"

    def describe_batch(self, step: int) -> str:
        """The blocks that a step reads, for a message."""
        blocks = self.recipe.training.global_batch_size or 0
        return self.order.describe((step - 1) * blocks, step * blocks)

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Context for a validation or a save, whose time counts for the run but not for training."""
        with self.meter.paused(), contextlib.nullcontext() if self.limit is None else self.limit.pause(name):
            yield


def _build_run(
    recipe: Recipe,
    text: PreparedText | TaskText,
    folder: RunFolder,
    model: PreTrainedModel,
    device: torch.device,
    progress: TrainingProgress,
    began: float,
) -> _Run:
    """The model on its device, its loss, optimizer and files, before the first step."""
    plan, tokens_per_step = recipe.training, (recipe.training.global_batch_size or 0) * recipe.model.n_positions
    order = training_order(recipe, model, text)
    host = HostMaster(model, device) if plan.master == "host" else None
    computing = model if host is None else host.copy
    smoothing = 0.0 if hasattr(model.config, "label_smoothing") else plan.label_smoothing or 0.0
    is_sparse = isinstance(text, TaskText) or text.train.description.is_chat
    loss = distribute(TrainedLoss(computing, smoothing, is_sparse=is_sparse), plan, device)
    optimizer = build_optimizer(recipe.optimizer, model, decayed=decayed_parameters(model))
    if host is not None:
        host.follow(optimizer)
    saver = Saver(model, optimizer, plan, folder)
    trackers = open_trackers(recipe, folder) if rank() == 0 else []

    def close() -> None:
        saver.close()
        for tracker in trackers:
            with contextlib.suppress(OSError):  # lines were sent before; an error here would hide why the run ended
                tracker.close()

    return _Run(
        recipe=recipe, text=text, folder=folder, device=device, progress=progress, model=computing, master=model,
        host=host, loss=loss, order=order, optimizer=optimizer,
        base_rates=[group["lr"] for group in optimizer.param_groups], saver=saver,
        meter=Meter(tokens_per_step), limit=_time_limit(recipe, text, began, tokens_per_step),
        log=[folder.append_metrics, *(tracker.log for tracker in trackers)] if rank() == 0 else [], close=close,
    )  # fmt: skip


def _time_limit(recipe: Recipe, text: PreparedText | TaskText, began: float, tokens_per_step: int) -> TimeLimit | None:
    if (minutes := recipe.training.minutes) is None:
        return None
    tokens = recipe.training.eval_max_tokens or sys.maxsize
    if not isinstance(text, TaskText):
        tokens = min(tokens, text.validation.num_tokens)
    return TimeLimit(minutes, recipe.training.num_steps, began, tokens / tokens_per_step)


def _load(run: _Run, checkpoint: Path) -> None:
    """Continue from a checkpoint."""
    saved = read_progress(checkpoint, run.state)
    run.saver.read_checkpoint(checkpoint)
    if run.host is not None:
        run.host.send()
    run.step = saved["step"]
    run.meter.load_state_dict(saved["meter"])
    if run.limit is not None:
        run.limit.load_state_dict(saved["clock"])


def _take_steps(run: _Run, stop: StopRequest, before_step: Callable[[int, PreTrainedModel], object] | None) -> None:
    """Train until the last step, or until a signal asks for a stop."""
    plan, limit = run.recipe.training, run.limit
    run.meter.start()
    if limit is not None:
        limit.start()
    run.is_finished = run.step >= plan.num_steps or (limit is not None and limit.is_ended)
    if run.step:
        run.progress.message(f"{'is complete' if run.is_finished else 'continues'} after step {run.step}")
    run.progress.start(run.step, plan.num_steps if limit is None else None)
    is_stopped = False
    while not (run.is_finished or is_stopped):
        step = run.step + 1
        if before_step is not None:
            before_step(step, run.model)
        rate = _set_rates(run)
        batches = step_batches(run.order, plan, step, run.device)
        loss = forward_backward(run.loss, batches, plan, step)
        norm = clip_gradient(run.master, run.recipe.optimizer.clip_norm)
        step_loss, step_norm, is_applied = _check_finite(run, step, batches, loss, norm)
        if is_applied:
            run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        run.step = step
        run.meter.end_step(step_loss if is_applied else None)
        is_stopped = _follow_step(run, stop, {"learning_rate": rate, "grad_norm": step_norm})


def _set_rates(run: _Run) -> float:
    """Set the learning rates of the next step; returns the rate of the first parameter group."""
    num_steps = run.recipe.training.num_steps if run.limit is None else run.limit.num_steps(run.step)
    factor = rate_factor(run.recipe.schedule, run.step, num_steps)
    for group, base in zip(run.optimizer.param_groups, run.base_rates, strict=True):
        group["lr"] = base * factor
    return float(run.optimizer.param_groups[0]["lr"])


def _check_finite(run: _Run, step: int, batches: list[Batch], loss: Tensor, norm: Tensor) -> tuple[float, float, bool]:
    """Loss and gradient norm, and whether to apply the step: if they are not finite, it would spoil the weights.

    Raises:
        TrainingFailed: the loss or the gradient is not finite, and the recipe does not skip such steps.
    """
    # One transfer for both: on a GPU each one waits for all work in flight.
    step_loss, step_norm = torch.stack([loss.float(), norm.to(loss.device).float()]).tolist()
    is_finite = math.isfinite(step_loss) and math.isfinite(step_norm)
    skips = run.recipe.optimizer.nonfinite == "skip"
    if not is_finite and (not skips or run.meter.skipped_steps == 0):
        found = find_nonfinite_pass(run.model, run.loss, batches, run.recipe.training, step)
        place, where = f", {found}" if found else "", f"in the batch of {run.describe_batch(step)}"
        if not skips:
            name, value = ("gradient norm", step_norm) if math.isfinite(step_loss) else ("loss", step_loss)
            raise TrainingFailed(f"the {name} of step {step} is {value}{place}, {where}")
        warnings.warn(
            f"the loss or the gradient of step {step} is not finite, {where}{place}: such steps are skipped, and "
            "counted as skipped_steps in metrics.jsonl",
            stacklevel=2,
        )
    is_applied = not in_any_process(not is_finite) if skips else True
    return step_loss, step_norm, is_applied


def _follow_step(run: _Run, stop: StopRequest, figures: dict[str, float]) -> bool:
    """After a step, log, validate and save if it is time to; return whether a signal asks for a stop."""
    step, plan, limit = run.step, run.recipe.training, run.limit
    if limit is not None:
        limit.advance(step)
        limit.is_ended = limit.is_over or step >= plan.num_steps
    run.is_finished = step >= plan.num_steps if limit is None else limit.is_ended
    may_pause = limit is None or limit.leaves_a_pause
    is_stopped = in_any_process(stop.signal_number is not None)
    run.progress.step(step, step / plan.num_steps if limit is None else limit.share)
    validates = run.is_finished or (may_pause and _due(step, plan.eval_every_steps))
    if validates or _due(step, plan.log_every_steps):
        line = run.meter.line(step, **figures)
        if run.recipe.optimizer.nonfinite == "skip":
            line["skipped_steps"] = run.meter.skipped_steps
        has_learned = run.meter.skipped_steps < step
        if validates and (has_learned or not run.is_finished):
            with run.paused("validation"):
                line |= _validate(run)
        line = {name: value for name, value in line.items() if value is not None and math.isfinite(value)}  # for JSON
        for log in run.log:
            log(line)
        run.progress.line(line)
        if run.is_finished and not has_learned:
            raise TrainingFailed(f"the loss or the gradient of each of the {plural(step, 'step')} was not finite")
    if run.is_finished or is_stopped or (may_pause and _due(step, plan.save_every_steps)):
        with run.paused("saving"):
            run.saver.write_checkpoint(run.state)
            if run.is_finished or is_stopped:
                run.saver.finish()
    return is_stopped


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _validate(run: _Run) -> dict[str, float]:
    """The results of a validation, by their names in metrics.jsonl; the random state of training is kept."""
    plan, length, text = run.recipe.training, run.recipe.model.n_positions, run.text
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    dtype = autocast_dtype(plan.precision)
    with torch.random.fork_rng(devices=devices), torch.autocast(run.device.type, dtype, enabled=dtype is not None):
        if isinstance(text, TaskText):
            number = text.validation.num_scored(length, plan.eval_max_tokens)
            blocks = text.validation.blocks(length)
            answers = score_answers(run.model, blocks, number=number, batch_size=plan.batch_size)
            return {"validation_loss": answers.loss, "validation_accuracy": answers.accuracy}
        limits = {"block_size": length, "batch_size": plan.batch_size, "max_tokens": plan.eval_max_tokens}
        result = evaluate(run.model, text.validation, **limits)
    return {"validation_loss": result.loss, "validation_bits_per_byte": result.bits_per_byte}


def _finish(run: _Run) -> RunResult:
    """Write the model, the plot and the model card."""
    wait_for_all()
    lines = run.folder.read_metrics()
    last = lines[-1]
    if "validation_loss" not in last:
        raise TrainingFailed("the loss on the validation text after the last step is not finite")
    run.saver.publish_model()
    result = RunResult(
        output=run.folder.path,
        steps=run.step,
        tokens=run.meter.tokens,
        seconds=run.meter.seconds,
        loss=last["loss"],
        validation_loss=last["validation_loss"],
        validation_bits_per_byte=last.get("validation_bits_per_byte", math.nan),
        validation_accuracy=last.get("validation_accuracy"),
        model=run.master.eval(),
        tokenizer=run.text.tokenizer,
    )
    if rank() == 0:
        _warn_of_few_steps(run.recipe, run.step)
        draw_loss(lines, run.folder.plot)
        write_card(run.recipe, result, run.folder.card)
    wait_for_all()
    return result


def _warn_of_few_steps(recipe: Recipe, steps: int) -> None:
    """Warn if the time limit ended a run before its learning rate reached its peak."""
    minutes, warmup_steps = recipe.training.minutes, recipe.schedule.warmup_steps or 0
    if minutes is not None and steps <= warmup_steps and steps < recipe.training.num_steps:
        warnings.warn(
            f"training.minutes: {minutes:g} given, enough for only {plural(steps, 'step')}, but the learning rate "
            f"rises for {warmup_steps} steps (schedule.warmup_steps); give more minutes, or a smaller model or batch",
            stacklevel=4,
        )


def _interrupted(run: _Run, stop: StopRequest) -> TrainingInterrupted:
    again = f"`{shlex.join(['multilin', 'train', str(run.folder.path), '--resume'])}`"
    advice = f"the checkpoint is saved, and {again} continues the run"
    if run.folder.last_checkpoint() is None:
        advice = f"no checkpoint was saved, as every step was skipped; {again} starts the run again"
    # The signal may have reached another process only.
    return TrainingInterrupted(f"stopped after {run.place}; {advice}", stop.signal_number or signal.SIGTERM)


@contextlib.contextmanager
def _opened(folder: RunFolder, recipe: Recipe, *, resume: bool, overwrite: bool) -> Iterator[Path | None]:
    """Context that locks the folder for this run; it yields, in every process, the checkpoint to continue from."""
    with contextlib.ExitStack() as stack:
        step = 0
        if rank() == 0:
            check_trackers(recipe)
            stack.enter_context(locked_folder("output", recipe.output))
            newest = folder.check(recipe, resume=resume, overwrite=overwrite)
            step = 0 if newest is None else checkpoint_step(newest)
        step = int(sum_over_processes(torch.tensor(step)))
        yield checkpoint_folder(folder.checkpoints, step) if step else None


@contextlib.contextmanager
def _main_process_first() -> Iterator[None]:
    """Context that the other processes enter only after the main process has entered and left it."""
    if rank() != 0:
        wait_for_all()
    yield
    if rank() == 0:
        wait_for_all()


@contextlib.contextmanager
def _failures_in_one_sentence(folder: RunFolder) -> Iterator[None]:
    """Context that turns a failure of a run into an error of one sentence, which also names the last checkpoint."""

    def where() -> str:
        last = folder.last_checkpoint()
        return f"the checkpoint of step {checkpoint_step(last)} is kept" if last else "no checkpoint was saved yet"

    try:
        yield
    except (InputError, BrokenPipeError):
        raise
    except TrainingFailed as failure:
        raise TrainingFailed(f"{failure}; {where()}") from failure.__cause__
    except OSError as error:
        raise TrainingFailed(f"the run in {folder.path} stopped: {system_error(error)}") from error
    except RuntimeError as error:
        if not (isinstance(error, DistError) or "gloo" in str(error)):
            raise
        raise TrainingFailed(
            f"the run in {folder.path} stopped because another process of the run has ended; {where()}, and --resume "
            "continues the run"
        ) from error
