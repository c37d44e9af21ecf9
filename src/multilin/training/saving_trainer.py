"""transformers' Trainer with our checkpoints: no pickles, resumed bit for bit, read by any number of processes.

Overrides Trainer's private methods that write and read checkpoints.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as distributed
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel, Trainer

from multilin.errors import system_error
from multilin.files import atomic_files
from multilin.inference.run_files import ADAPTER_WEIGHTS
from multilin.training import checkpoints
from multilin.training.adapters import in_model, save_adapters
from multilin.training.callbacks import StepCallback
from multilin.training.host_master import HostMaster
from multilin.training.outcomes import TrainingFailed
from multilin.training.recipe import Recipe
from multilin.training.run_folder import RunFolder
from multilin.training.sharding import SHARDS, ShardWriter, own_tensors, read_shards

_WHOLE = distributed.StateDictOptions(full_state_dict=True, cpu_offload=True)


class SavingTrainer(Trainer):  # type: ignore[misc]
    """Writes and reads the model and the checkpoints of a run; `RunTrainer` sets the attributes.

    Attributes:
        recipe: with every default filled in.
        folder: of the run.
        callback: has the figures of the run so far.
        host: keeps the model in host memory, if the recipe says so.
        background: a thread in which a checkpoint is published.
        shards: writes the parts of a model that is divided among processes; None for one that each holds as a whole.
    """

    recipe: Recipe
    folder: RunFolder
    callback: StepCallback
    host: HostMaster | None
    background: ThreadPoolExecutor
    shards: ShardWriter | None
    _writing: tuple[int, Future[None]] | None = None  # step and end of the checkpoint in the background

    @property
    def master(self) -> Any:
        """The module that the optimizer changes and checkpoints keep: the trained model, or its floats on the host."""
        return self.model if self.host is None else self.host.model

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in Hugging Face's layout, or its adapters in PEFT's, gathered from all devices.

        Raises:
            OSError: the folder cannot be written.
        """
        model = self.accelerator.unwrap_model(self.master, keep_torch_compile=False)
        weights = distributed.get_model_state_dict(self.master, options=_WHOLE) if self.args.world_size > 1 else None
        if not self.is_world_process_zero():
            return
        if self.shards is not None and weights is not None:
            weights = {name: weights[name] for name in own_tensors(self.master) if name in weights}
        folder = Path(output_dir or self.folder.path)
        if self.recipe.training.lora is None:
            model.save_pretrained(str(folder), state_dict=weights)
        else:
            save_adapters(model, folder, weights)

    def publish_model(self) -> None:
        """Put the model at the top of the run folder, each file complete or not there."""
        if self.is_world_process_zero():
            with atomic_files(self.folder.path) as partial:
                self.save_model(str(partial))
        else:
            self.save_model()

    def bare_model(self) -> PreTrainedModel:
        """The model as it was before training wrapped it, for use."""
        return self.accelerator.unwrap_model(self.master, keep_fp32_wrapper=False, keep_torch_compile=False).eval()

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        step, parent, wait = self.state.global_step, self.folder.checkpoints, self.accelerator.wait_for_everyone
        self.finish_checkpoint()
        if not bare_optimizer(self.optimizer).state:
            return  # every step was skipped: PyTorch would make a state by a step of its own, to save it
        with self.callback.paused("saving"):
            with self._reported(step), contextlib.ExitStack() as stack:
                if self.is_world_process_zero():
                    keep = self.recipe.training.keep_checkpoints
                    stack.enter_context(checkpoints.published(parent, step, keep))
                wait()  # until the folder is there, which every process writes into
                folder = checkpoints.partial_folder(parent, step)
                self._write_record(folder)
                if self.shards is not None:
                    write = self.shards.copy(folder, self.master, bare_optimizer(self.optimizer))
                    self._writing = step, self.background.submit(_publish, stack.pop_all(), write)
                else:
                    self._write_whole(folder)
                    wait()
            if self.control.should_training_stop:
                self.finish_checkpoint()
            if self._writing is None:
                wait()

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that is written in the background, if there is one, is complete.

        Raises:
            TrainingFailed: it could not be written.
        """
        if self._writing is not None:
            (step, writing), self._writing = self._writing, None
            with self._reported(step):
                writing.result()

    @contextlib.contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointException) as error:
            where, reason = self.folder.checkpoints, system_error(error) if isinstance(error, OSError) else error
            raise TrainingFailed(f"the checkpoint of step {step} could not be written to {where} ({reason})") from error

    def _write_whole(self, folder: Path) -> None:
        self.save_model(str(folder))
        state = distributed.get_optimizer_state_dict(self.master, bare_optimizer(self.optimizer), options=_WHOLE)
        if self.is_world_process_zero():
            checkpoints.write_optimizer(folder, state)

    def _write_record(self, folder: Path) -> None:
        states = {name: holder.state_dict() for name, holder in self._clocks()}
        if self.is_world_process_zero():
            for name, state in states.items():
                checkpoints.write_json(folder / name, state)
            self.folder.write_record(folder)
            self.state.save_to_json(str(folder / checkpoints.STATE))

    def _clocks(self) -> list[tuple[str, Any]]:
        """The objects with progress to save (schedule, meter, clock), each after the name of its file."""
        clocks = [("schedule.json", self.lr_scheduler), ("meter.json", self.callback.meter)]
        return clocks if self.callback.limit is None else [*clocks, ("clock.json", self.callback.limit)]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if Path(resume_from_checkpoint, SHARDS).is_dir():
            return  # to be read with the optimizer
        is_whole = self.recipe.training.lora is None
        path = Path(resume_from_checkpoint) / ("model.safetensors" if is_whole else ADAPTER_WEIGHTS)
        with checkpoints.loading(path):
            weights: dict[str, Any] = {**checkpoints.read_tensors(path)}
            if not is_whole:
                weights = in_model(weights, self.accelerator.unwrap_model(self.master, keep_torch_compile=False))
            # Not strict: a weight that is tied to another is stored once.
            options = distributed.StateDictOptions(full_state_dict=True, strict=False)
            distributed.set_model_state_dict(model or self.master, weights, options=options)
        if self.host is not None:
            self.host.send()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / SHARDS).is_dir():
            read_shards(folder, self.master, bare_optimizer(self.optimizer))
        else:
            self._load_whole_optimizer(folder)
        for name, holder in self._clocks():
            with checkpoints.loading(folder / name):
                values, own = checkpoints.read_json(folder / name), holder.state_dict()
                checkpoints.check_like(values, own)
                holder.load_state_dict(values)

    def _load_whole_optimizer(self, folder: Path) -> None:
        state = checkpoints.read_optimizer(folder)
        with checkpoints.loading(folder / "optimizer.json"):
            checkpoints.check_groups(state["param_groups"], bare_optimizer(self.optimizer).state_dict()["param_groups"])
        with checkpoints.loading(folder / "optimizer.safetensors"):
            options = distributed.StateDictOptions(full_state_dict=True)
            distributed.set_optimizer_state_dict(self.master, bare_optimizer(self.optimizer), state, options=options)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing: every pass seeds its own random numbers."""


def _publish(stack: contextlib.ExitStack, write: Callable[[], None]) -> None:
    """Publish a checkpoint, by leaving its stack, when every process has written its part."""
    with stack:
        write()


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    bare: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return bare
