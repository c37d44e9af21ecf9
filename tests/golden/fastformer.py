"""The fastformer_* and leap_* files: the packages fastformerLM and leap-transformer, run in float64."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multilin.inference.convert import fastformer_config, leap_config, our_name, our_weights
from multilin.model import MultilinConfig, MultilinForCausalLM
from tests.golden.watch import watch


def check(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(array, ours, expected) for every run: layers, logits with directly summed windows, loss and gradients."""
    yield from _check(file, fastformer_config)


def check_leap(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The same for LEAP."""
    yield from _check(file, leap_config)


def _check(file: Any, read_config: Callable[[dict], MultilinConfig]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    model = MultilinForCausalLM(read_config(json.loads(str(file["meta_json"])))).double().eval()
    weights = {name[2:]: torch.from_numpy(file[name]).double() for name in file.files if name.startswith("w.")}
    model.load_state_dict(our_weights(weights))
    for run in sorted({name.split(".")[0] for name in file.files if name.endswith(".logits_direct")}):
        ours = {f"{run}.{name}": tensor.detach().numpy() for name, tensor in _run(model, file, run).items()}
        for name, array in ours.items():
            if name in file.files:
                yield name, array, file[name]


def _run(model: MultilinForCausalLM, file: Any, run: str) -> dict[str, Tensor]:
    seen = _watch_layers(model)
    input_ids, labels, mask = torch.from_numpy(file["input_ids"]), torch.from_numpy(file["input_ids"]).clone(), None
    if run == "mask":
        name = next(name for name in (f"{run}.attention_mask", "attention_mask") if name in file.files)
        mask = torch.from_numpy(file[name]).long()
        labels = labels.masked_fill(mask == 0, -100)
        if model.config.layers[0].get("weights") == "elu":
            mask = None  # this version of LEAP reads padding like tokens
    # The package counts padding as positions.
    positions = torch.arange(input_ids.shape[1])[None]
    model.zero_grad()
    result = model(input_ids, attention_mask=mask, labels=labels, position_ids=positions, use_cache=False)
    result.loss.backward()
    parameters = dict(model.named_parameters())
    gradients = {
        f"grad.{name[2:]}": parameters[our_name(name[2:])].grad
        for name in file.files
        if name.startswith("w.") and our_name(name[2:]) in parameters
    }
    seen = {name: tensor.flatten(2) for name, tensor in seen.items()}
    return {**seen, "logits_direct": result.logits, "loss": result.loss, **gradients}


def _watch_layers(model: MultilinForCausalLM) -> dict[str, Tensor]:
    """Fills with what the parts of each layer return, under the golden file's names."""
    parts = {"last_norm": model.model.norm}
    for index, layer in enumerate(model.model.layers):
        attention = layer.attention
        parts |= {f"layer{index}.attn_norm": layer.attention_norm, f"layer{index}.out": layer}
        parts |= {f"layer{index}.{name}": attention for name in ("attention", "leap")}
        for name, pool in (("pooled_queries", "pool_queries"), ("pooled_keys", "pool_products")):
            if hasattr(attention, pool):
                parts[f"layer{index}.{name}"] = getattr(attention, pool)
    return watch(parts)
