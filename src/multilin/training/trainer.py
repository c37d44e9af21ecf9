"""The training entry: a recipe goes in, a run folder comes out."""

import contextlib
import math
import shlex
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from torch.distributed import DistError
from transformers import TrainerCallback, set_seed

from multilin.errors import InputError, plural, system_error
from multilin.files.lock import locked_folder
from multilin.inference.adapters import reach
from multilin.training.assemble import build_model, check_model, read_data
from multilin.training.checkpoints import checkpoint_folder, checkpoint_step
from multilin.training.host_master import check_host_master
from multilin.training.outcomes import RunResult, StopRequest, TrainingFailed, TrainingInterrupted
from multilin.training.precision import tf32_beside_bf16
from multilin.training.processes import join_processes, recipe_decides, were_restarted
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe
from multilin.training.report import draw_loss, write_card
from multilin.training.resolve import resolve_recipe
from multilin.training.run_folder import RunFolder
from multilin.training.transformers_trainer import RunTrainer


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: TrainingProgress | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    began: float | None = None,
) -> RunResult:
    """Train the model a recipe describes and leave everything about the run in its output folder.

    Under torchrun or `accelerate launch` every process calls this and they train together. What a step reads and draws
    at random does not depend on their number, so a run may go on with more or fewer of them. When torchrun starts them
    again, as one has died, they go on at the last checkpoint.

    Args:
        recipe: what to train, on what, how, and where to.
        resume: continue the run in the output folder at its last checkpoint.
        overwrite: replace the run in the output folder.
        progress: told of everything the run does, in the main process; None shows nothing.
        callbacks: callbacks of transformers' Trainer to call at every step, after our own.
        began: `time.monotonic()` when the recipe's `training.minutes` began; now by default.

    Raises:
        InputError: the recipe, the text or the output folder cannot be used; nothing was written.
        TrainingFailed: a loss that is not finite, or a full disk; the last checkpoint stands.
        TrainingInterrupted: SIGINT or SIGTERM, after a checkpoint.
    """
    with recipe_decides(recipe.training):
        return _train(
            recipe,
            resume=resume,
            overwrite=overwrite,
            progress=progress or TrainingProgress(),
            callbacks=callbacks,
            began=time.monotonic() if began is None else began,
        )


def _train(
    recipe: Recipe,
    *,
    resume: bool,
    overwrite: bool,
    progress: TrainingProgress,
    callbacks: Sequence[TrainerCallback],
    began: float,
) -> RunResult:
    folder, given = RunFolder(recipe.output), recipe
    recipe = resolve_recipe(folder.with_its_batch(recipe) if resume else recipe)
    if not (resume and recipe.model.start):  # which is checked below, from an undamaged checkpoint
        check_model(recipe)
    devices = join_processes()
    if were_restarted():
        resume = folder.last_checkpoint() is not None or (folder.recipe.exists() and not overwrite)
        overwrite = overwrite and not resume
        recipe = resolve_recipe(folder.with_its_batch(given)) if resume else recipe  # they may be more or fewer now
    if recipe.training.master == "host":
        check_host_master(recipe.training, devices)
    if not devices.is_main_process:
        progress = TrainingProgress()
    with (
        _lost_processes_in_one_sentence(folder),
        _opened(folder, recipe, devices, resume=resume, overwrite=overwrite) as checkpoint,
    ):
        with devices.main_process_first():
            text = read_data(recipe, progress.prepare, checkpoint)
        check_model(recipe, len(text.tokenizer), checkpoint)
        with _failures_in_one_sentence(folder):
            set_seed(recipe.training.seed)
            model = build_model(recipe, text, checkpoint)
            if devices.is_main_process:
                folder.begin(recipe, text, checkpoint, resume=resume)
            if recipe.training.lora is not None:
                progress.message(reach(model))
            devices.wait_for_everyone()
            with StopRequest() as stop_request, tf32_beside_bf16(recipe.training.precision):
                trainer = RunTrainer(model, recipe, text, folder, progress, stop_request, began)
                for callback in callbacks:
                    trainer.add_callback(callback)
                _run(trainer, checkpoint, progress, resume=resume)
            if not trainer.callback.is_finished:
                again = f"`{shlex.join(['multilin', 'train', str(folder.path), '--resume'])}`"
                advice = f"its checkpoint is saved, and {again} continues there"
                if folder.last_checkpoint() is None:
                    advice = f"no checkpoint was saved, as every step was left out; {again} begins anew"
                raise TrainingInterrupted(
                    f"stopped after {trainer.callback.place(trainer.state)}; {advice}",
                    # On several devices the signal may have reached another process only.
                    stop_request.signal_number or signal.SIGTERM,
                )
            return _finish(trainer)


@contextlib.contextmanager
def _opened(
    folder: RunFolder, recipe: Recipe, devices: PartialState, *, resume: bool, overwrite: bool
) -> Iterator[Path | None]:
    """Keep the folder for this run alone; the result, on every process, is the checkpoint to go on from."""
    with contextlib.ExitStack() as stack:
        step = 0
        if devices.is_main_process:
            stack.enter_context(locked_folder("output", recipe.output))
            newest = folder.check(recipe, resume=resume, overwrite=overwrite)
            step = 0 if newest is None else checkpoint_step(newest)
        if devices.num_processes > 1:
            step = int(broadcast(torch.tensor(step, device=devices.device)))
        yield checkpoint_folder(folder.checkpoints, step) if step else None


def _run(trainer: RunTrainer, checkpoint: Path | None, progress: TrainingProgress, *, resume: bool) -> None:
    if checkpoint is None and resume:
        progress.message(f"no checkpoint in {trainer.folder.checkpoints}: starts at the first step")
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.finish_checkpoint()
    finally:
        progress.stop()
        trainer.close()


def _finish(trainer: RunTrainer) -> RunResult:
    """Write the model, the plot and the model card."""
    trainer.accelerator.wait_for_everyone()
    folder, meter = trainer.folder, trainer.callback.meter
    lines = folder.read_metrics()
    last = lines[-1]
    if "validation_loss" not in last:
        raise TrainingFailed("the loss on the validation text after the last step is not finite")
    trainer.publish_model()
    result = RunResult(
        output=folder.path,
        steps=trainer.state.global_step,
        tokens=meter.tokens,
        seconds=meter.seconds,
        loss=last["loss"],
        validation_loss=last["validation_loss"],
        validation_bits_per_byte=last.get("validation_bits_per_byte", math.nan),
        validation_accuracy=last.get("validation_accuracy"),
        model=trainer.bare_model(),
        tokenizer=trainer.text.tokenizer,
    )
    if trainer.is_world_process_zero():
        _warn_of_few_steps(trainer.recipe, trainer.state.global_step)
        draw_loss(lines, folder.plot)
        write_card(trainer.recipe, result, folder.card)
    trainer.accelerator.wait_for_everyone()
    return result


def _warn_of_few_steps(recipe: Recipe, steps: int) -> None:
    """Say so where the clock ended a run before its learning rate had risen to its peak."""
    minutes, warmup_steps = recipe.training.minutes, recipe.schedule.warmup_steps or 0
    if minutes is not None and steps <= warmup_steps and steps < recipe.training.num_steps:
        warnings.warn(
            f"training.minutes: {minutes:g} were enough for {plural(steps, 'step')} only, and the learning rate rises "
            f"for {warmup_steps} (schedule.warmup_steps); give more minutes, or a smaller model or batch",
            stacklevel=3,
        )


def _stands(folder: RunFolder) -> str:
    last = folder.last_checkpoint()
    return f"the checkpoint of step {checkpoint_step(last)} stands" if last else "no checkpoint was saved yet"


@contextlib.contextmanager
def _failures_in_one_sentence(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except (InputError, BrokenPipeError):
        raise
    except TrainingFailed as failure:
        raise TrainingFailed(f"{failure}; {_stands(folder)}") from failure.__cause__
    except OSError as error:
        raise TrainingFailed(f"the run in {folder.path} stopped: {system_error(error)}") from error


@contextlib.contextmanager
def _lost_processes_in_one_sentence(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except TrainingFailed:
        raise
    except RuntimeError as error:
        if not (isinstance(error, DistError) or "gloo" in str(error)):
            raise
        raise TrainingFailed(
            f"the run in {folder.path} stopped, as another of its processes has ended; {_stands(folder)}, and --resume "
            "goes on there"
        ) from error
