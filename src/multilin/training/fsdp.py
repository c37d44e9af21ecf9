"""Divides a model's weights, gradients and optimizer among devices (FSDP2), and writes its checkpoints (DCP).

A layer's weights are gathered while the layer computes, so that its operators see whole tensors. Tensors are
divided by rows (dimension 0). A checkpoint has one safetensors file per process; any number of processes can read it.
"""

import functools
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from multilin.errors import InputError
from multilin.model.factory import layers_of
from multilin.runs import checkpoints
from multilin.training.settings import TrainingRecipe

SHARDS = "shards"  # folder in a checkpoint


def check_shard(plan: TrainingRecipe) -> None:
    """Refuse settings that do not work with a sharded model.

    Raises:
        InputError: names the first setting that does not work.
    """
    whole = TrainingRecipe()
    for name in ("communication", "lora", "compile"):
        if plan.shard != "none" and (value := getattr(plan, name)) != getattr(whole, name):
            given = "adapters" if name == "lora" else repr(value)
            raise InputError(
                f"training.{name}: {given} given, but training.shard {plan.shard!r} works with "
                f"{getattr(whole, name)!r} only"
            )


def shard(model: PreTrainedModel, device: torch.device, **methods: Callable[..., torch.Tensor]) -> None:
    """Divide every layer, and the rest of the model, among all processes, in place.

    Weights are gathered, and gradients summed, in float32, since norms do not accept bf16 weights with float32 inputs.
    Autocast computes matrix products in bf16, as without sharding, with the same results.

    Args:
        model: the whole model, with the same weights in every process.
        device: to compute on.
        methods: functions that take the model. Each becomes a method of the model that gathers weights as forward does.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name, function in methods.items():
        setattr(model, name, functools.partial(function, model))
    for name in ("token_losses", *methods):  # validation calls token_losses, not forward
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


class ShardWriter:
    """Writes this process's parts of the model and the optimizer in the background; every process has a writer.

    Each copy reuses the host memory of the previous copy, since allocating memory takes longer than copying.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")  # processes coordinate here while training uses its own group
        self._copies: dict[str, torch.Tensor] = {}

    def copy(self, folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Copy the content of a checkpoint; the model and the optimizer may change as soon as this method returns.

        Returns:
            A function that writes the copy, in any thread, and returns when every process has called it and written.
        """
        tensors, groups = _parts(model, optimizer)
        if dist.get_rank() == 0:
            model.config.save_pretrained(str(folder))
            checkpoints.write_json(folder / "optimizer.json", groups)
        for name, tensor in tensors.items():
            if name not in self._copies:
                self._copies[name] = _on_host(tensor)
            _own_part(self._copies[name]).copy_(_own_part(tensor))
        writer = HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True)
        return functools.partial(save, self._copies, storage_writer=writer, process_group=self._group)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for this process's part of a tensor, with the same DTensor layout."""
    part = _own_part(tensor)
    memory = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
    # Not DTensor.from_local, which would move it to the device of the mesh.
    as_part: Any = DTensor
    return as_part(memory, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else memory


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def read_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the model and the optimizer, sharded or not, from a checkpoint that any number of processes wrote.

    Raises:
        InputError: the checkpoint is damaged, or belongs to another model or optimizer.
    """
    distributed.get_optimizer_state_dict(model, optimizer)  # creates a new optimizer's tensors
    tensors, groups = _parts(model, optimizer)
    with checkpoints.loading(folder / "optimizer.json"):
        saved = checkpoints.read_groups(folder)
        checkpoints.check_groups(saved, groups)
        for own, group in zip(groups, saved, strict=True):
            if own["params"] != group["params"]:
                raise ValueError("its groups have other parameters")
    with checkpoints.loading(folder / SHARDS), warnings.catch_warnings():
        reader = HuggingFaceStorageReader(str(folder / SHARDS))
        try:
            warnings.filterwarnings("ignore", "torch.distributed is")  # not initialised: one process is enough
            load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
        except CheckpointException as error:  # not an Exception; it holds one per failed process
            raise next(reason for reason, _ in error.failures.values()) from None
    for own, group in zip(optimizer.param_groups, saved, strict=True):
        own.update({name: value for name, value in group.items() if name != "params"})


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """All tensors of model and optimizer, named "slot/parameter", and the parameter groups with parameters' names."""
    # The call leaves out non-persistent buffers, and reshards parameters that validation left gathered.
    kept = model.state_dict().keys()
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model/{name}": tensor for name, tensor in own_tensors(model).items() if name in kept}
    for parameter, slots in optimizer.state.items():
        tensors |= {f"{slot}/{names[parameter]}": value for slot, value in slots.items()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return tensors, groups


def own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name. Tied parameters occur once, unlike in a state dict."""
    return dict(itertools.chain(model.named_parameters(), model.named_buffers()))
