"""A model whose weights, gradients and optimizer are divided among devices (FSDP2), and its checkpoints (DCP).

Every layer is gathered before it computes, so its operators see whole tensors, and divided again afterwards. Each
tensor is divided by rows (dimension 0). A checkpoint is safetensors files, one of every process, which any number of
processes reads.
"""

import concurrent.futures
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from multilin.errors import InputError
from multilin.training import checkpoints
from multilin.training.recipe import TrainingRecipe

SHARDS = "shards"  # folder of a checkpoint


def check_shard(plan: TrainingRecipe) -> None:
    """Refuse settings that do not work with a sharded model.

    Raises:
        InputError: the first such setting.
    """
    whole = TrainingRecipe()
    for name in ("communication", "lora", "compile"):
        if plan.shard != "none" and (value := getattr(plan, name)) != getattr(whole, name):
            given = "adapters" if name == "lora" else repr(value)
            raise InputError(
                f"training.{name}: {given} given with training.shard {plan.shard!r}, which takes "
                f"{getattr(whole, name)!r} only"
            )


def shard(model: PreTrainedModel, device: torch.device) -> None:
    """Divide every layer, and the rest of the model, among all processes, in place; all begin with equal weights.

    Weights are gathered, and gradients summed, in float32: norms take no bf16 weights beside float32 inputs. Autocast
    makes matrix products bf16, as without sharding, and the numbers are the same.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = next(child for child in model.base_model.children() if isinstance(child, nn.ModuleList))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if hasattr(model, "token_losses"):  # validation calls it instead of the model
        register_fsdp_forward_method(model, "token_losses")


class ShardWriter:
    """Writes this process's parts of the model and of the optimizer in the background; every process has one.

    A copy of the parts stays in host memory from one checkpoint to the next: new memory would take longer than copying.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")  # the processes confer in the background, apart from training
        pinned = torch.cuda.is_available()
        self._copies = DefaultStager(StagingOptions(pinned, False, False, False))

    def write(
        self, folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer
    ) -> concurrent.futures.Future[Any]:
        """Begin to write a checkpoint; model and optimizer may change as soon as this returns.

        Returns:
            A future that is done when every process has written its part.
        """
        tensors, groups = _parts(model, optimizer)
        if dist.get_rank() == 0:
            model.config.save_pretrained(str(folder))
            checkpoints.write_json(folder / "optimizer.json", groups)
        writer = HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True)
        writing = async_save(tensors, storage_writer=writer, process_group=self._group, async_stager=self._copies)
        return writing.upload_completion if isinstance(writing, AsyncSaveResponse) else writing


def read_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the model and the optimizer, sharded or not, from a checkpoint of any number of processes.

    Raises:
        InputError: the checkpoint is damaged, or belongs to another model or optimizer.
    """
    tensors, groups = _parts(model, optimizer)
    with checkpoints.loading(folder / "optimizer.json"):
        saved = checkpoints.read_groups(folder)
        checkpoints.check_groups(saved, groups)
    with checkpoints.loading(folder / SHARDS), warnings.catch_warnings():
        reader = HuggingFaceStorageReader(str(folder / SHARDS))
        try:
            warnings.filterwarnings("ignore", "torch.distributed is")  # not initialised: one process is enough
            load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
        except CheckpointException as error:  # no Exception, but it holds one of every process that failed
            raise next(reason for reason, _ in error.failures.values()) from None
        slots: dict[str, dict[str, Any]] = {}
        for key, value in tensors.items():
            slot, name = key.split("/", 1)
            slots.setdefault(slot, {})[name] = value
        # Not strict: a weight that is tied to another is stored once.
        distributed.set_model_state_dict(model, slots.pop("model"), options=distributed.StateDictOptions(strict=False))
        state: Any = {
            name: {slot: values[name] for slot, values in slots.items() if name in values} for name in own_names(model)
        }
        distributed.set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": saved})


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The tensors of the model and of the optimizer, "slot/parameter" to tensor, and the optimizer's groups."""
    weights: Any = distributed.get_model_state_dict(model)
    state: Any = distributed.get_optimizer_state_dict(model, optimizer)
    tensors: dict[str, torch.Tensor] = {f"model/{name}": weights[name] for name in own_names(model) if name in weights}
    for name, slots in state["state"].items():
        tensors |= {f"{slot}/{name}": value for slot, value in slots.items()}
    return tensors, state["param_groups"]


def own_names(model: nn.Module) -> list[str]:
    """The names of parameters and buffers, each once; the state dict has tied parameters twice."""
    return [name for kind in (model.named_parameters(), model.named_buffers()) for name, _ in kind]
