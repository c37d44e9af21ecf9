"""All-linear models as one linear map, and rollouts computed in parallel: raw outputs are fed back as inputs.

H is the head, W^T the embedding; F and C are the products of all layers' maps over features and over positions:

    O_n = H F W^T sum_{j<=n} C[n, j] t_j + b_n = Q sum_{j<=n} C[n, j] t_j + b_n        t_{n+1} = O_n after the prompt

Let the rows of T be the vectors fed back, and the rows of S their parts that come from prompt and biases. Let L
be the part of C between vectors fed back, shifted down by one row. Then

    T = S + L T Q^T = sum_p L^p S (Q^T)^p = (1 + X) (1 + X^2) (1 + X^4) ... S        X S = L S Q^T,   L^N = 0

so N outputs take log2 N squarings of L and Q. Q has rank D at most, so everything is computed in D dimensions.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedTokenizerFast

from multilin.errors import InputError, prefixed
from multilin.inference.generate import check_length
from multilin.inference.generate_run import text_codec
from multilin.inference.settings import RolloutSettings
from multilin.layers.base import Layout
from multilin.layers.linear import Linear
from multilin.model import MultilinForCausalLM
from multilin.model.embedding import check_ids, check_tokens
from multilin.model.memory import check_memory
from multilin.runs.load import Run

LinearMap = tuple[Tensor, Tensor, Tensor]
"""P (n, n), R (D, D), O (n, D) of a layer x -> P x R^T + O, as its method `linear_map` returns them."""


class Composed(NamedTuple):
    """A whole model: logits at t = Q sum_{j<=t} C[t, j] onehot(token_j) + b_t, in float64.

    tokens: Q (V, V); token u adds column u to the logits. mixing: C (n_ctx, n_ctx), a lower triangle.
    bias: b (n_ctx, V).
    """

    tokens: Float[Tensor, "V V"]
    mixing: Float[Tensor, "n n"]
    bias: Float[Tensor, "n V"]

    def logits(self, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """The model's logits, as weighted sums of columns of Q.

        Raises:
            InputError: ids that are not in the vocabulary, or more ids than the model has positions.
        """
        check_ids(input_ids, len(self.tokens))
        length, limit = input_ids.shape[1], len(self.mixing)
        if length > limit:
            raise InputError(
                f"n_positions: the text has {length} tokens, but this model reads at most {limit} (n_positions)"
            )
        columns_BTV = self.tokens.T[input_ids]
        return self.mixing[:length, :length] @ columns_BTV + self.bias[:length]


class _Factors(NamedTuple):
    """The model in D dimensions, where z = into t and O_n = head (features sum_j C[n, j] z_j + offset_n) + bias."""

    into_DV: Tensor
    mixing_NN: Tensor
    features_DD: Tensor
    offset_ND: Tensor
    head_VD: Tensor
    bias_V: Tensor | None


@torch.no_grad()
def compose(model: MultilinForCausalLM) -> Composed:
    """Write an all-linear model as a matrix for tokens, a lower-triangular matrix for positions, and a bias.

    Raises:
        InputError: a part of the model is not linear.

    Cost: memory for the V^2 numbers of Q.
    """
    factors = _factor(model, torch.float64)
    tokens_VV = factors.head_VD @ (factors.features_DD @ factors.into_DV)
    return Composed(tokens_VV, factors.mixing_NN, linear(factors.offset_ND, factors.head_VD, factors.bias_V))


@torch.no_grad()
def rollout(model: MultilinForCausalLM, prompt: Int[Tensor, "B T"], num_steps: int) -> Float[Tensor, "B N V"]:
    """Feed raw outputs (not the likeliest token) back as inputs, and compute all steps in parallel.

    Args:
        model: an all-linear model.
        prompt: (B, T) token ids, read as one-hot vectors.
        num_steps: N, the number of output vectors; the first is the output at the prompt's last token.

    Returns:
        (B, N, V), in the model's dtype, float32 at least. With a model in float64, the rollout takes twice the time and
        agrees with the recurrence to about 1e-14 instead of 1e-6 (untrained weights, 256 outputs).

    Raises:
        InputError: a model that is not linear, no prompt, no step, tokens that are not in the vocabulary, or more
            positions than the model has.

    Cost: log2 N products of N x N and D x D matrices; a product of (D, V) and (V, D), and one of (N, D) and (D, V).
    """
    factors = _factor(model, torch.promote_types(model.dtype, torch.float32))
    _check_request(model, prompt, num_steps, len(factors.mixing_NN))
    num_prompt = prompt.shape[1]
    fed = slice(num_prompt - 1, num_prompt + num_steps - 2)  # outputs that become inputs, one position later
    given_BTD = factors.into_DV.T[prompt]
    into_head_DD = factors.into_DV @ factors.head_VD
    hidden_BND = factors.mixing_NN[fed, :num_prompt] @ given_BTD @ factors.features_DD.T + factors.offset_ND[fed]
    start_BND = linear(hidden_BND, into_head_DD, None if factors.bias_V is None else factors.into_DV @ factors.bias_V)
    step_NN = factors.mixing_NN[fed, num_prompt : num_prompt + num_steps - 1]
    fed_BND = _sum_of_powers(step_NN, into_head_DD @ factors.features_DD, start_BND)
    z_BND = torch.cat([given_BTD, fed_BND], dim=1)
    num_read = z_BND.shape[1]
    wanted = slice(num_prompt - 1, num_read)
    hidden_BND = factors.mixing_NN[wanted, :num_read] @ z_BND @ factors.features_DD.T + factors.offset_ND[wanted]
    return linear(hidden_BND, factors.head_VD, factors.bias_V)


def _sum_of_powers(step_NN: Tensor, map_DD: Tensor, start_BND: Tensor) -> Tensor:
    """sum_p L^p S (G^T)^p for a strictly lower L, by repeated squaring of both."""
    total_BND, lag = start_BND, 1
    # L^lag reaches back `lag` rows at least: only its corner of rows from `lag` on is not zero, and only it is kept.
    corner_MM = step_NN[1:, :-1]
    while len(corner_MM):
        # Factors can move from G to L. Powers of G are kept at size 1, so that powers of L have the size of the
        # terms they add, and neither vanishes or explodes unless the result does.
        size = map_DD.abs().max()
        if size == 0:
            break
        corner_MM, map_DD = corner_MM * size, map_DD / size
        added_BMD = corner_MM @ total_BND[:, :-lag] @ map_DD.T
        total_BND = torch.cat([total_BND[:, :lag], total_BND[:, lag:] + added_BMD], dim=1)
        corner_MM, map_DD = corner_MM[lag:, lag:] @ corner_MM[:-lag, :-lag], map_DD @ map_DD
        lag *= 2
    return total_BND


@torch.no_grad()
def rollout_sequential(
    model: MultilinForCausalLM, prompt: Int[Tensor, "B T"], num_steps: int
) -> Float[Tensor, "B N V"]:
    """The same outputs as `rollout`, one step after the other through the model's layers, in the model's dtype.

    The arguments and errors are the same as for `rollout`, which is faster.
    """
    _check_request(model, prompt, num_steps, len(_linear_maps(model)[0][0]))
    embedding_VD = model.model.embedding.embed_tokens.weight
    states = [None] * len(model.model.layers)
    x_BTD, first, outputs = embedding_VD[prompt], 0, list[Tensor]()
    for _ in range(num_steps):
        layout = Layout(torch.arange(first, first + x_BTD.shape[1], device=prompt.device).expand(len(prompt), -1))
        first += x_BTD.shape[1]
        for index, layer in enumerate(model.model.layers):
            x_BTD, states[index] = layer(x_BTD, states[index], layout)
        output_BV = model.lm_head(x_BTD[:, -1] * model.config.final_scale)
        outputs.append(output_BV)
        x_BTD = (output_BV @ embedding_VD)[:, None]
    return torch.stack(outputs, dim=1)


def _factor(model: MultilinForCausalLM, dtype: torch.dtype) -> _Factors:
    maps = [[part.to(dtype) for part in parts] for parts in _linear_maps(model)]
    embedding_VD = model.model.embedding.embed_tokens.weight.to(dtype)
    bias_V = None if model.lm_head.bias is None else model.lm_head.bias.to(dtype)
    mixing_NN, features_DD, offset_ND = maps[0]
    for over_positions, over_features, offset in maps[1:]:
        mixing_NN, features_DD = over_positions @ mixing_NN, over_features @ features_DD
        offset_ND = over_positions @ offset_ND @ over_features.T + offset
    # The scale multiplies the small matrices, where it costs nothing.
    features_DD, offset_ND = features_DD * model.config.final_scale, offset_ND * model.config.final_scale
    return _Factors(embedding_VD.T, mixing_NN, features_DD, offset_ND, model.lm_head.weight.to(dtype), bias_V)


def _linear_maps(model: MultilinForCausalLM) -> list[LinearMap]:
    """The linear map of each layer."""
    maps: list[LinearMap] = []
    for index, layer in enumerate(model.model.layers):
        linear_map = getattr(layer, "linear_map", None)
        if linear_map is None:
            kind = type(layer).__name__
            raise InputError(f"layers.{index}: {kind} given, but only linear layers can be composed and rolled out")
        if any(isinstance(part, Linear) and part.arithmetic.products == "int8" for part in layer.modules()):
            raise InputError(f"layers.{index}: int8 products round their inputs, so this layer is not linear")
        with prefixed(f"layers.{index}."):
            maps.append(linear_map())
    others = {name: getattr(model.config, name) for name in ("positions", "final_norm", "match")}
    for name, value in others.items():
        if value not in ("none", None):
            raise InputError(f"{name}: {value!r} given, but it must be 'none' for a model to be one linear map")
    sizes = {len(over_positions) for over_positions, _, _ in maps}
    if len(sizes) != 1:
        raise InputError(f"layers: contexts {sorted(sizes)} given, but all layers must have the same context")
    return maps


def _check_request(model: MultilinForCausalLM, prompt: Tensor, num_steps: int, num_positions: int) -> None:
    check_tokens("input_ids", prompt, model.config)
    if prompt.shape[1] == 0:
        raise InputError(f"prompt: shape {tuple(prompt.shape)} given, but it must be (B, T) with at least one token")
    if num_steps < 1:
        raise InputError(f"num_steps: {num_steps} given, but it must be at least 1")
    check_length(prompt.shape[1], num_steps, num_positions, "num_steps")


@dataclass(frozen=True)
class Way:
    """One way of computing the outputs.

    token_ids: the likeliest token of each output; text: the text of these tokens.
    seconds: time for all outputs, with the model loaded and warmed up.
    """

    token_ids: list[int]
    text: str
    seconds: float


@dataclass(frozen=True)
class RolloutResult:
    """Both ways of computing the outputs, and how they compare.

    num_prompt_tokens: tokens read first, the start token included.
    speedup: sequential over parallel seconds.
    largest_difference: the largest relative difference: the norm of an output's difference over the output's norm.
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
    """Feed a model's raw outputs back as its inputs after a prompt, in parallel and step by step, and compare both.

    Raises:
        InputError: a model that is not linear, no prompt, more positions than the model reads, or outputs that grow
            beyond the largest number of the dtype.
    """
    if not isinstance(run.model, MultilinForCausalLM):
        raise InputError(f"run: a {run.model.config.model_type} model given, but a rollout needs a linear model")
    if not prompt:
        raise InputError("prompt: none given, but a rollout continues a text; give --prompt")
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
            f"num_steps: {settings.num_steps} given, but the outputs exceed the range of {settings.dtype} after "
            f"{num_finite} steps; give fewer steps{other}"
        )
    return RolloutResult(
        prompt=prompt,
        num_prompt_tokens=len(ids),
        num_steps=settings.num_steps,
        dtype=settings.dtype,
        parallel=_way(parallel, run.tokenizer, fast),
        sequential=_way(sequential, run.tokenizer, slow),
        speedup=slow / fast,
        # An output may be zero; then both ways are expected to give exactly zero.
        largest_difference=float((differences / norms.clamp(min=torch.finfo(norms.dtype).tiny)).max()),
    )


def _check_memory(run: Run, settings: RolloutSettings) -> None:
    """Refuse a rollout if memory cannot hold each layer's map over positions and the outputs of both ways."""
    config, positions = run.model.config, run.longest_text or 0
    numbers = (config.num_hidden_layers + 2) * positions**2
    numbers += 2 * min(settings.num_steps, positions) * config.vocab_size
    number_bytes = getattr(torch, settings.dtype).itemsize
    check_memory(f"num_steps: {settings.num_steps} given, but a rollout", numbers * number_bytes, run.model.device)


def _time(function: Callable[[int], Tensor], num_steps: int, device: torch.device) -> tuple[Tensor, float]:
    """Return the outputs and the time in seconds; a few steps before the measurement load the libraries."""
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
