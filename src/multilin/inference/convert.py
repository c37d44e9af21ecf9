"""Checkpoints of the original packages, turned into ours with the same logits."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from multilin.data.tokenizers import TOKENIZER_FILES
from multilin.errors import InputError
from multilin.files import atomic_folder, check_folder
from multilin.model import MultilinConfig, MultilinForCausalLM

FASTFORMER_NAMES = {
    r"word_embedding\.weight": "model.embedding.tokens.weight",
    r"fastformer_model\.position_embeddings\.weight": "model.embedding.positions.weight",
    r"fastformer_model\.decoders\.(\d+)\.attention\.attn_norm\.": r"model.layers.\1.attention_norm.",
    r"fastformer_model\.decoders\.(\d+)\.attention\.projections\.": r"model.layers.\1.attention.projections.",
    r"fastformer_model\.decoders\.(\d+)\.attention\.query_attn": r"model.layers.\1.attention.pool_queries.scorer",
    r"fastformer_model\.decoders\.(\d+)\.attention\.key_attn": r"model.layers.\1.attention.pool_products.scorer",
    r"fastformer_model\.decoders\.(\d+)\.boom_norm\.": r"model.layers.\1.feed_forward_norm.",
    r"fastformer_model\.decoders\.(\d+)\.boom\.": r"model.layers.\1.feed_forward.expand.",
    r"fastformer_model\.decoders\.(\d+)\.unboom\.": r"model.layers.\1.feed_forward.contract.",
    r"last_norm\.": "model.norm.",
    r"proj_logits\.": "lm_head.",
}
"""Names in the fastformerLM package (regular expressions) and ours."""


def fastformer_config(values: Mapping[str, Any]) -> MultilinConfig:
    """Our config for a FastformerLMConfig: the stabilizer "head_norm", windows as listed, tied output with bias.

    Raises:
        InputError: a size that the package always writes is missing.
    """
    for name in ("hidden_size", "vocab_size", "n_layer", "n_heads", "n_positions"):
        if name not in values:
            raise InputError(f"config.json: no field {name!r}; a checkpoint of the fastformerLM package has one")
    num_positions, num_layers = values["n_positions"], values["n_layer"]
    windows = values.get("window_sizes") or [num_positions] * num_layers
    rescale = values.get("rescale", values.get("rescale_value", 15.0))
    return MultilinConfig.from_architecture(
        "additive",
        hidden_size=values["hidden_size"],
        num_layers=num_layers,
        vocab_size=values["vocab_size"],
        n_positions=num_positions,
        options={
            "num_heads": values["n_heads"],
            "windows": [None if window >= num_positions else window for window in windows],
            "stabilizer": "head_norm",
            "rescale": float(rescale),
            "dropout": values.get("hidden_dropout_prob", 0.1),
        },
        label_smoothing=values.get("label_smoothing", 0.0),
        initializer_range=values.get("initializer_range", 0.02),
    )


def fastformer_name(name: str) -> str:
    """Our name of one of the package's parameters.

    Raises:
        InputError: the package has no such parameter.
    """
    for pattern, ours in FASTFORMER_NAMES.items():
        if re.match(pattern, name):
            return re.sub(pattern, ours, name)
    raise InputError(f"weights: {name!r} is no parameter of the fastformerLM package")


def fastformer_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The package's state dict under our names; older versions keep the three projections apart."""
    weights = dict(weights)
    for name in [name for name in weights if name.endswith(".Wquery.weight")]:
        parts = [name.replace("Wquery", part) for part in ("Wquery", "Wkeys", "Wvalues")]
        weights[name.replace("Wquery", "projections")] = torch.cat([weights.pop(part) for part in parts])
    return {fastformer_name(name): tensor for name, tensor in weights.items()}


def convert_fastformer(source: Path, target: Path) -> None:
    """Turn a folder with config.json and model.safetensors or pytorch_model.bin into a folder of ours.

    Raises:
        InputError: a missing or damaged file, a parameter missing or of another shape, or a target that exists.
    """
    check_folder("OUTPUT", target, must_be_new=True)
    config = fastformer_config(_read_config(source))
    weights = fastformer_weights(_read_weights(source))
    model = MultilinForCausalLM(config)
    expected = model.state_dict()
    weights.setdefault("lm_head.weight", weights.get("model.embedding.tokens.weight", torch.empty(0)))
    for name, tensor in expected.items():
        if name not in weights or weights[name].shape != tensor.shape:
            found = tuple(weights[name].shape) if name in weights else "missing"
            raise InputError(f"weights: {name} should have shape {tuple(tensor.shape)}, but it is {found}")
    model.load_state_dict(weights)
    with atomic_folder(target) as partial:
        model.save_pretrained(partial)
        for name in TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copy(source / name, partial / name)


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    if not path.is_file():
        raise InputError(f"source: {path} does not exist; a checkpoint is a folder with config.json and weights")
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"source: {path} is no JSON ({error})") from None
    return values


def _read_weights(source: Path) -> dict[str, Tensor]:
    safe, pickled = source / "model.safetensors", source / "pytorch_model.bin"
    try:
        if safe.is_file():
            return safetensors.torch.load_file(safe)
        if pickled.is_file():
            weights: dict[str, Tensor] = torch.load(pickled, map_location="cpu", weights_only=True)
            return weights
    except Exception as error:
        # torch and safetensors raise many kinds of errors for damaged files; all mean the same to the user.
        reason = str(error).splitlines()[0]
        raise InputError(f"source: the weights in {source} are damaged or hold more than tensors ({reason})") from None
    raise InputError(f"source: {source} has no model.safetensors and no pytorch_model.bin")


CONVERTERS: dict[str, Callable[[Path, Path], None]] = {"fastformer": convert_fastformer}
"""Kinds of checkpoints that `multilin convert` knows."""
