"""The processes that train together, as torchrun and `accelerate launch` start them."""

import os

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from multilin.training.metrics import mean_over_devices


def accelerator_or_cpu() -> torch.device:
    """The accelerator that this machine has, or the CPU.

    Unasked, PyTorch names the one that it was built for, and the builds that pip takes on Linux are for CUDA.
    """
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def num_processes() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", 1))


def join_processes() -> PartialState:
    """Connect to the other processes of the run, if there are any.

    The store in which the processes of a node find each other outlives them, so those that torchrun starts again need
    names of their own in it: https://github.com/pytorch/pytorch/issues/135712. Over several nodes their count of starts
    may differ; torchrun must be told to make a new store there (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).
    """
    starts = _restarts()
    if starts and os.environ.get("GROUP_WORLD_SIZE") == "1" and not dist.is_initialized():
        store, rank, world_size = next(rendezvous("env://"))
        dist.init_process_group(store=PrefixStore(f"start-{starts}", store), rank=rank, world_size=world_size)
    return PartialState(cpu=not torch.accelerator.is_available())


def were_restarted() -> bool:
    """True in every process if torchrun has restarted the processes of any node after one had died."""
    return on_any_device(_restarts() > 0)


def on_any_device(flag: bool) -> bool:
    """Whether the flag is true in any process; every process calls this."""
    return mean_over_devices(float(flag)) > 0


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
