"""The mixer_* files: the original linear and masked mixers in float64."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multilin.architectures.linear_mixer import LinearMixerLayer, LinearMixerOptions
from multilin.inference.rollout import compose
from multilin.layers.base import Layout
from multilin.model import MultilinConfig, MultilinForCausalLM

BLOCK = "mixerblocks.{index}."
NORMS = {"mixing_norm": "seq_layernorm", "feed_forward_norm": "patch_layernorm"}


def check(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(array, ours, expected): embedding, every layer, logits, loss, the gradients of all parameters, the triangles.

    A linear model's logits are also those of its composition. Where a file holds a block alone, its output.
    """
    if "w_before_forward.wte.weight" not in file.files:
        yield from _check_block(file)
        return
    model, names = make_model(file)
    for name, tensor in _run(model, torch.from_numpy(file["input_ids"])).items():
        if name in file.files:
            yield name, tensor.detach().numpy(), file[name]
    for ours, original in names.items():
        if f"grad.{original}" in file.files:
            gradient = model.get_parameter(ours).grad
            assert gradient is not None
            yield f"grad.{original}", gradient.numpy(), _to_ours(ours, file[f"grad.{original}"])
        if ours.endswith("triangle.weight"):
            matrix = model.get_submodule(ours.removesuffix(".triangle.weight")).matrix().detach().numpy()
            yield f"w_after_forward.{original}", matrix[..., None], file[f"w_after_forward.{original}"]
    if all(entry["mixing"] == "linear" and entry["feed_forward"] == "none" for entry in model.config.layers):
        yield (
            "logits, composed",
            compose(model).logits(torch.from_numpy(file["input_ids"]).long()).numpy(),
            file["logits"],
        )


def _check_block(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """A block with two triangles, on inputs x."""
    stem = "w_before_forward."
    weights = {name.removeprefix(stem): file[name] for name in file.files if name.startswith(stem)}
    prefix = next(name for name in weights if name.endswith("conv.0.weight")).removesuffix("conv.0.weight")
    x_BTD = torch.from_numpy(
        next(file[name] for name in ("x", "input", "inputs", "embed") if name in file.files)
    ).double()
    expected = next(name for name in ("layer0.out", "out", "y", "output") if name in file.files)
    options = LinearMixerOptions(mixing="gelu", mixing_bias=True, context=x_BTD.shape[1])
    layer = LinearMixerLayer(x_BTD.shape[2], options).double()
    layer.load_state_dict(
        {
            ours: torch.from_numpy(
                _to_ours(ours, weights[f"{prefix}{_original(f'model.layers.0.{ours}', True).split('.', 2)[2]}"])
            ).double()
            for ours, _ in layer.named_parameters()
        }
    )
    y_BTD, _ = layer(x_BTD, None, Layout(torch.arange(x_BTD.shape[1])[None]))
    yield expected, y_BTD.detach().numpy(), file[expected]


def _run(model: MultilinForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    def keep(module: torch.nn.Module, name: str) -> None:
        # The original's ReLU is not a part of its last layer.
        module.register_forward_hook(lambda _, inputs, output: seen.update({name: inputs[0]}))

    for index, layer in enumerate(model.model.layers):
        keep(layer.activation, f"layer{index}.out")
    keep(model.model.layers[0], "embed")
    result = model(ids, labels=ids)
    result.loss.backward()
    return {**seen, "logits": result.logits, "loss": result.loss}


def make_model(file: Any) -> tuple[MultilinForCausalLM, dict[str, str]]:
    """The model with the file's weights, and the file's name of each parameter."""
    kind = str(json.loads(str(file["meta_json"]))["kind"])
    weights = [name.removeprefix("w_before_forward.") for name in file.files if name.startswith("w_before_forward.")]
    # The layers of "fineweb" have norms and a feed-forward which it never calls.
    is_bare = "fineweb" in kind
    first = BLOCK.format(index=0)
    expand, has_two = f"{first}patch_ff.0.weight", f"{first}conv.2.weight" in weights
    has_feed_forward = expand in weights and not is_bare
    vocab_size, width = file["w_before_forward.wte.weight"].shape
    config = MultilinConfig.from_architecture(
        "linear_mixer",
        hidden_size=width,
        num_layers=len({name.split(".")[1] for name in weights if name.startswith("mixerblocks.")}),
        vocab_size=vocab_size,
        n_positions=file["input_ids"].shape[1],
        options={
            "mixing": "gelu" if has_two else "relu" if "relu" in kind else "linear",
            "mixing_bias": True,
            "residual": not is_bare,
            "feed_forward": "gelu" if has_feed_forward else "none",
            **({"expansion": len(file[f"w_before_forward.{expand}"]) // width} if has_feed_forward else {}),
            "norm": f"{first}seq_layernorm.weight" in weights and not is_bare and "linear" not in kind,
        },
    )
    model = MultilinForCausalLM(config).double().eval()
    names = {name: _original(name, has_two) for name, _ in model.named_parameters()}
    model.load_state_dict(
        {
            ours: torch.from_numpy(_to_ours(ours, file[f"w_before_forward.{name}"])).double()
            for ours, name in names.items()
        }
    )
    return model, names


def _original(name: str, has_two: bool) -> str:
    """The file's name of one of our parameters."""
    if not name.startswith("model.layers."):
        return {"model.embedding.embed_tokens.weight": "wte.weight", "lm_head.weight": "lm_head.weight"}[name]
    _, _, index, module, *rest = name.split(".")
    tail = ".".join(rest).replace("triangle.weight", "weight")
    mixings = {"mixing": "conv.0", "second_mixing": "conv.2"} if has_two else {"mixing": "conv"}
    original = {**mixings, **NORMS, "feed_forward": "patch_ff"}[module]
    return f"{BLOCK.format(index=index)}{original}.{tail}"


def _to_ours(name: str, array: np.ndarray) -> np.ndarray:
    """Of a convolution's square only the triangle, row by row, is a parameter of ours."""
    if not name.endswith("triangle.weight"):
        return array
    return array[..., 0][np.tril_indices(len(array))].reshape(len(array) | 1, -1)
