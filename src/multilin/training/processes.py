"""The processes that train together, as torchrun, `accelerate launch` and Ray start them."""

import os

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


def accelerator_or_cpu() -> torch.device:
    """The accelerator that this machine has, or the CPU.

    Unasked, PyTorch names the one that it was built for, and the builds that pip takes on Linux are for CUDA.
    """
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def num_processes() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", 1))


def join_processes() -> torch.device:
    """Connect to the other processes of the run, if there are any; the result is the device of this process.

    The store in which the processes of a node find each other outlives them, so those that torchrun starts again need
    names of their own in it: https://github.com/pytorch/pytorch/issues/135712. Over several nodes their count of starts
    may differ; torchrun must be told to make a new store there (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).
    """
    device = accelerator_or_cpu()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if num_processes() > 1 and not dist.is_initialized():
        store, number, size = next(rendezvous("env://"))
        if _restarts() and os.environ.get("GROUP_WORLD_SIZE") == "1":
            store = PrefixStore(f"start-{_restarts()}", store)
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=store, rank=number, world_size=size)
    return device


def world_size() -> int:
    """The number of processes that have joined."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def wait_for_all() -> None:
    """Return when every process has come here."""
    if world_size() > 1:
        dist.barrier()


def sum_over_processes(value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor that each process has, on the device on which processes exchange tensors."""
    if world_size() == 1:
        return value
    on_gpu = dist.get_backend() == "nccl"
    total = value.to(torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu", copy=True)
    dist.all_reduce(total)
    return total


def mean_over_processes(value: float) -> float:
    """The mean of a number that each process has."""
    if world_size() == 1:
        return value
    return float(sum_over_processes(torch.tensor(value, dtype=torch.float64)) / world_size())


def in_any_process(flag: bool) -> bool:
    """Whether the flag is true in any process; every process calls this."""
    return mean_over_processes(float(flag)) > 0


def were_restarted() -> bool:
    """True in every process if torchrun has restarted the processes of any node after one had died."""
    return in_any_process(_restarts() > 0)


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
