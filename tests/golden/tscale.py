"""The tscale_* files that hold a model: widths, states and probabilities of the original code."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multilin.architectures.tscale import layer_widths
from multilin.model import MultilinConfig, MultilinForCausalLM
from multilin.ops.block_outer import xor_combiner, xor_weight
from multilin.ops.windowed_attention import windowed_attention
from tests.golden.watch import watch

SOURCE_LN2 = float(np.float32(0.693147))
"""What the source writes for ln 2; it divides by it where the mathematics multiplies by log2(e)."""

NUM_LABELS_BEFORE_TOKENS = 33


NAMES = {"query": "ATT_QK", "remote": "ATT_QV", "own": "ATT_K", "value": "ATT_V"}


def check(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(array, ours, expected) for a schedule file or for a model with its states and probabilities."""
    if any(name.endswith(".widthId_slope") for name in file.files):
        yield from _schedules(file)
    elif "MP_MODEL_EMBED" in file.files and "prob" in file.files:
        for name, tensor in _run(file).items():
            if name in file.files:
                yield name, tensor.detach().numpy(), file[name]
        yield from _masks(file)


def _schedules(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for name in file.files:
        if name.endswith(".widthId_slope"):
            depth = int(name.removeprefix("depth").split(".")[0])
            widths = file[f"depth{depth}.widths"]
            expected = np.array([[widths[int(index)], slope] for index, slope in file[name]], dtype=np.float64)
            yield name, np.array(layer_widths(depth, 1024), dtype=np.float64), expected


def _masks(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Which tokens a position reads: with equal logits and one value per token, those of some weight."""
    start_token = json.loads(str(file["meta_json"]))["doc_start"]
    ids = torch.from_numpy(file["tokens"]).long()
    documents, length = _documents(ids, start_token), ids.shape[1]
    starts = None if documents is None else torch.nn.functional.pad(documents.diff(dim=1) > 0, (1, 0))
    zeros = torch.zeros(len(ids), length, 1, 1, dtype=torch.float64)
    values = torch.eye(length, dtype=torch.float64)[None, :, None].expand(len(ids), -1, 1, -1)
    for name in file.files:
        if width := re.fullmatch(r"att_mask_width(\d+)", name):
            weights, _ = windowed_attention(zeros, zeros, values, window=int(width[1]), scale=1.0, starts=starts)
            mask = (weights[:, :, 0] > 0).numpy()
            yield name, mask.reshape(file[name].shape), file[name].astype(bool)


def _run(file: Any) -> dict[str, Tensor]:
    meta = json.loads(str(file["meta_json"]))
    model = _model(file, meta)
    parts = {"state_embed": model.embedding, "FinalNormState": model.norm}
    for index, layer in enumerate(model.layers):
        parts |= {f"update{index}": layer.attention, f"layer{index}.state_ffn": layer}
    seen = watch(parts)
    ids = torch.from_numpy(file["tokens"]).long()
    logits = model(ids, document_ids=_documents(ids, meta["doc_start"])).logits
    before = seen["state_embed"]
    for index in range(len(model.layers)):
        seen[f"layer{index}.state_att"] = before + seen.pop(f"update{index}")
        before = seen[f"layer{index}.state_ffn"]
    targets = torch.from_numpy(file["targets"]).long()
    log_prob = torch.log_softmax(logits, dim=-1)
    scores = log_prob.gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets >= 0]
    scores.sum().backward()
    found = {**seen, "logits_nat": logits, "log_prob": log_prob, "prob": log_prob.exp(), "score": scores.mean()}
    return {**found, **_deltas(model, meta), **_with_noise(model, file, meta)}


def _deltas(model: MultilinForCausalLM, meta: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients of the summed score without the factor 1 / sqrt(inputs), as the source hands them on."""
    size = model.config.hidden_size
    tokens = torch.nn.functional.pad(model.embedding.tokens.weight.grad, (0, 0, NUM_LABELS_BEFORE_TOKENS, 0))
    found = {"delta.MP_MODEL_FINAL": model.output.weight.grad * size**0.5, "delta.MP_MODEL_EMBED": tokens}
    for index, layer in enumerate(model.layers):
        theirs = f"delta.layer{index}.MP"
        for ours, source in NAMES.items():
            found[f"{theirs}_{source}"] = layer.attention.get_submodule(ours).weight.grad * size**0.5
        products = 512 * meta["heads"]
        combiner = xor_combiner(layer.attention.combiner.grad).unflatten(2, (meta["heads"], 128))
        found[f"{theirs}_ATT_COMBINER"] = combiner.transpose(1, 2).flatten(1) * products**0.5
        found[f"{theirs}_RELU_EXPAND"] = layer.expand.weight.grad * size**0.5
        found[f"{theirs}_RELU_CONTRACT"] = layer.contract.weight.grad * layer.contract.weight.shape[1] ** 0.5
    return found


def _with_noise(model: MultilinForCausalLM, file: Any, meta: dict[str, Any]) -> dict[str, Tensor]:
    """Probabilities where each embedding is a signed sum of the rows that training drew."""
    if "noise.label_ids" not in file.files:
        return {}
    labels, ids = torch.from_numpy(file["noise.label_ids"]).long(), torch.from_numpy(file["tokens"]).long()
    rows = _tensor(file, "MP_MODEL_EMBED")[labels] * _tensor(file, "noise.label_signs")[..., None]
    hook = model.embedding.register_forward_hook(lambda *_: rows.sum(dim=2))
    logits = model(ids, document_ids=_documents(ids, meta["doc_start"])).logits
    hook.remove()
    return {"noise.prob": logits.softmax(dim=-1)}


def _documents(ids: Tensor, start_token: int | None) -> Tensor | None:
    if start_token is None:
        return None
    begins = ids == start_token
    begins[:, 0] = False
    return begins.long().cumsum(dim=1)


def _model(file: Any, meta: dict[str, Any]) -> MultilinForCausalLM:
    ratio = math.log(2) / SOURCE_LN2
    shared = {
        "num_heads": meta["heads"],
        "head_size": 128,
        "expansion": meta["relu_mult"],
        "scale": 0.5 * 128**-0.5 * ratio,
    }
    # A width that the source does not bound is that of the whole text.
    widths = [min(meta["widths"][index], 4096) for index, _ in meta["layers"]]
    config = MultilinConfig(
        vocab_size=meta["vocab"],
        hidden_size=meta["dim"],
        layers=[
            {"architecture": "tscale", "width": width, "slope": slope, **shared}
            for width, (_, slope) in zip(widths, meta["layers"], strict=True)
        ],
        tie_word_embeddings=False,
        output_bias="unigram",
        final_norm="tile_norm",
        final_norm_tile=128,
        logit_scale=meta["dim"] ** -0.5 * ratio,
    )
    model = MultilinForCausalLM(config).double().eval()
    weights = {
        "embedding.tokens.weight": _tensor(file, "MP_MODEL_EMBED")[NUM_LABELS_BEFORE_TOKENS:],
        "output.weight": _tensor(file, "MP_MODEL_FINAL"),
        "output.bias": _tensor(file, "Bias") * math.log(2),
    }
    for index in range(len(config.layers)):
        ours, theirs = f"layers.{index}", f"layer{index}.MP"
        weights |= {f"{ours}.attention.{n}.weight": _tensor(file, f"{theirs}_{source}") for n, source in NAMES.items()}
        weights[f"{ours}.attention.combiner"] = _combiner(_tensor(file, f"{theirs}_ATT_COMBINER"), meta["heads"])
        weights[f"{ours}.expand.weight"] = _tensor(file, f"{theirs}_RELU_EXPAND")
        weights[f"{ours}.contract.weight"] = _tensor(file, f"{theirs}_RELU_CONTRACT")
    model.load_state_dict(weights)
    return model


def _combiner(matrix: Tensor, num_heads: int) -> Tensor:
    """(D, [head, b, z]) as the weight of block_outer over all heads laid side by side."""
    by_head = matrix.view(len(matrix), num_heads, 4, 128)
    return xor_weight(by_head.transpose(1, 2).flatten(2), block=4)


def _tensor(file: Any, name: str) -> Tensor:
    return torch.from_numpy(file[name]).double()
