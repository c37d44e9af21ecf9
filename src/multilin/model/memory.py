"""Estimate the memory of a model before it is built, and find the memory that this machine has left.

Parameters, gradients and the optimizer's numbers are counted. Activations are estimated from the shapes of the matrices
at 60 to 100 % of their measured memory (30 % for mixers). The estimate is low on purpose: a refused model would almost
certainly have run out of memory.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.filesize import decimal
from torch import Tensor, nn
from transformers import PreTrainedModel

from multilin.errors import InputError
from multilin.ops.linear_cross_entropy import rows_of_chunk

FLOAT_BYTES, ID_BYTES = 4, 8
_KEPT_PER_OUTPUT = 2  # numbers kept for the backward pass per output of a matrix
_READ_AT_ONCE = 4  # vectors of the hidden size held for each token that is read, without gradients


def check_memory(subject: str, needed: float, device: torch.device | str = "cpu") -> None:
    """Refuse work that needs more bytes of memory than a device has left.

    Raises:
        InputError: the work does not fit; the message is `subject`, "would take at least", and both numbers of bytes.
    """
    left = available_memory(device)
    if left is not None and needed > left:
        figures = f"{decimal(int(needed))} of memory, and this machine has {decimal(left)} left"
        raise InputError(f"{subject} would take at least {figures}")


def available_memory(device: torch.device | str = "cpu") -> int | None:
    """Bytes that this process can still allocate on a device; None if the system does not tell."""
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_limits(), default=None)


def _limits() -> Iterator[int]:
    """Bytes that this process may still allocate under each limit: the machine's, the container's and the shell's."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    for limit, used, statistics in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with contextlib.suppress(OSError, ValueError, StopIteration):
            folder = Path("/sys/fs/cgroup")
            lines = (folder / statistics).read_text().splitlines()
            cached = int(next(line for line in lines if line.startswith("inactive_file ")).split()[1])
            yield int((folder / limit).read_text()) - int((folder / used).read_text()) + cached
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
        if allowed != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            yield allowed - pages * os.sysconf("SC_PAGE_SIZE")


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, on any device; shared parameters count once."""
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def activation_bytes(
    model: PreTrainedModel, num_tokens: int, *, number_bytes: int = FLOAT_BYTES, recomputes: bool = False
) -> int:
    """Bytes of the activations that training keeps from the forward pass for the backward pass.

    Args:
        model: the model, on any device, also meta.
        num_tokens: number of tokens of all sequences in the pass.
        number_bytes: bytes of one number of an activation.
        recomputes: keep only the input of each layer (gradient checkpointing).
    """
    config = model.config
    inputs = config.num_hidden_layers * config.hidden_size
    outputs = _KEPT_PER_OUTPUT * sum(len(matrix) for matrix in _matrices(model))
    kept = inputs + (outputs // max(config.num_hidden_layers, 1) if recomputes else outputs)
    return num_tokens * (kept * number_bytes + _logit_bytes(model))


def loss_bytes(model: PreTrainedModel, num_tokens: int, device: torch.device) -> int:
    """Bytes of the logits and gradients that the loss holds at the same time on a device.

    The result is 0 for GPT-2 and Llama: they hold the logits of all tokens, which `activation_bytes` counts.
    """
    vocab_size = model.config.vocab_size
    if _logit_bytes(model):
        return 0
    return 2 * FLOAT_BYTES * vocab_size * min(num_tokens, rows_of_chunk(vocab_size, device))


def check_reading(field: str, model: PreTrainedModel, num_rows: int, num_tokens: int, *, all_logits: bool) -> None:
    """Refuse if `num_rows` sequences of `num_tokens` tokens, read at once without gradients, exceed the memory.

    Raises:
        InputError: the memory does not suffice; the message begins with `field`, the setting with its value.
    """
    token_bytes = _READ_AT_ONCE * model.config.hidden_size * FLOAT_BYTES + (_logit_bytes(model) if all_logits else 0)
    needed = num_rows * num_tokens * token_bytes
    check_memory(f"{field} given, but reading {num_rows} x {num_tokens} tokens at once", needed, model.device)


def _matrices(model: PreTrainedModel) -> Iterator[Tensor]:
    """The matrices of the model without embeddings and output projection."""
    modules = [model.get_output_embeddings(), *(m for m in model.modules() if isinstance(m, nn.Embedding))]
    others = {id(parameter) for module in modules if module is not None for parameter in module.parameters()}
    return (p for p in model.parameters() if p.ndim > 1 and id(p) not in others)


def _logit_bytes(model: PreTrainedModel) -> int:
    """Bytes of a token's logits and their gradient or logarithms; 0 if the model scores tokens in chunks."""
    return 0 if hasattr(model, "token_losses") else 2 * model.config.vocab_size * FLOAT_BYTES
