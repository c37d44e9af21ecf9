"""One optimizer step: its batches, the loss of each forward pass, and the gradient."""

import contextlib
import functools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

from multilin.model.head import sequence_loss
from multilin.ops.linear_cross_entropy.portable import IGNORED
from multilin.ops.threads import adapt
from multilin.training.communication import compress_gradients
from multilin.training.fsdp import shard
from multilin.training.nonfinite import find_nonfinite
from multilin.training.order import BlockOrder
from multilin.training.precision import autocast_dtype
from multilin.training.processes import rank, sum_over_processes, world_size
from multilin.training.settings import TrainingRecipe

Batch = dict[str, Tensor]


class TrainedLoss(nn.Module):
    """The loss of a batch as one module, which DDP and torch.compile can wrap.

    Args:
        model: a causal language model whose forward returns a loss.
        label_smoothing: value for GPT-2 and Llama; multilin's own models have label smoothing in their config.
        is_sparse: whether many tokens have no target; GPT-2 and Llama then compute no logits for these.
    """

    def __init__(self, model: PreTrainedModel, label_smoothing: float, *, is_sparse: bool) -> None:
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing
        is_baseline = isinstance(model, GPT2LMHeadModel | LlamaForCausalLM)
        self.is_own = is_baseline and (is_sparse or label_smoothing > 0)

    def forward(self, batch: Batch, num_items: Tensor) -> Tensor:
        """The total loss of a batch's targets, divided by `num_items`."""
        if self.is_own:
            # A sharded model has the function as a method, which gathers its weights first.
            method = getattr(self.model, "baseline_loss", None)
            inputs: tuple[Any, ...] = batch | {"use_cache": False}, self.label_smoothing, num_items
            loss: Tensor = method(*inputs) if method else baseline_loss(self.model, *inputs)
            return loss
        loss = self.model(**batch, use_cache=False, num_items_in_batch=num_items).loss
        return loss


def baseline_loss(
    model: PreTrainedModel, inputs: Mapping[str, Any], label_smoothing: float = 0.0, num_items: Any = None
) -> Tensor:
    """The loss of GPT-2 or Llama, computed as our models do: logits in chunks, and only for tokens with a target.

    Args:
        model: GPT-2 or Llama.
        inputs: arguments of its forward, with `labels`: -100 for tokens without a target.
        label_smoothing: share of the target distribution that is spread evenly over the vocabulary.
        num_items: the number by which the total loss is divided; None takes the number of targets in `inputs`.
    """
    hidden_BTD = model.base_model(**{name: value for name, value in inputs.items() if name != "labels"})[0]
    hidden_ND, targets_N = hidden_BTD[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
    loss = sequence_loss(model.get_output_embeddings(), hidden_ND, targets_N, label_smoothing=label_smoothing)
    mean: Tensor = loss / ((targets_N != IGNORED).sum() if num_items is None else num_items)
    return mean


def distribute(loss: TrainedLoss, plan: TrainingRecipe, device: torch.device) -> nn.Module:
    """The loss module on its device, wrapped for several processes (FSDP2 or DDP), and compiled if the recipe says so.

    The result shares its parameters with the model.
    """
    wrapped: nn.Module = loss
    if world_size() > 1 and plan.shard == "fsdp":
        shard(loss.model, device, baseline_loss=baseline_loss)
    else:
        loss.to(device)
        if world_size() > 1:
            wrapped = DistributedDataParallel(loss, device_ids=[device] if device.type == "cuda" else None)
            if plan.communication == "int8":
                compress_gradients(wrapped)
    if plan.compile:
        wrapped.compile()  # in place
    return wrapped


def step_batches(order: BlockOrder, plan: TrainingRecipe, step: int, device: torch.device) -> list[Batch]:
    """The batches of this process in a step, one for each forward pass.

    A pass reads the same blocks for any number of processes.
    """
    size, passes = plan.split(world_size())
    batches = []
    for index in range(passes):
        first = (((step - 1) * passes + index) * world_size() + rank()) * size
        batch = default_collate([order[place] for place in range(first, first + size)])
        if device.type == "cuda":
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        batches.append({name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()})
    return batches


def forward_backward(loss: nn.Module, batches: list[Batch], plan: TrainingRecipe, step: int) -> Tensor:
    """Compute a step's gradient and add it to the parameters' gradients.

    The loss is the mean over the targets of all passes and processes; returns this process's part, times world_size.
    """
    loss.train()
    num_items = sum_over_processes(count_targets(batches))
    total: Tensor | None = None
    for index, batch in enumerate(batches):
        adapt()
        is_last = index == len(batches) - 1
        with contextlib.nullcontext() if is_last else _without_exchange(loss):
            part = pass_loss(loss, batch, num_items, plan, step, index)
            part.backward()  # type: ignore[no-untyped-call]
        total = part.detach() if total is None else total + part.detach()
    assert total is not None
    return total


def pass_loss(loss: nn.Module, batch: Batch, num_items: Tensor, plan: TrainingRecipe, step: int, index: int) -> Tensor:
    """The part of a step's loss that one of its passes computes, times the number of processes.

    The factor is needed since DDP and FSDP average gradients, while `num_items` counts the targets of all processes.
    """
    seed_pass(plan.seed, step, index * world_size() + rank())
    dtype = autocast_dtype(plan.precision)
    with torch.autocast(batch["labels"].device.type, dtype, enabled=dtype is not None):
        part: Tensor = world_size() * loss(batch, num_items)
    return part


def count_targets(batches: list[Batch]) -> Tensor:
    """The number of tokens that have a target, in all batches."""
    return torch.stack([(batch["labels"][:, 1:] != IGNORED).sum() for batch in batches]).sum()


def find_nonfinite_pass(
    model: PreTrainedModel, loss: nn.Module, batches: list[Batch], plan: TrainingRecipe, step: int
) -> str | None:
    """Describe where a step first is not finite, by repeating the step's passes in this process; see `find_nonfinite`.

    The result is None if the place cannot be found, as for sharded models, whose passes need all processes.
    """
    if plan.shard != "none" and world_size() > 1:
        return None
    alone = loss.module if isinstance(loss, DistributedDataParallel) else loss
    num_items = count_targets(batches) * world_size()
    for index, batch in enumerate(batches):
        again = functools.partial(pass_loss, alone, batch, num_items, plan, step, index)
        if found := find_nonfinite(model, again):
            return found
    return None


def _without_exchange(loss: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context in which each process adds up gradients without exchanging them."""
    return loss.no_sync() if isinstance(loss, DistributedDataParallel) else contextlib.nullcontext()


def seed_pass(seed: int, step: int, place: int) -> None:
    """Seed the random numbers of a pass, so that interruptions and the number of processes do not change them."""
    seed_all(int(np.random.SeedSequence([seed, step - 1, place]).generate_state(1)[0]))


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, numpy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def clip_gradient(model: nn.Module, most: float | None) -> Tensor:
    """Scale the gradient down to the norm `most`, unless `most` is None or 0; return the norm before clipping."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norm = nn.utils.clip_grad_norm_(parameters, most or float("inf"))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def decayed_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters with weight decay: matrices, except embeddings and tied outputs."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    parameters = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in parameters if parameter.ndim > 1 and id(parameter) not in embeddings]
