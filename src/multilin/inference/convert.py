"""Conversion of checkpoints of fastformerLM and leap-transformer into multilin models with the same logits."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from multilin.data.tokenizers import load_tokenizer, save_tokenizer
from multilin.errors import InputError, as_input_error, prefixed, shown
from multilin.files import atomic_folder, check_folder
from multilin.model import MultilinConfig, MultilinForCausalLM
from multilin.settings.inputs import read_json

PACKAGE_NAMES = {
    r"word_embedding\.weight": "model.embedding.embed_tokens.weight",
    r"\w+_model\.position_embeddings\.weight": "model.embedding.positions.weight",
    r"\w+_model\.decoders\.(\d+)\.(attention\.)?attn_norm\.": r"model.layers.\1.attention_norm.",
    r"\w+_model\.decoders\.(\d+)\.((attention|leap)\.)?projections\.": r"model.layers.\1.attention.projections.",
    r"\w+_model\.decoders\.(\d+)\.attention\.query_attn": r"model.layers.\1.attention.pool_queries.scorer",
    r"\w+_model\.decoders\.(\d+)\.attention\.key_attn": r"model.layers.\1.attention.pool_products.scorer",
    r"\w+_model\.decoders\.(\d+)\.boom_norm\.": r"model.layers.\1.feed_forward_norm.",
    r"\w+_model\.decoders\.(\d+)\.boom\.": r"model.layers.\1.feed_forward.expand.",
    r"\w+_model\.decoders\.(\d+)\.unboom\.": r"model.layers.\1.feed_forward.contract.",
    r"last_norm\.": "model.norm.",
    r"proj_logits\.": "lm_head.",
}
"""Names of weights in fastformerLM and leap-transformer (regular expressions), and in multilin."""


def fastformer_config(values: Mapping[str, Any]) -> MultilinConfig:
    """Make our config from a FastformerLMConfig: stabilizer "head_norm", the listed windows, a tied output with a bias.

    Raises:
        InputError: a size that the package always writes is missing, or a value is out of range.
    """
    # The name of the factor differs between versions.
    options = {"stabilizer": "head_norm", "rescale": values.get("rescale") or values.get("rescale_value", 15.0)}
    return _our_config("additive", values, "n_heads", options, label_smoothing=values.get("label_smoothing", 0.0))


def leap_config(values: Mapping[str, Any]) -> MultilinConfig:
    """Make our config from a LeapConfig; with the field `rescale` it is of release 1.0.1, without it of later code.

    Raises:
        InputError: a size that the package always writes is missing, or a value is out of range.
    """
    options = {"weights": "exp" if "rescale" in values else "elu", "rescale": values.get("rescale")}
    return _our_config("leap", values, "n_head", options)


def _our_config(
    architecture: str, values: Mapping[str, Any], heads: str, options: dict[str, Any], **fields: Any
) -> MultilinConfig:
    """Make our config from the fields that both packages have; `heads` names the field with the number of heads."""
    for name in ("hidden_size", "vocab_size", "n_layer", "n_positions", heads):
        if name not in values:
            raise InputError(f"config.json: {name}: missing")
    longest, windows = values["n_positions"], values.get("window_sizes") or "global"
    with prefixed("config.json: "):
        if windows != "global":
            with as_input_error(lambda reason: f"window_sizes: should be a list of sizes ({reason})"):
                windows = [None if size >= longest else size for size in windows]
        options |= {
            "num_heads": values[heads], "windows": windows, "dropout": values.get("hidden_dropout_prob", 0.1)
        }  # fmt: skip
        return MultilinConfig.from_architecture(
            architecture, hidden_size=values["hidden_size"], num_layers=values["n_layer"],
            vocab_size=values["vocab_size"], n_positions=longest, options=options,
            initializer_range=values.get("initializer_range", 0.02), **fields,
        )  # fmt: skip


def our_name(name: str) -> str:
    """Return multilin's name for a parameter of the packages.

    Raises:
        InputError: the packages have no such parameter.
    """
    for pattern, ours in PACKAGE_NAMES.items():
        if re.match(pattern, name):
            return re.sub(pattern, ours, name)
    raise InputError(f"weights: {name!r} is not a parameter of the fastformerLM and leap-transformer packages")


def our_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A package's state dict under our names, also from older fastformerLM versions with three projections."""
    weights = dict(weights)
    for name in [name for name in weights if name.endswith(".Wquery.weight")]:
        parts = [name.replace("Wquery", part) for part in ("Wquery", "Wkeys", "Wvalues")]
        weights[name.replace("Wquery", "projections")] = torch.cat([weights.pop(part) for part in parts])
    return {our_name(name): tensor for name, tensor in weights.items()}


_CONFIGS = {"fastformer": fastformer_config, "leap": leap_config}


def convert_checkpoint(kind: str, source: Path, target: Path) -> None:
    """Convert a folder with config.json and model.safetensors or pytorch_model.bin into a folder of a multilin model.

    A tokenizer.json is copied.

    Args:
        kind: the package that the checkpoint comes from, "fastformer" or "leap".
        source, target: the folder of the checkpoint, and the folder to write.

    Raises:
        InputError: a file is missing or damaged, a parameter is missing, unknown or of another shape, tied parameters
            have different values, or the target exists.
    """
    check_folder("OUTPUT", target, must_be_new=True)
    config = _CONFIGS[kind](_read_config(source))
    tokenizer = load_tokenizer(str(source)) if (source / "tokenizer.json").is_file() else None
    with as_input_error(lambda reason: f"source: the weights in {source} do not fit together ({reason})"):
        weights = our_weights(_read_weights(source))
    with torch.device("meta"):
        expected = MultilinForCausalLM(config).state_dict()
    weights.setdefault("lm_head.weight", weights.get("model.embedding.embed_tokens.weight", torch.empty(0)))
    for name, tensor in expected.items():
        if name not in weights or weights[name].shape != tensor.shape:
            found = tuple(weights[name].shape) if name in weights else "missing"
            raise InputError(f"weights: {name} should have shape {tuple(tensor.shape)}, but it is {found}")
    if unknown := weights.keys() - expected.keys():
        raise InputError(f"weights: {min(unknown)} is not a parameter of a model with this config.json")
    model = MultilinForCausalLM(config)
    model.load_state_dict(weights)
    for name, tensor in model.state_dict().items():
        if not torch.allclose(tensor, weights[name].to(tensor.dtype), rtol=0, atol=0, equal_nan=True):
            raise InputError(f"weights: {name} is tied to another parameter in multilin, but their values differ")
    with atomic_folder(target) as partial:
        model.save_pretrained(partial)
        if tokenizer is not None:
            save_tokenizer(tokenizer, partial)


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    if not path.is_file():
        raise InputError(f"source: {path} does not exist; a checkpoint is a folder with config.json and weights")
    values = read_json(path, "source")
    if not isinstance(values, dict):
        raise InputError(f"source: {path} should hold an object with the sizes of a model, not {shown(values)}")
    return values


def _read_weights(source: Path) -> dict[str, Tensor]:
    safe, pickled = source / "model.safetensors", source / "pytorch_model.bin"
    damage = f"source: the weights in {source} are damaged or hold more than tensors"
    with as_input_error(lambda reason: f"{damage} ({reason})"):
        if safe.is_file():
            return safetensors.torch.load_file(safe)
        if pickled.is_file():
            weights = torch.load(pickled, map_location="cpu", weights_only=True)
            return {str(name): torch.as_tensor(tensor) for name, tensor in weights.items()}
    raise InputError(f"source: {source} has no model.safetensors and no pytorch_model.bin")
