"""Writes and reads checkpoints: the weights, the optimizer and the progress of a run, exact to the bit.

A checkpoint holds no pickles, and any number of processes can read it.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as distributed
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from multilin.errors import system_error
from multilin.files import atomic_files
from multilin.runs import checkpoints
from multilin.runs.files import ADAPTER_WEIGHTS
from multilin.training.adapters import in_model, save_adapters
from multilin.training.fsdp import SHARDS, ShardWriter, own_tensors, read_shards
from multilin.training.outcomes import TrainingFailed
from multilin.training.processes import rank, wait_for_all, world_size
from multilin.training.run_folder import RunFolder
from multilin.training.settings import TrainingRecipe

_WHOLE = distributed.StateDictOptions(full_state_dict=True, cpu_offload=True)


class Saver:
    """Writes and reads the model and the checkpoints of a run; every process has such an object.

    Args:
        model: the module that the optimizer changes.
        optimizer: the optimizer of the model.
        plan: the section `training` of the recipe.
        folder: the folder of the run.
    """

    def __init__(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, plan: TrainingRecipe, folder: RunFolder
    ) -> None:
        self.model, self.optimizer, self.plan, self.folder = model, optimizer, plan, folder
        self._shards = ShardWriter() if plan.shard != "none" and world_size() > 1 else None
        self._background = ThreadPoolExecutor(1)
        self._writing: tuple[int, Future[None]] | None = None  # step and future of the checkpoint in the background

    def write_model(self, folder: Path) -> None:
        """Write the model in Hugging Face's layout, or its adapters in PEFT's layout, gathered from all processes.

        Raises:
            OSError: the folder cannot be written.
        """
        weights = distributed.get_model_state_dict(self.model, options=_WHOLE) if world_size() > 1 else None
        if rank() != 0:
            return
        if self._shards is not None and weights is not None:
            weights = {name: weights[name] for name in own_tensors(self.model) if name in weights}
        if self.plan.lora is None:
            self.model.save_pretrained(str(folder), state_dict=weights)
        else:
            save_adapters(self.model, folder, weights)

    def publish_model(self) -> None:
        """Write the model's files into the run folder itself; each file is complete or absent."""
        if rank() == 0:
            with atomic_files(self.folder.path) as partial:
                self.write_model(partial)
        else:
            self.write_model(self.folder.path)

    def write_checkpoint(self, progress: dict[str, Any]) -> None:
        """Write a checkpoint; for a sharded model, a background thread completes the checkpoint.

        If every step was skipped, the optimizer has no state yet, and no checkpoint is written.

        Args:
            progress: plain data, which includes `step`.

        Raises:
            TrainingFailed: this checkpoint, or the one before it, could not be written.
        """
        step, parent = progress["step"], self.folder.checkpoints
        self.finish()
        if not self.optimizer.state:
            return  # to save an empty state, PyTorch would take a step first
        with self._reported(step), contextlib.ExitStack() as stack:
            if rank() == 0:
                stack.enter_context(checkpoints.published(parent, step, self.plan.keep_checkpoints))
            wait_for_all()  # every process writes into the folder, so it must exist
            folder = checkpoints.partial_folder(parent, step)
            if rank() == 0:
                checkpoints.write_json(folder / checkpoints.PROGRESS, progress)
                self.folder.write_record(folder)
            if self._shards is not None:
                write = self._shards.copy(folder, self.model, self.optimizer)
                self._writing = step, self._background.submit(_publish, stack.pop_all(), write)
            else:
                self._write_whole(folder)
                wait_for_all()
        if self._writing is None:
            wait_for_all()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written in the background, if there is one.

        Raises:
            TrainingFailed: the checkpoint could not be written.
        """
        if self._writing is not None:
            (step, writing), self._writing = self._writing, None
            with self._reported(step):
                writing.result()

    def close(self) -> None:
        """End the background thread, after it has written the current checkpoint."""
        self._background.shutdown()

    def read_checkpoint(self, folder: Path) -> None:
        """Load the weights and the optimizer.

        Raises:
            InputError: the checkpoint is damaged, or belongs to another model or optimizer.
        """
        if (folder / SHARDS).is_dir():
            read_shards(folder, self.model, self.optimizer)
            return
        is_whole = self.plan.lora is None
        path = folder / ("model.safetensors" if is_whole else ADAPTER_WEIGHTS)
        with checkpoints.loading(path):
            tensors = checkpoints.read_tensors(path)
            weights: dict[str, Any] = {**(tensors if is_whole else in_model(tensors, self.model))}
            # Not strict: a weight that is tied to another is stored once.
            options = distributed.StateDictOptions(full_state_dict=True, strict=False)
            distributed.set_model_state_dict(self.model, weights, options=options)
        state = checkpoints.read_optimizer(folder)
        with checkpoints.loading(folder / "optimizer.json"):
            checkpoints.check_groups(state["param_groups"], self.optimizer.state_dict()["param_groups"])
        with checkpoints.loading(folder / "optimizer.safetensors"):
            options = distributed.StateDictOptions(full_state_dict=True)
            distributed.set_optimizer_state_dict(self.model, self.optimizer, state, options=options)

    @contextlib.contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointException) as error:
            where, reason = self.folder.checkpoints, system_error(error) if isinstance(error, OSError) else error
            raise TrainingFailed(f"the checkpoint of step {step} could not be written to {where} ({reason})") from error

    def _write_whole(self, folder: Path) -> None:
        self.write_model(folder)
        state = distributed.get_optimizer_state_dict(self.model, self.optimizer, options=_WHOLE)
        if rank() == 0:
            checkpoints.write_optimizer(folder, state)


def _publish(stack: contextlib.ExitStack, write: Callable[[], None]) -> None:
    """Wait until every process has written its part of the checkpoint; closing the stack then publishes it."""
    with stack:
        write()
