"""Connects the processes that train together, started by torchrun, `accelerate launch` or Ray."""

import contextlib
import os
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from multilin.errors import as_input_error
from multilin.training.environment import is_launched, left_over, num_processes
from multilin.training.precision import resolve_precision
from multilin.training.settings import TrainingRecipe

# Beginnings of other variables that accelerate and transformers read; they would override the recipe.
_HIDDEN = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "KUBEFLOW_", "FORK_LAUNCHED")
_OFF, _ON = ("no", "false", "f", "n", "off", "0", "none", ""), ("yes", "true", "t", "y", "on", "1")
_DEVICE = "ACCELERATE_TORCH_DEVICE"


def accelerator_or_cpu() -> torch.device:
    """The accelerator that this machine has, or the CPU.

    `check_available` is needed, since PyTorch otherwise names the accelerator it was built for, even if it is absent.
    """
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def join_processes() -> torch.device:
    """Connect to the other processes of the run, if there are any, and return the device of this process.

    Processes of a node find each other in a store that outlives them, so processes that torchrun restarts use new names
    in the store: https://github.com/pytorch/pytorch/issues/135712. On several nodes the counts of restarts may differ,
    so set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun there, which makes a new store.

    Raises:
        InputError: the other processes cannot be reached.
    """
    device = accelerator_or_cpu()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if num_processes() > 1 and not dist.is_initialized():
        place = "MASTER_ADDR: the processes cannot reach each other at this address"
        with as_input_error(lambda reason: f"{place} ({reason})", dist.DistError):
            store, number, size = next(rendezvous("env://"))
            if _restarts() and os.environ.get("GROUP_WORLD_SIZE") == "1":
                store = PrefixStore(f"start-{_restarts()}", store)
            backend = dist.get_default_backend_for_device(device)
            dist.init_process_group(backend, store=store, rank=number, world_size=size)
    return device


def world_size() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def wait_for_all() -> None:
    """Wait until every process has called this."""
    if world_size() > 1:
        dist.barrier()


def sum_over_processes(value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all processes, on the device on which processes exchange tensors."""
    if world_size() == 1:
        return value
    on_gpu = dist.get_backend() == "nccl"
    total = value.to(torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu", copy=True)
    dist.all_reduce(total)
    return total


def mean_over_processes(value: float) -> float:
    """The mean of a number over all processes."""
    if world_size() == 1:
        return value
    return float(sum_over_processes(torch.tensor(value, dtype=torch.float64)) / world_size())


def in_any_process(flag: bool) -> bool:
    """Whether the flag is true in any process; every process calls this function."""
    return mean_over_processes(float(flag)) > 0


def were_restarted() -> bool:
    """True, in every process, if torchrun restarted the processes of any node because a process had died."""
    return in_any_process(_restarts() > 0)


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@contextlib.contextmanager
def recipe_decides(plan: TrainingRecipe) -> Iterator[None]:
    """Hide environment variables that transformers would follow instead of the recipe; launchers' variables stay.

    Warns of each variable that contradicts the recipe.

    Raises:
        InputError: only some of a launcher's variables are set, see `num_processes`.
    """
    hidden = {name: os.environ.pop(name) for name in left_over()}
    try:
        if os.environ.get("RANK", "0") == "0":
            for sentence in _overruled(plan):
                warnings.warn(sentence, stacklevel=4)
        hidden |= {name: os.environ.pop(name) for name in [*os.environ] if name.startswith(_HIDDEN)}
        yield
    finally:
        os.environ.update(hidden)


def _overruled(plan: TrainingRecipe) -> Iterator[str]:
    device, is_float32 = accelerator_or_cpu().type, resolve_precision(plan.precision) == "float32"
    alike = {  # variable: the recipe's field, and values that agree with it
        "ACCELERATE_MIXED_PRECISION": ("precision", () if is_float32 else ("bf16",)),
        "ACCELERATE_DYNAMO_BACKEND": ("compile", ("inductor",) if plan.compile else ()),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("batch_size", ("1", "auto")),
        "ACCELERATE_USE_FSDP": ("shard", () if plan.shard == "none" else _ON),
        **{f"ACCELERATE_USE_{name}": ("shard", ()) for name in ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")},
    }
    for name, (field, values) in alike.items():
        if (value := os.environ.get(name, "")).lower() not in (*_OFF, *values):
            yield f"{name}={value} in the environment is ignored: training.{field} is {getattr(plan, field)}"
    uses_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() not in _OFF
    asked = {
        "ACCELERATE_USE_CPU": "cpu" if uses_cpu else "",
        _DEVICE: "" if is_launched() else os.environ.get(_DEVICE, ""),
    }
    for name, value in asked.items():
        if value.removesuffix(":0") not in ("", device):
            yield f"{name}={os.environ[name]} in the environment is ignored: training runs on {device}"
    for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"):  # PyTorch has read them already
        if device == "cuda" and is_float32 and os.environ.get(name, "0") != "0":
            yield f"{name}={os.environ[name]} in the environment lowers float32 products to tf32; unset it"
