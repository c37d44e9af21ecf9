"""The tscale_* files that hold a model: widths, states and probabilities of the original code."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multilin.architectures.tscale import layer_widths
from multilin.model import MultilinConfig, MultilinForCausalLM
from multilin.ops.windowed_attention import windowed_attention
from tests.golden.watch import start_at_given_input, watch
from tests.golden.xor import xor_combiner, xor_weight

SOURCE_LN2 = float(np.float32(0.693147))
"""What the source writes for ln 2; it divides by it where the mathematics multiplies by log2(e)."""

NUM_LABELS_BEFORE_TOKENS = 33

LAYER_NAMES = {
    "attention.query.weight": "MP_ATT_QK",
    "attention.remote.weight": "MP_ATT_QV",
    "attention.own.weight": "MP_ATT_K",
    "attention.value.weight": "MP_ATT_V",
    "attention.combiner.weight": "MP_ATT_COMBINER",
    "expand.weight": "MP_RELU_EXPAND",
    "contract.weight": "MP_RELU_CONTRACT",
}


def check(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(array, ours, expected) for a schedule file or for a model with its states and probabilities."""
    if any(name.endswith(".widthId_slope") for name in file.files):
        yield from _schedules(file)
    elif "prob" in file.files:
        meta = json.loads(str(file["meta_json"]))
        model = build_model(file, meta)
        follow_the_source(model)
        start_at_given_input(file, model.model.layers)
        for name, tensor in _run(file, model, meta["doc_start"]).items():
            if name in file.files:
                yield name, tensor.detach().numpy(), file[name]
        yield from deltas(file, "", model, meta["heads"])
        yield from _masks(file, meta["doc_start"])
        yield from _lookups(file, model)
        if "noise.label_ids" in file.files:
            yield "noise.prob", _with_noise(model, file, meta["doc_start"]).detach().numpy(), file["noise.prob"]


def _schedules(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for name in file.files:
        if name.endswith(".widthId_slope"):
            depth = int(name.removeprefix("depth").split(".")[0])
            widths = file[f"depth{depth}.widths"]
            expected = np.array([[widths[int(index)], slope] for index, slope in file[name]], dtype=np.float64)
            yield name, np.array(layer_widths(depth, 1024), dtype=np.float64), expected


def _masks(file: Any, start_token: int | None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Which tokens a position reads: with equal logits and one value per token, those of some weight."""
    ids = torch.from_numpy(file["tokens"]).long()
    texts, length = documents(ids, start_token), ids.shape[1]
    starts = None if texts is None else torch.nn.functional.pad(texts.diff(dim=1) > 0, (1, 0))
    zeros = torch.zeros(len(ids), length, 1, 1, dtype=torch.float64)
    values = torch.eye(length, dtype=torch.float64)[None, :, None].expand(len(ids), -1, 1, -1)
    for name in file.files:
        if width := re.fullmatch(r"att_mask_width(\d+)", name):
            weights, _ = windowed_attention(zeros, zeros, values, window=int(width[1]), scale=1.0, starts=starts)
            mask = (weights[:, :, 0] > 0).numpy()
            yield name, mask.reshape(file[name].shape), file[name].astype(bool)


def _lookups(file: Any, model: MultilinForCausalLM) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The means of the values from given queries, keys and values, with the reach of every layer."""
    for index, layer in enumerate(model.model.layers):
        if f"layer{index}.valLookup" in file.files:
            num_heads = layer.attention.heads[0]
            q, r, v = (
                _tensor(file, f"layer{index}.{name}").unflatten(-1, (num_heads, -1)) for name in ("qk", "qv", "v")
            )
            means, _ = windowed_attention(q, r, v, **layer.attention.reach)
            yield f"layer{index}.valLookup", means.flatten(2).numpy(), file[f"layer{index}.valLookup"]


def _with_noise(model: MultilinForCausalLM, file: Any, start_token: int | None) -> Tensor:
    """Probabilities where each embedding is a signed sum of the rows that training drew."""
    labels, ids = torch.from_numpy(file["noise.label_ids"]).long(), torch.from_numpy(file["tokens"]).long()
    rows = _tensor(file, "MP_MODEL_EMBED")[labels] * _tensor(file, "noise.label_signs")[..., None]
    hook = model.model.embedding.register_forward_hook(lambda *_: rows.sum(dim=2))
    logits = model(ids, document_ids=documents(ids, start_token)).logits
    hook.remove()
    return logits.softmax(dim=-1)


def _run(file: Any, model: MultilinForCausalLM, start_token: int | None) -> dict[str, Tensor]:
    parts = {"state_embed": model.model.embedding, "FinalNormState": model.model.norm}
    for index, layer in enumerate(model.model.layers):
        parts |= {f"update{index}": layer.attention, f"layer{index}.state_ffn": layer}
    seen = watch(parts)
    ids = torch.from_numpy(file["tokens"]).long()
    logits = model(ids, document_ids=documents(ids, start_token)).logits
    before = seen["state_embed"]
    for index in range(len(model.model.layers)):
        if f"layer{index}.input" in file.files:
            before = _tensor(file, f"layer{index}.input")
        seen[f"layer{index}.state_att"] = before + seen.pop(f"update{index}")
        before = seen[f"layer{index}.state_ffn"]
    targets = torch.from_numpy(file["targets"]).long()
    log_prob = torch.log_softmax(logits, dim=-1)
    scores = log_prob.gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets >= 0]
    (-scores.sum()).backward()
    return {**seen, "logits_nat": logits, "log_prob": log_prob, "prob": log_prob.exp(), "score": scores.mean()}


def documents(ids: Tensor, start_token: int | None) -> Tensor | None:
    """Numbers of the texts that a start token inside a row begins."""
    if start_token is None:
        return None
    begins = ids == start_token
    begins[:, 0] = False
    return begins.long().cumsum(dim=1)


def build_model(file: Any, meta: dict[str, Any], prefix: str = "") -> MultilinForCausalLM:
    """Our model with the file's weights, those whose names begin with `prefix`; what the file lacks stays random."""
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
        final_scale=meta["dim"] ** -0.5 * ratio,
    )
    model = MultilinForCausalLM(config).double().eval()
    weights = {
        "lm_head.bias": _tensor(file, f"{prefix}Bias" if f"{prefix}Bias" in file.files else "Bias") * math.log(2)
    }
    for ours, theirs in weight_names(len(config.layers)).items():
        if prefix + theirs in file.files:
            weights[ours] = to_ours(theirs, _tensor(file, prefix + theirs), meta["heads"])
    model.load_state_dict(model.state_dict() | weights)
    return model


def weight_names(num_layers: int) -> dict[str, str]:
    """The file's name of each of our weights."""
    names = {"model.embedding.embed_tokens.weight": "MP_MODEL_EMBED", "lm_head.weight": "MP_MODEL_FINAL"}
    for index in range(num_layers):
        names |= {f"model.layers.{index}.{ours}": f"layer{index}.{theirs}" for ours, theirs in LAYER_NAMES.items()}
    return names


def to_ours(name: str, matrix: Tensor, num_heads: int) -> Tensor:
    """A weight of the file as ours: without the labels that are no tokens, the combiner in blocks."""
    if name.endswith("MP_MODEL_EMBED"):
        return matrix[NUM_LABELS_BEFORE_TOKENS:]
    return _combiner(matrix, num_heads) if name.endswith("MP_ATT_COMBINER") else matrix


def _combiner(matrix: Tensor, num_heads: int) -> Tensor:
    """(D, [head, b, z]) as the weight of block_outer over all heads laid side by side, (D, products)."""
    by_head = matrix.view(len(matrix), num_heads, 4, 128)
    return xor_weight(by_head.transpose(1, 2).flatten(2), block=4).flatten(1)


def follow_the_source(model: MultilinForCausalLM) -> None:
    """Let gradients be the source's, which takes its float32 constant for ln 2 where it differentiates powers of two.

    What reaches the two projections below comes through the attention's logits alone. The loss has the factor once
    more, but that one is common to all gradients.
    """
    ratio = SOURCE_LN2 / math.log(2)

    def scale_gradient(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * ratio)

    for layer in model.model.layers:
        layer.attention.query.register_forward_hook(scale_gradient)
        layer.attention.remote.register_forward_hook(scale_gradient)


def deltas(
    file: Any, prefix: str, model: MultilinForCausalLM, num_heads: int
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """What the source hands to its optimizer: the ascent of the summed scores, without the scales of its products."""
    for ours, theirs in weight_names(len(model.model.layers)).items():
        expected, gradient = f"{prefix}delta.{theirs}", model.get_parameter(ours).grad
        if expected in file.files and gradient is not None:
            root = 1.0 if theirs == "MP_MODEL_EMBED" else math.sqrt(gradient[0].numel())
            delta = -gradient * root * SOURCE_LN2 / math.log(2)
            yield expected, *in_their_layout(theirs, delta, file[expected], num_heads)


def in_their_layout(name: str, tensor: Tensor, expected: np.ndarray, num_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """A weight of ours, or its gradient, and the file's; of the file's embedding the rows of tokens."""
    if name == "MP_MODEL_EMBED":
        expected = expected[NUM_LABELS_BEFORE_TOKENS:]
    if name.endswith("MP_ATT_COMBINER"):
        tensor = (
            xor_combiner(tensor.unflatten(1, (-1, 4, 4))).unflatten(-1, (num_heads, 128)).transpose(1, 2).flatten(1)
        )
    return tensor.detach().numpy().copy(), expected


def _tensor(file: Any, name: str) -> Tensor:
    return torch.from_numpy(file[name]).double()
