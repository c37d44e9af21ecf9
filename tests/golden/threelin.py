"""The threelin_* files that hold a model: states, logits and gradients computed from the document."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multilin.model import MultilinConfig, MultilinForCausalLM
from multilin.ops.block_outer import xor_combiner, xor_weight
from tests.golden.watch import watch

NAMES = {"QK": "query_key.weight", "QV": "query_value.weight", "K": "key.weight", "V": "value.weight"}


def check(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(array, ours, expected): the state after every layer, logits, loss and all gradients."""
    if "logits" not in file.files:
        return
    meta, ids = json.loads(str(file["meta_json"])), torch.from_numpy(file["token_ids"]).long()
    model = _model(file, meta, ids.shape[1])
    states = {f"layer{index}.state": layer for index, layer in enumerate(model.layers)}
    seen = watch({"state_embed": model.embedding, **states})
    result = model(ids, labels=ids)
    result.loss.backward()
    ours = {**seen, "logits": result.logits, "loss": result.loss, **_gradients(model)}
    for name, tensor in ours.items():
        if name in file.files:
            yield name, tensor.detach().numpy(), file[name]


def _model(file: Any, meta: dict[str, Any], length: int) -> MultilinForCausalLM:
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
    weights = {"embedding.tokens.weight": _tensor(file, "w.embed"), "output.weight": _tensor(file, "w.final")}
    for index in range(len(config.layers)):
        theirs, ours = f"w.layer{index}", f"layers.{index}"
        weights |= {f"{ours}.{name}": _tensor(file, f"{theirs}.{source}") for source, name in NAMES.items()}
        weights[f"{ours}.combiner"] = xor_weight(_tensor(file, f"{theirs}.Combiner").permute(2, 0, 1), block=16)
    model.load_state_dict(weights)
    return model


def _gradients(model: MultilinForCausalLM) -> dict[str, Tensor]:
    parameters = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {"grad.embed": parameters["embedding.tokens.weight"], "grad.final": parameters["output.weight"]}
    for index in range(len(model.layers)):
        theirs, ours = f"grad.layer{index}", f"layers.{index}"
        found |= {f"{theirs}.{source}": parameters[f"{ours}.{name}"] for source, name in NAMES.items()}
        found[f"{theirs}.Combiner"] = xor_combiner(parameters[f"{ours}.combiner"]).permute(1, 2, 0)
    return found


def _tensor(file: Any, name: str) -> Tensor:
    return torch.from_numpy(file[name]).double()
