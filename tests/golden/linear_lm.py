"""The linear_lm file: a linear model as one map over tokens and one over positions, and its outputs fed back."""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multilin.inference.rollout import compose, rollout
from multilin.layers.base import Layout
from multilin.model import MultilinConfig, MultilinForCausalLM
from tests.golden import linear_mixer

Compared = tuple[str, np.ndarray, np.ndarray]

AFFINE = "mixer_linear_pure"


HEAD = re.compile(r"(?<![A-Za-z0-9])H(?![A-Za-z0-9])")
"""H of the names "m8.H", "H_m8" or "H"; its neighbours W and Q are named in the same way."""


class Group(NamedTuple):
    """One H and W of the file, which has several widths m, and the model they make with the file's C.

    tag: what tells the names of a group from those of another: "m8" of "m8.H".
    """

    tag: str
    q_name: str
    model: MultilinForCausalLM


def check(file: Any) -> Iterator[Compared]:
    """(array, ours, expected): Q, a, O_n, rollouts and their polynomials, alpha, powers of Q; and the affine map."""
    names = [name for name in file.files if not name.startswith(AFFINE)]
    ids = _one_row(file, next(name for name in names if name.rpartition(".")[2] in ("token_ids", "input_ids")))
    groups = [_group(file, name) for name in names if HEAD.search(name)]
    for group in groups:
        if group.q_name in names:
            yield group.q_name, compose(group.model).tokens.numpy(), file[group.q_name]
    for name in names:
        # Which Q an array goes with stands in its name, or is the only one it can be meant for: the best fitting.
        own = [group for group in groups if group.tag and re.search(rf"(?<!\w){re.escape(group.tag)}(?!\w)", name)]
        found = [array for group in own or groups if (array := _ours(name, group.model, ids, file)) is not None]
        if found:
            expected = file[name].reshape(found[0].shape) if file[name].size == found[0].size else file[name]
            yield name, min(found, key=lambda array: _distance(array, expected)), expected
    yield from _affine(file)


def _ours(name: str, model: MultilinForCausalLM, ids: Tensor, file: Any) -> np.ndarray | None:
    """The array that the file has under this name, from the model; None for what is given and for other readings."""
    last, composed, vocab_size = name.rpartition(".")[2], compose(model), model.config.vocab_size
    onehot_NV = torch.nn.functional.one_hot(ids[0], vocab_size).double()
    found: Tensor | None = None
    if "printed" in name:
        return None
    if "rollout" in name:
        num_prompt = 3 if "rollout3" in name else 1
        found = _rolled_out(model, onehot_NV, ids[:, :num_prompt], last, len(file[name]))
    if found is None and (polynomial := re.search(r"t([123])_polynomial", name)):
        degree = int(polynomial[1])
        alpha_P = power_coefficients(composed.mixing, degree)[degree]
        found = alpha_P @ _powers(composed.tokens, onehot_NV[0], degree + 1)
    elif "alpha" in _parts(name):
        found = power_coefficients(composed.mixing, len(file[name]) - 1)
    elif "Q_powers_t0" in name:
        found = _powers(composed.tokens, onehot_NV[0], len(file[name]))
    elif found is None and "a" in _parts(name):
        found = composed.mixing[: len(onehot_NV), : len(onehot_NV)] @ onehot_NV
    elif found is None and {"O", "O_n", "logits"} & _parts(name):
        found = composed.logits(ids)[0]
    return None if found is None else found.detach().numpy()


def _rolled_out(
    model: MultilinForCausalLM, onehot_NV: Tensor, prompt: Tensor, last: str, num_rows: int
) -> Tensor | None:
    """`t`: the inputs, prompt first; `O`: the output at each of them."""
    num_prompt = prompt.shape[1]
    if last == "t":
        fed_NV = rollout(model, prompt, num_rows - num_prompt)[0]
        return torch.cat([onehot_NV[:num_prompt], fed_NV])
    if last == "O":
        outputs_NV = rollout(model, prompt, num_rows - num_prompt + 1)[0]
        return torch.cat([compose(model).logits(prompt)[0, :-1], outputs_NV])
    return None


def power_coefficients(mixing: Tensor, num_steps: int) -> Tensor:
    """alpha with t_n = sum_p alpha[n, p] Q^p t_0 for n, p <= num_steps: the rollout after one token, without a bias."""
    alpha = mixing.new_zeros(num_steps + 1, num_steps + 1)
    alpha[0, 0] = 1.0
    for n in range(num_steps):
        alpha[n + 1, 1:] = mixing[n, : n + 1] @ alpha[: n + 1, :-1]
    return alpha


def _powers(q_VV: Tensor, start_V: Tensor, count: int) -> Tensor:
    powers = [start_V]
    for _ in range(count - 1):
        powers.append(q_VV @ powers[-1])
    return torch.stack(powers)


def _group(file: Any, head: str) -> Group:
    """A one-layer model without residual whose triangle is C: W is the transposed embedding, H the head."""
    model = _model(file["C"], file[head], file[HEAD.sub("W", head)])
    return Group(HEAD.sub("", head).strip("._"), HEAD.sub("Q", head), model)


def _model(mixing: np.ndarray, head: np.ndarray, into: np.ndarray) -> MultilinForCausalLM:
    config = MultilinConfig.from_architecture(
        "linear_mixer", hidden_size=head.shape[1], num_layers=1, vocab_size=len(head), n_positions=len(mixing),
        options={"residual": False},
    )  # fmt: skip
    model = MultilinForCausalLM(config).double().eval()
    triangle = mixing[np.tril_indices(len(mixing))]
    weights = {
        "model.embedding.embed_tokens.weight": into.T,
        "lm_head.weight": head,
        "model.layers.0.mixing.triangle.weight": triangle.reshape(len(mixing) | 1, -1),
    }
    model.load_state_dict({name: torch.from_numpy(array.astype(np.float64)) for name, array in weights.items()})
    return model


def _affine(file: Any) -> Iterator[Compared]:
    """C_total, b_total and the logits of the model in mixer_linear_pure.npz, which stands beside this file."""
    expected = {name.removeprefix(f"{AFFINE}."): name for name in file.files if name.startswith(f"{AFFINE}.")}
    if not expected:
        return
    beside = Path(file.fid.name).with_name(f"{AFFINE}.npz")
    if not beside.is_file():
        warnings.warn(f"{AFFINE}.*: not checked, as the weights are in {beside.name} beside this file", stacklevel=2)
        return
    with np.load(beside, allow_pickle=False) as weights:
        model, _ = linear_mixer.make_model(weights)
        ids = torch.from_numpy(weights["input_ids"]).long()
    composed = compose(model)
    ours = {"C_total": composed.mixing, "b_total": _offset(model), "Q": composed.tokens, "logits": composed.logits(ids)}
    for short, tensor in ours.items():
        if short in expected:
            yield expected[short], tensor.detach().numpy(), file[expected[short]]


def _offset(model: MultilinForCausalLM) -> Tensor:
    """What the layers make of a text of zeros; the same in every feature."""
    num_positions = model.config.n_positions
    x_BTD = torch.zeros(1, num_positions, model.config.hidden_size, dtype=model.dtype)
    layout = Layout(torch.arange(num_positions)[None])
    for layer in model.model.layers:
        x_BTD, _ = layer(x_BTD, None, layout)
    return x_BTD[0, :, 0]


def _one_row(file: Any, name: str) -> Tensor:
    return torch.from_numpy(file[name]).long().reshape(1, -1)


def _parts(name: str) -> set[str]:
    return set(re.split(r"[._]", name)) | {name.rpartition(".")[2]}


def _distance(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(ours - expected).max()) if ours.shape == expected.shape else float("inf")
