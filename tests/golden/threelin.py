"""The threelin_* files that hold a model: states, logits and gradients computed from the document."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multilin.model import MultilinConfig, MultilinForCausalLM
from tests.golden.watch import start_at_given_input, watch
from tests.golden.xor import xor_combiner, xor_weight

NAMES = {"QK": "query_key.weight", "QV": "query_value.weight", "K": "key.weight", "V": "value.weight"}


def check(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(array, ours, expected): the state after every layer, logits, loss and all gradients."""
    if "logits" not in file.files:
        return
    meta, ids = json.loads(str(file["meta_json"])), torch.from_numpy(file["token_ids"]).long()
    model = build_model(file, meta, ids.shape[1])
    start_at_given_input(file, model.model.layers)
    states = {f"layer{index}.state": layer for index, layer in enumerate(model.model.layers)}
    seen = watch({"state_embed": model.model.embedding, **states})
    result = model(ids, labels=ids)
    result.loss.backward()
    gradients = in_their_names({name: _gradient(parameter) for name, parameter in model.named_parameters()})
    gradients = {f"grad.{name}": gradient for name, gradient in gradients.items()}
    ours = {**seen, "logits": result.logits, "loss": result.loss, **gradients}
    for name, tensor in ours.items():
        if name in file.files:
            yield name, tensor.detach().numpy(), file[name]


def build_model(file: Any, meta: dict[str, Any], length: int, prefix: str = "w") -> MultilinForCausalLM:
    """Our model with the file's weights under `prefix`; a layer without weights in the file keeps its own."""
    sizes = {"query_size": meta["qdim"], "value_size": meta["ttdim"], "scale": 1.0}
    config = MultilinConfig(
        vocab_size=meta["vocab"],
        hidden_size=meta["dim"],
        layers=[
            {"architecture": "threelin", "slope": slope, "hyper": hyper, **sizes,
             "window": length if wide else meta["window"]}
            for slope, hyper, wide in meta["layers"]
        ],
        tie_word_embeddings=False,
        final_norm="none",
    )  # fmt: skip
    model = MultilinForCausalLM(config).double().eval()
    weights = {"lm_head.weight": _tensor(file, f"{prefix}.final")}
    if f"{prefix}.embed" in file.files:
        weights["model.embedding.embed_tokens.weight"] = _tensor(file, f"{prefix}.embed")
    for index in range(len(config.layers)):
        theirs, ours = f"{prefix}.layer{index}", f"model.layers.{index}"
        if f"{theirs}.QK" in file.files:
            weights |= {f"{ours}.{name}": _tensor(file, f"{theirs}.{source}") for source, name in NAMES.items()}
            combiner = xor_weight(_tensor(file, f"{theirs}.Combiner").permute(2, 0, 1), block=16)
            weights[f"{ours}.combiner.weight"] = combiner.flatten(1)
    model.load_state_dict(model.state_dict() | weights)
    return model


def in_their_names(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights or gradients by our names, by the file's names and in its layout."""
    found = {"embed": tensors["model.embedding.embed_tokens.weight"], "final": tensors["lm_head.weight"]}
    for name in tensors:
        if name.endswith(".combiner.weight"):
            index = name.split(".")[2]
            found |= {
                f"layer{index}.{theirs}": tensors[f"model.layers.{index}.{ours}"] for theirs, ours in NAMES.items()
            }
            found[f"layer{index}.Combiner"] = xor_combiner(tensors[name].unflatten(1, (-1, 16, 16))).permute(1, 2, 0)
    return found


def _tensor(file: Any, name: str) -> Tensor:
    return torch.from_numpy(file[name]).double()


def _gradient(parameter: Tensor) -> Tensor:
    """Zero in layers before the one that a file begins with."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
