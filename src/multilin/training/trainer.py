"""The training entry: a recipe goes in, a run folder comes out."""

import contextlib
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, TrainerCallback, set_seed

from multilin.analysis.accuracy import score_answers
from multilin.analysis.evaluate import evaluate
from multilin.data.prepare import PreparedText
from multilin.data.task_text import TaskText
from multilin.errors import InputError
from multilin.messages import no_progress_bars
from multilin.progress import staged
from multilin.training.assemble import build_model, check_model, read_data, training_arguments, training_order
from multilin.training.callbacks import StepCallback
from multilin.training.checkpoints import WRITE_ERRORS, checkpoint_step
from multilin.training.communication import compress_gradients
from multilin.training.display import Display
from multilin.training.host_master import check_host_master
from multilin.training.metrics import Meter
from multilin.training.outcomes import RunResult, TrainingFailed, TrainingInterrupted
from multilin.training.precision import autocast_dtype
from multilin.training.recipe import Recipe, resolve_recipe
from multilin.training.report import draw_loss, write_card
from multilin.training.run_folder import RunFolder
from multilin.training.signals import StopRequest
from multilin.training.transformers_trainer import RunTrainer


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> RunResult:
    """Train the model a recipe describes and leave everything about the run in its output folder.

    Under torchrun or `accelerate launch` every process calls this and they train together.

    Args:
        recipe: what to train, on what, how, and where to.
        resume: continue the run in the output folder at its last checkpoint.
        overwrite: replace the run in the output folder.
        quiet: show no progress.
        callbacks: callbacks of transformers' Trainer to call at every step, after our own.

    Raises:
        InputError: the recipe, the text or the output folder cannot be used; nothing was written.
        TrainingFailed: a loss that is not finite, or a full disk; the last checkpoint stands.
        TrainingInterrupted: SIGINT or SIGTERM, after a checkpoint.
    """
    recipe = resolve_recipe(recipe)
    check_model(recipe)
    devices = PartialState(cpu=not torch.accelerator.is_available())
    if recipe.training.master == "host":
        check_host_master(recipe.training, devices)
    folder = RunFolder(recipe.output)
    if devices.is_main_process:
        folder.check(recipe, resume=resume, overwrite=overwrite)
    silent = contextlib.nullcontext()
    with devices.main_process_first(), staged() if devices.is_main_process else silent as progress:
        text = read_data(recipe, progress)

    check_model(recipe, len(text.tokenizer))
    with _failures_in_one_sentence(folder), no_progress_bars():
        if devices.is_main_process:
            folder.begin(recipe, text, resume=resume)
        devices.wait_for_everyone()
        set_seed(recipe.training.seed)
        model = build_model(recipe, text)
        with StopRequest() as stop_request, _display(recipe, silent=quiet or not devices.is_main_process) as display:
            trainer = _build_trainer(recipe, model, text, folder, stop_request, display, devices)
            for callback in callbacks:
                trainer.add_callback(callback)
            _run(trainer, folder, display, resume=resume)
        if trainer.state.global_step < recipe.training.max_steps:
            raise _interrupted(trainer, folder, stop_request)
        return _finish(recipe, trainer, folder, text)


def _build_trainer(
    recipe: Recipe,
    model: PreTrainedModel,
    text: PreparedText | TaskText,
    folder: RunFolder,
    stop_request: StopRequest,
    display: Display,
    devices: PartialState,
) -> RunTrainer:
    plan = recipe.training
    order = training_order(recipe, model, text, devices.num_processes)

    def validate(model: torch.nn.Module) -> dict[str, float]:
        return _validate(model, text, recipe)

    blocks_per_step = len(order) // plan.max_steps
    callback = StepCallback(
        plan=plan,
        skips_nonfinite=recipe.optimizer.nonfinite == "skip",
        meter=Meter(tokens_per_step=blocks_per_step * recipe.model.n_positions),
        display=display,
        writers=folder.metrics_writers(tensorboard=plan.tensorboard) if devices.is_main_process else [],
        stop_request=stop_request,
        describe_batch=lambda step: order.describe((step - 1) * blocks_per_step, step * blocks_per_step),
    )
    return RunTrainer(
        model=model,
        args=training_arguments(recipe, model, folder.checkpoints),
        recipe=recipe,
        order=order,
        folder=folder,
        validate=validate,
        callback=callback,
        wrap=compress_gradients if plan.communication == "int8" else None,
    )


def _validate(model: Any, text: PreparedText | TaskText, recipe: Recipe) -> dict[str, float]:
    """The figures of a validation, as metrics.jsonl names them."""
    plan, length = recipe.training, recipe.model.n_positions
    dtype = autocast_dtype(plan.precision)
    if isinstance(text, TaskText):
        number = min(text.validation.number, max(1, (plan.eval_max_tokens or sys.maxsize) // length))
        answers = score_answers(
            model, text.validation.blocks(length), number=number, batch_size=plan.batch_size, autocast_dtype=dtype
        )
        return {"validation_loss": answers.loss, "validation_accuracy": answers.accuracy}
    found = evaluate(
        model,
        text.validation,
        block_size=length,
        batch_size=plan.batch_size,
        max_tokens=plan.eval_max_tokens,
        autocast_dtype=dtype,
    )
    return {"validation_loss": found.loss, "validation_bits_per_byte": found.bits_per_byte}


def _run(trainer: RunTrainer, folder: RunFolder, display: Display, *, resume: bool) -> None:
    checkpoint = folder.last_checkpoint() if resume else None
    step = checkpoint_step(checkpoint) if checkpoint else 0
    if resume:
        display.message(f"continues after step {step}" if checkpoint else "no checkpoint was saved yet: starts again")
        if trainer.is_world_process_zero():
            folder.cut_metrics(step)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def _finish(recipe: Recipe, trainer: RunTrainer, folder: RunFolder, text: PreparedText | TaskText) -> RunResult:
    """Write the model, the plot and the model card."""
    trainer.accelerator.wait_for_everyone()
    trainer.publish_model()
    meter, lines = trainer.callback.meter, folder.read_metrics()
    result = RunResult(
        output=folder.path,
        steps=trainer.state.global_step,
        tokens=meter.tokens,
        seconds=meter.seconds,
        loss=lines[-1]["loss"],
        validation_loss=lines[-1]["validation_loss"],
        validation_bits_per_byte=lines[-1].get("validation_bits_per_byte", math.nan),
        validation_accuracy=lines[-1].get("validation_accuracy"),
        model=trainer.bare_model(),
        tokenizer=text.tokenizer,
    )
    if trainer.is_world_process_zero():
        folder.replace(folder.plot, lambda path: draw_loss(lines, path))
        folder.replace(folder.card, lambda path: write_card(recipe, result, path))
    trainer.accelerator.wait_for_everyone()
    return result


def _interrupted(trainer: RunTrainer, folder: RunFolder, stop_request: StopRequest) -> TrainingInterrupted:
    step, last = trainer.state.global_step, trainer.args.max_steps
    return TrainingInterrupted(
        f"stopped after step {step} of {last}; its checkpoint is saved, and "
        f"`multilin train {folder.path} --resume` continues there",
        # On several devices the signal may have reached another process only.
        stop_request.signal_number or signal.SIGTERM,
    )


@contextlib.contextmanager
def _display(recipe: Recipe, *, silent: bool) -> Iterator[Display]:
    display = Display(recipe.training.max_steps, silent=silent)
    try:
        yield display
    finally:
        display.stop()


@contextlib.contextmanager
def _failures_in_one_sentence(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except TrainingFailed as failure:
        last = folder.last_checkpoint()
        stands = f"the checkpoint of step {checkpoint_step(last)} stands" if last else "no checkpoint was saved yet"
        raise TrainingFailed(f"{failure}; {stands}") from failure.__cause__
    except WRITE_ERRORS as error:
        raise TrainingFailed(f"the run in {folder.path} stopped: {error}") from error
