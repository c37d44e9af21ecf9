"""The elita_* files: the original layers in float64, inside an embedding and a head added for the numbers."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multilin.model import MultilinConfig, MultilinForCausalLM
from tests.golden.watch import watch


def check(file: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(array, ours, expected): every layer's parts, the logits, and runs at other position periods and lengths."""
    ids = torch.from_numpy(file["token_ids"])
    last = float(ids.shape[1] - 1)
    # The original counts positions from 0 to 1 (times t) over the input: a period of N - 1.
    runs = {"": (ids, last), "t0.37.": (ids, last / 0.37), "prefix10_t1.": (ids[:, :10], 9.0)}
    runs |= {"prefix10_tmatched.": (ids[:, :10], last), "single_token.": (ids[:, :1], 1.0)}
    for prefix, (tokens, period) in runs.items():
        for name, tensor in _run(file, tokens, period).items():
            if prefix + name in file.files:
                yield prefix + name, tensor.detach().numpy(), file[prefix + name]


def _run(file: Any, ids: Tensor, period: float) -> dict[str, Tensor]:
    model = _model(file, period)
    parts = {"x": model.model.embedding}
    for index, layer in enumerate(model.model.layers):
        parts |= {f"layer{index}.attention": layer.attention, f"layer{index}.feedforward": layer.feed_forward}
        parts[f"layer{index}.out"] = layer
    seen = watch(parts)
    logits = model(ids).logits
    before = seen["x"]
    for index in range(len(model.model.layers)):
        seen[f"layer{index}.after_att"] = before + seen[f"layer{index}.attention"]
        before = seen[f"layer{index}.out"]
    return {**seen, "y": before, "logits": logits}


def _model(file: Any, period: float) -> MultilinForCausalLM:
    meta = json.loads(str(file["meta_json"]))
    config = MultilinConfig.from_architecture(
        "elita",
        hidden_size=meta["width"],
        num_layers=meta["layers"],
        vocab_size=meta["vocab"],
        options={
            "num_heads": meta["heads"],
            "value_size": meta["attention_width"],
            "num_frequencies": meta["position_width"],
            "factor": meta["linear_factor"],
            "norm_eps": meta["ln_eps"],
            "clip_logits": meta["clip"],
            "position_period": period,
        },
        tie_word_embeddings=False,
        final_norm="none",
    )
    model = MultilinForCausalLM(config).double().eval()
    weights = {
        "model.embedding.embed_tokens.weight": _tensor(file, "wrapper.embed"),
        "lm_head.weight": _tensor(file, "wrapper.head"),
    }
    for index in range(meta["layers"]):
        weights |= {f"model.layers.{index}.{name}": tensor for name, tensor in _layer_weights(file, index).items()}
    model.load_state_dict(weights)
    return model


def _layer_weights(file: Any, index: int) -> dict[str, Tensor]:
    def a(name: str) -> Tensor:
        return _tensor(file, f"w.atts{index}.{name}")

    def f(name: str) -> Tensor:
        return _tensor(file, f"w.lins{index}.{name}")

    return {
        "attention.scores.weight": torch.cat([a("k1"), a("k2"), a("k3")]),
        "attention.values.weight": a("value_weight").transpose(1, 2).flatten(0, 1),
        "attention.output.weight": a("output_weight").transpose(1, 2).flatten(0, 1).T,
        "attention.frequencies": torch.stack([a("a1"), a("a2")])[..., 0],
        "attention.phases": torch.stack([a("b1"), a("b2")])[..., 0],
        "attention.amplitudes": a("c")[..., 0],
        "feed_forward.wide.weight": f("w1").T,
        "feed_forward.wide.bias": f("b1"),
        "feed_forward.narrow.weight": f("w2").T,
        "feed_forward.narrow.bias": f("b2"),
        "feed_forward.combine.weight": f("w3").permute(2, 0, 1).flatten(1),
        "feed_forward.combine.bias": f("b3"),
    }


def _tensor(file: Any, name: str) -> Tensor:
    return torch.from_numpy(file[name]).double()
