"""Conversion of fastformerLM and LEAP checkpoints, against equations written out, golden numbers and the package."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from multilin import InputError
from multilin.data.tokenizers import train_tokenizer
from multilin.inference.convert import convert_checkpoint
from tests.golden.families import relative_error

GOLDEN = Path(__file__).parents[1] / "golden"
CONFIG = {
    "model_type": "FastformerForCausalLM",
    "hidden_size": 12,
    "vocab_size": 23,
    "n_layer": 3,
    "n_heads": 3,
    "n_positions": 40,
    "window_sizes": [3, 8, 40],
    "rescale": 10,
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
}


def make_weights() -> dict[str, Tensor]:
    width, heads = CONFIG["hidden_size"], CONFIG["n_heads"]
    shapes = {"word_embedding.weight": (23, width), "fastformer_model.position_embeddings.weight": (40, width)}
    shapes |= {"last_norm.weight": (width,), "last_norm.bias": (width,), "proj_logits.bias": (23,)}
    for index in range(CONFIG["n_layer"]):
        layer = f"fastformer_model.decoders.{index}"
        shapes |= {f"{layer}.attention.{name}_attn": (heads, width // heads) for name in ("query", "key")}
        shapes |= {f"{layer}.attention.projections.weight": (3 * width, width)}
        shapes |= {
            f"{layer}.{n}.{p}": (width,) for n in ("attention.attn_norm", "boom_norm") for p in ("weight", "bias")
        }
        shapes |= {f"{layer}.boom.weight": (4 * width, width), f"{layer}.unboom.weight": (width, 4 * width)}
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}
    return {**weights, "proj_logits.weight": weights["word_embedding.weight"].clone()}


def package_logits(weights: dict[str, Tensor], ids: Tensor, mask: Tensor) -> Tensor:
    """The package's forward pass with directly summed windows, in float64."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    width, heads = CONFIG["hidden_size"], CONFIG["n_heads"]
    norm = torch.nn.functional.layer_norm

    def standardize(x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)

    def pool(x: Tensor, vector: Tensor, window: int) -> Tensor:
        x = standardize(x.unflatten(-1, (heads, -1)))
        logits = CONFIG["rescale"] * (x * standardize(vector)).sum(-1) / (width // heads)
        weight = torch.exp(logits - 10000.0 * (1 - mask)[..., None])
        means = torch.zeros_like(x)
        for t in range(x.shape[1]):
            seen = slice(max(0, t - window + 1), t + 1)
            total = weight[:, seen].sum(1)[..., None] + 1e-5
            means[:, t] = (weight[:, seen, :, None] * x[:, seen]).sum(1) / total
        return means.flatten(2)

    x = weights["word_embedding.weight"][ids]
    x = x + weights["fastformer_model.position_embeddings.weight"][: ids.shape[1]]
    for index, window in enumerate(CONFIG["window_sizes"]):
        part = {n.split(f"decoders.{index}.")[1]: w for n, w in weights.items() if f"decoders.{index}." in n}
        h = norm(x, (width,), part["attention.attn_norm.weight"], part["attention.attn_norm.bias"])
        q, k, v = (h @ part["attention.projections.weight"].T).chunk(3, dim=-1)
        keys = pool(pool(q, part["attention.query_attn"], window) * k, part["attention.key_attn"], window)
        x = x + keys * v
        h = norm(x, (width,), part["boom_norm.weight"], part["boom_norm.bias"])
        x = x + torch.nn.functional.gelu(h @ part["boom.weight"].T) @ part["unboom.weight"].T
    x = norm(x, (width,), weights["last_norm.weight"], weights["last_norm.bias"])
    return x @ weights["word_embedding.weight"].T + weights["proj_logits.bias"]


def write_checkpoint(
    folder: Path, weights: dict[str, Tensor], *, pickled: bool, config: dict[str, Any] = CONFIG
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        safetensors.torch.save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("pickled", [False, True])
def test_a_converted_checkpoint_has_the_same_logits(tmp_path: Path, pickled: bool) -> None:
    weights = make_weights()
    convert_checkpoint(
        "fastformer", write_checkpoint(tmp_path / "source", weights, pickled=pickled), tmp_path / "target"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target").double()
    assert [layer["window"] for layer in model.config.layers] == [3, 8, None]
    ids = torch.randint(23, (2, 30), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 30)
    torch.testing.assert_close(model(ids).logits, package_logits(weights, ids, mask), rtol=1e-9, atol=1e-9)
    mask[0, 25:], mask[1, :4], mask[1, 10:22] = 0, 0, 0
    result = model(ids, attention_mask=mask, position_ids=torch.arange(30)[None], use_cache=False).logits[mask == 1]
    torch.testing.assert_close(result, package_logits(weights, ids, mask)[mask == 1], rtol=1e-9, atol=1e-9)


def test_separate_projections_of_older_versions_are_joined(tmp_path: Path) -> None:
    weights = make_weights()
    for name in [name for name in weights if "projections" in name]:
        for part, tensor in zip(("Wquery", "Wkeys", "Wvalues"), weights.pop(name).chunk(3), strict=True):
            weights[name.replace("projections", part)] = tensor.clone()
    convert_checkpoint("fastformer", write_checkpoint(tmp_path / "source", weights, pickled=False), tmp_path / "target")
    ids = torch.arange(20)[None]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target").double()
    expected = package_logits(make_weights(), ids, torch.ones(1, 20))
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-9, atol=1e-9)


def test_a_head_of_its_own_is_not_lost(tmp_path: Path) -> None:
    """Our models of these packages have one matrix for embedding and output."""
    weights = make_weights()
    weights["proj_logits.weight"] = weights["word_embedding.weight"] + 1e-3
    source = write_checkpoint(tmp_path / "source", weights, pickled=False)
    with pytest.raises(InputError, match=r"weights: \S+ is tied to another parameter .* their values differ"):
        convert_checkpoint("fastformer", source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("version", ["base", "release"])
def test_converted_leap_checkpoints_have_the_logits_of_the_original(tmp_path: Path, version: str) -> None:
    with np.load(GOLDEN / f"leap_{version}.npz") as file:
        weights = {name[2:]: torch.from_numpy(file[name]).float() for name in file.files if name.startswith("w.")}
        config, ids = json.loads(str(file["meta_json"])), torch.from_numpy(file["input_ids"])
        expected = file["nomask.logits_direct"]
    source = write_checkpoint(tmp_path / "source", weights, pickled=True, config=config)
    convert_checkpoint("leap", source, tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target").double()
    assert relative_error(model(ids).logits.detach().numpy(), expected) <= 1e-9


class Payload:
    def __reduce__(self):
        return (print, ("this must never run",))


def test_a_tokenizer_comes_along_without_its_truncation(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "theirs", make_weights(), pickled=False)
    tokenizer = train_tokenizer([], "byte", None)
    tokenizer(["a", "b c"], truncation=True, padding=True, max_length=2)
    tokenizer.save_pretrained(tmp_path / "theirs")
    convert_checkpoint("fastformer", tmp_path / "theirs", tmp_path / "ours")
    content = json.loads((tmp_path / "ours" / "tokenizer.json").read_text())
    assert (content["truncation"], content["padding"]) == (None, None)


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path: Path, capsys) -> None:
    target = tmp_path / "target"

    def refused(match: str, source: Path) -> None:
        with pytest.raises(InputError, match=match):
            convert_checkpoint("fastformer", source, target)
        assert not target.exists()
        assert "\n" not in match

    refused("config.json does not exist", tmp_path / "nowhere")
    weights = make_weights()
    source = write_checkpoint(tmp_path / "pickled", {**weights, "bad": Payload()}, pickled=True)
    refused("damaged or hold more than tensors", source)
    assert "never" not in capsys.readouterr().out
    source = write_checkpoint(tmp_path / "cut", weights, pickled=False)
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-50])
    refused("damaged", source)
    source = write_checkpoint(
        tmp_path / "short", {k: v for k, v in weights.items() if "last_norm" not in k}, pickled=False
    )
    refused("model.norm.weight should have shape", source)
    source = write_checkpoint(tmp_path / "foreign", {**weights, "other.weight": torch.ones(2)}, pickled=False)
    refused("'other.weight' is not a parameter", source)
    for name, content in (("list", [1, 2]), ("words", {"last_norm.weight": "x"})):
        refused("damaged or hold more than tensors", write_checkpoint(tmp_path / name, content, pickled=True))
    alone = {"fastformer_model.decoders.0.attention.Wquery.weight": torch.ones(2, 2)}
    refused("do not fit together", write_checkpoint(tmp_path / "alone", alone, pickled=True))
    bias = "fastformer_model.decoders.0.boom.bias"
    source = write_checkpoint(tmp_path / "biased", {**weights, bias: torch.ones(48)}, pickled=False)
    refused("feed_forward.expand.bias is not a parameter of a model with this config", source)
    source = write_checkpoint(tmp_path / "no-config", weights, pickled=False)
    (source / "config.json").write_text("{}")
    refused("hidden_size: missing", source)
    (source / "config.json").write_text("{")
    refused("is not JSON", source)
    (source / "config.json").write_text(json.dumps(CONFIG))
    target.mkdir()
    (target / "something").touch()
    with pytest.raises(InputError, match="exists already"):
        convert_checkpoint("fastformer", source, target)
