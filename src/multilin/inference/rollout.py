"""All-linear models as one linear map, and their own raw outputs fed back, all positions computed in parallel.

With e = W^T t for a vector t over the vocabulary, F and C the product of all layers' maps over features and positions:

    O_n = H F W^T sum_{j<=n} C[n, j] t_j + b_n = Q sum_{j<=n} C[n, j] t_j + b_n        t_{n+1} = O_n after the prompt

Let L be C one row down, zero in the prompt's rows. Without a bias and after one token every t_n is a sum of Q^p t_0
with the scalars alpha[n, p] = (L^p)[n, 0], which obey alpha[n + 1, p + 1] = sum_j C[n, j] alpha[j, p]. In general,
with all vectors as rows of T and what is given (prompt and biases) as rows of S,

    T = sum_p L^p S (Q^T)^p = (1 + X) (1 + X^2) (1 + X^4) ... S        X S = L S Q^T,   L^N = 0

so N outputs take log2 N squarings of L and Q. Q has rank D at most: everything is done in D dimensions.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multilin.errors import InputError
from multilin.layers.base import Layout
from multilin.model import MultilinForCausalLM


@runtime_checkable
class LinearLayer(Protocol):
    """A layer that can say which linear map it is."""

    def linear_map(self) -> tuple[Tensor, Tensor, Tensor]:
        """P (n, n), R (D, D), O (n, D) of x -> P x R^T + O, or InputError where its options make it nonlinear."""


class Composed(NamedTuple):
    """A whole model: logits at t = Q sum_{j<=t} C[t, j] onehot(token_j) + b_t, in float64.

    tokens: Q (V, V), column u is what token u adds to the logits. mixing: C (n_ctx, n_ctx), a lower triangle.
    bias: b (n_ctx, V).
    """

    tokens: Float[Tensor, "V V"]
    mixing: Float[Tensor, "n n"]
    bias: Float[Tensor, "n V"]

    def logits(self, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """The model's logits, as weighted sums of columns of Q."""
        length = input_ids.shape[1]
        _check_length(length, len(self.mixing))
        columns_BTV = self.tokens.T[input_ids]
        return self.mixing[:length, :length] @ columns_BTV + self.bias[:length]


class _Factors(NamedTuple):
    """The model in D dimensions: z = into t, O_n = out sum_j C[n, j] z_j + b_n."""

    into_DV: Tensor
    mixing_NN: Tensor
    out_VD: Tensor
    bias_NV: Tensor


@torch.no_grad()
def compose(model: MultilinForCausalLM) -> Composed:
    """The matrix over tokens, the triangle over positions and the bias that an all-linear model is.

    Raises:
        InputError: a part of the model is not linear.

    Cost: V^2 numbers for Q.
    """
    factors = _factor(model)
    return Composed(factors.out_VD @ factors.into_DV, factors.mixing_NN, factors.bias_NV)


@torch.no_grad()
def rollout(model: MultilinForCausalLM, prompt: Int[Tensor, "B T"], num_steps: int) -> Float[Tensor, "B N V"]:
    """Raw outputs fed back as inputs (not the likeliest token), every step at once.

    Args:
        model: an all-linear model.
        prompt: (B, T) token ids, read as one-hot vectors.
        num_steps: N, vectors to produce; the first is the output at the prompt's last token.

    Returns:
        (B, N, V) float64.

    Raises:
        InputError: a model that is not linear, no prompt or step, or more positions than the model has.

    Cost: log2(T + N) products of (T + N)^2 and D^2 matrices; one of (N, D) and (D, V).
    """
    into_DV, mixing_NN, out_VD, bias_NV = _factor(model)
    _check_request(prompt, num_steps, len(mixing_NN))
    num_prompt, num_read = prompt.shape[1], prompt.shape[1] + num_steps - 1
    mixing_NN, bias_NV = mixing_NN[:num_read, :num_read], bias_NV[:num_read]
    shifted_NN = torch.zeros_like(mixing_NN)
    shifted_NN[num_prompt:] = mixing_NN[num_prompt - 1 : -1]
    fed_BND = (bias_NV[num_prompt - 1 : -1] @ into_DV.T).expand(len(prompt), -1, -1)
    given_BND = torch.cat([into_DV.T[prompt], fed_BND], dim=1)
    inputs_BND = _sum_of_powers(shifted_NN, into_DV @ out_VD, given_BND)
    return mixing_NN[num_prompt - 1 :] @ inputs_BND @ out_VD.T + bias_NV[num_prompt - 1 :]


def _sum_of_powers(step_NN: Tensor, map_DD: Tensor, given_BND: Tensor) -> Tensor:
    """sum_p L^p S (G^T)^p for a strictly lower L, by repeated squaring of both."""
    # L may take any factor that G gives: with a spectral radius of 1 the powers of G neither vanish nor explode.
    radius = torch.linalg.eigvals(map_DD).abs().max()
    if radius > 0:
        step_NN, map_DD = step_NN * radius, map_DD / radius
    total_BND, num_powers = given_BND, 1
    while num_powers < len(step_NN):
        total_BND = total_BND + step_NN @ total_BND @ map_DD.T
        step_NN, map_DD, num_powers = step_NN @ step_NN, map_DD @ map_DD, 2 * num_powers
    return total_BND


@torch.no_grad()
def rollout_sequential(
    model: MultilinForCausalLM, prompt: Int[Tensor, "B T"], num_steps: int
) -> Float[Tensor, "B N V"]:
    """The same one step after the other through the model's own layers, in the model's dtype; `rollout` is faster.

    Arguments and errors are those of `rollout`.
    """
    _check_request(prompt, num_steps, len(_factor(model).mixing_NN))
    return torch.stack(list(_steps(model, prompt, num_steps)), dim=1)


def _steps(model: MultilinForCausalLM, prompt: Tensor, num_steps: int) -> Iterator[Tensor]:
    embedding_VD = model.embedding.tokens.weight
    states = [None] * len(model.layers)
    x_BTD, first = embedding_VD[prompt], 0
    for _ in range(num_steps):
        layout = Layout(torch.arange(first, first + x_BTD.shape[1], device=prompt.device).expand(len(prompt), -1))
        first += x_BTD.shape[1]
        for index, layer in enumerate(model.layers):
            x_BTD, states[index] = layer(x_BTD, states[index], layout)
        output_BV = model.output(x_BTD[:, -1] * model.config.logit_scale)
        yield output_BV
        x_BTD = (output_BV @ embedding_VD)[:, None]


def power_coefficients(mixing: Float[Tensor, "n n"], num_steps: int) -> Float[Tensor, "N P"]:
    """alpha with t_n = sum_p alpha[n, p] Q^p t_0 for n, p <= num_steps: the rollout after one token, without a bias.

    Q has no part in them: alpha[n + 1, p + 1] = sum_{j<=n} C[n, j] alpha[j, p], alpha[0, 0] = 1.

    Raises:
        InputError: more steps than the mixing has positions.
    """
    _check_length(num_steps, len(mixing))
    alpha = mixing.new_zeros(num_steps + 1, num_steps + 1)
    alpha[0, 0] = 1.0
    for n in range(num_steps):
        alpha[n + 1, 1:] = mixing[n, : n + 1] @ alpha[: n + 1, :-1]
    return alpha


def _factor(model: MultilinForCausalLM) -> _Factors:
    for name, value in (("positions", model.config.positions), ("final_norm", model.config.final_norm)):
        if value != "none":
            raise InputError(f"{name}: {value!r} given, but it must be 'none' for a model to be one linear map")
    maps = [[part.double() for part in _linear_map(layer, index)] for index, layer in enumerate(model.layers)]
    sizes = {len(over_positions) for over_positions, _, _ in maps}
    if len(sizes) != 1:
        raise InputError(f"layers: contexts {sorted(sizes)} given, but all layers must have one and the same")
    embedding_VD = model.embedding.tokens.weight.double()
    head_VD = model.output.weight.double() * model.config.logit_scale
    mixing_NN, features_DD = (torch.eye(size).to(embedding_VD) for size in (*sizes, embedding_VD.shape[1]))
    offset_ND = embedding_VD.new_zeros(len(mixing_NN), len(features_DD))
    for over_positions, over_features, offset in maps:
        mixing_NN, features_DD = over_positions @ mixing_NN, over_features @ features_DD
        offset_ND = over_positions @ offset_ND @ over_features.T + offset
    bias_NV = offset_ND @ head_VD.T
    if model.output.bias is not None:
        bias_NV = bias_NV + model.output.bias.double()
    return _Factors(embedding_VD.T, mixing_NN, head_VD @ features_DD, bias_NV)


def _linear_map(layer: object, index: int) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(layer, LinearLayer):
        raise InputError(
            f"layers.{index}: {type(layer).__name__} given, but only linear layers can be composed and rolled out"
        )
    return layer.linear_map()


def _check_request(prompt: Tensor, num_steps: int, num_positions: int) -> None:
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise InputError(f"prompt: shape {tuple(prompt.shape)} given, but it must be (B, T) with at least one token")
    if num_steps < 1:
        raise InputError(f"num_steps: {num_steps} given, but it must be at least 1")
    _check_length(prompt.shape[1] + num_steps - 1, num_positions)


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise InputError(f"n_positions: {length} positions to read, but this model reads at most {limit} (n_positions)")
