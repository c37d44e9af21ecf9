"""The raw outputs of a trained model fed back as its inputs, computed in parallel and one by one, and decoded."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from multilin.errors import InputError
from multilin.inference.generate_run import text_codec
from multilin.inference.rollout import rollout, rollout_sequential
from multilin.inference.settings import RolloutSettings
from multilin.model import MultilinForCausalLM
from multilin.model.memory import check_memory
from multilin.runs.load import Run


@dataclass(frozen=True)
class Way:
    """One way of computing the outputs.

    token_ids: the likeliest token of each output; text: the same, decoded.
    seconds: for all outputs, the model loaded and warm.
    """

    token_ids: list[int]
    text: str
    seconds: float


@dataclass(frozen=True)
class RolloutResult:
    """Both ways of computing the outputs, and how they compare.

    num_prompt_tokens: tokens read first, the start token included.
    speedup: sequential over parallel seconds.
    largest_difference: over the outputs, the norm of the difference relative to that of the output.
    """

    prompt: str
    num_prompt_tokens: int
    num_steps: int
    dtype: str
    parallel: Way
    sequential: Way
    speedup: float
    largest_difference: float


def rollout_run(run: Run, prompt: str, settings: RolloutSettings) -> RolloutResult:
    """Feed a model's raw outputs back as its inputs after a prompt, all at once and one after the other.

    Raises:
        InputError: a model that is not linear, no prompt, more positions than the model reads, or outputs that grow
            beyond the largest number of the dtype.
    """
    if not isinstance(run.model, MultilinForCausalLM):
        raise InputError(f"run: a {run.model.config.model_type} model given, but only an all-linear model rolls out")
    if not prompt:
        raise InputError("prompt: none given, but a rollout goes on from a text; give --prompt with some")
    ids = text_codec(run.tokenizer).encode(prompt, is_start=True)
    _check_memory(run, settings)
    model = copy.deepcopy(run.model).to(dtype=getattr(torch, settings.dtype))
    prompt_BT = torch.tensor([ids], device=model.device)
    parallel, fast = _time(partial(rollout, model, prompt_BT), settings.num_steps, model.device)
    sequential, slow = _time(partial(rollout_sequential, model, prompt_BT), settings.num_steps, model.device)
    norms, differences = sequential.norm(dim=-1), (parallel - sequential).norm(dim=-1)
    if not (norms + differences).isfinite().all():
        num_finite = int(norms[0].isfinite().cumprod(0).sum())
        other = " or --dtype float64" if settings.dtype == "float32" else ""
        raise InputError(
            f"num_steps: {settings.num_steps} given, but the outputs grow beyond {settings.dtype} after {num_finite}; "
            f"give fewer{other}"
        )
    return RolloutResult(
        prompt=prompt,
        num_prompt_tokens=len(ids),
        num_steps=settings.num_steps,
        dtype=settings.dtype,
        parallel=_way(parallel, run.tokenizer, fast),
        sequential=_way(sequential, run.tokenizer, slow),
        speedup=slow / fast,
        # An output may be zero, and is then expected to be exactly that.
        largest_difference=float((differences / norms.clamp(min=torch.finfo(norms.dtype).tiny)).max()),
    )


def _check_memory(run: Run, settings: RolloutSettings) -> None:
    """Refuse more memory than there is for a map over all positions of each layer, and the outputs of both ways."""
    config, positions = run.model.config, run.longest_text or 0
    numbers = (config.num_hidden_layers + 2) * positions**2
    numbers += 2 * min(settings.num_steps, positions) * config.vocab_size
    number_bytes = getattr(torch, settings.dtype).itemsize
    check_memory(f"num_steps: {settings.num_steps} given, but a rollout", numbers * number_bytes, run.model.device)


def _time(function: Callable[[int], Tensor], num_steps: int, device: torch.device) -> tuple[Tensor, float]:
    """The outputs and the seconds they took; a few steps come before, so that libraries are loaded."""
    function(min(num_steps, 3))
    _synchronize(device)
    begin = time.perf_counter()
    result = function(num_steps)
    _synchronize(device)
    return result, time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _way(outputs_BNV: Tensor, tokenizer: PreTrainedTokenizerFast, seconds: float) -> Way:
    token_ids = outputs_BNV[0].argmax(dim=-1).tolist()
    return Way(token_ids, tokenizer.decode(token_ids), seconds)
