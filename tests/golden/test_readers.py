"""The readers on files of families of which no original is at hand, made here by a second, plain implementation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.golden.__main__ import main
from tests.golden.families import compare

GELU = nn.functional.gelu


def draw(*shape: int, scale: float = 0.4, seed: list[int] = [0]) -> np.ndarray:  # noqa: B006
    """Normal numbers that are exact in float32."""
    seed[0] += 1
    return (scale * np.random.default_rng(seed[0]).standard_normal(shape)).astype(np.float32).astype(np.float64)


def check(path: Path, arrays: dict[str, Any], expected: set[str]) -> None:
    """Write the file, read it, and find every expected array within 1e-9."""
    np.savez(path, **arrays)
    comparisons = {comparison.array: comparison.error for comparison in compare(path)}
    assert expected <= comparisons.keys(), expected - comparisons.keys()
    assert max(comparisons.values()) <= 1e-9, comparisons


def mixer_file(kind: str, blocks: list[dict[str, np.ndarray]], *, feed_forward: bool = False) -> dict[str, Any]:
    vocab_size, width, length = 13, 5, 7
    weights = {"wte.weight": draw(vocab_size, width), "lm_head.weight": draw(vocab_size, width)}
    for index, block in enumerate(blocks):
        weights |= {f"mixerblocks.{index}.{name}": array for name, array in block.items()}
    tensors = {name: torch.from_numpy(array).requires_grad_() for name, array in weights.items()}
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, vocab_size, (2, length)))
    x = tensors["wte.weight"][ids]
    found = {"embed": x}

    def mix(name: str, x: torch.Tensor) -> torch.Tensor:
        matrix = tensors[f"{name}.weight"][..., 0].tril()
        return torch.einsum("ts,bsd->btd", matrix, x) + tensors[f"{name}.bias"][:, None]

    for index, block in enumerate(blocks):
        stem = f"mixerblocks.{index}"
        if "conv.0.weight" in block:
            x = x + mix(f"{stem}.conv.2", GELU(mix(f"{stem}.conv.0", x)))
        else:
            x = x + mix(f"{stem}.conv", x)
        if feed_forward:
            first, second = ([tensors[f"{stem}.patch_ff.{i}.{n}"] for n in ("weight", "bias")] for i in (0, 2))
            x = x + nn.functional.linear(GELU(nn.functional.linear(x, *first)), *second)
        found[f"layer{index}.out"] = x
    found["logits"] = x @ tensors["lm_head.weight"].T
    found["loss"] = nn.functional.cross_entropy(found["logits"][:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    found["loss"].backward()
    arrays = {name: tensor.detach().numpy() for name, tensor in found.items()}
    for name, array in weights.items():
        is_triangle = "conv" in name and name.endswith("weight")
        after = np.tril(array[..., 0])[..., None] if is_triangle else array
        arrays |= {f"w_before_forward.{name}": array, f"w_after_forward.{name}": after}
        arrays[f"grad.{name}"] = tensors[name].grad.numpy()
    return {**arrays, "input_ids": ids.numpy(), "meta_json": json.dumps({"kind": kind})}


def conv(name: str = "conv") -> dict[str, np.ndarray]:
    return {f"{name}.weight": draw(7, 7, 1), f"{name}.bias": draw(7)}


def feed_forward() -> dict[str, np.ndarray]:
    shapes = {"0.weight": (5, 5), "0.bias": (5,), "2.weight": (5, 5), "2.bias": (5,)}
    return {f"patch_ff.{name}": draw(*shape) for name, shape in shapes.items()}


def test_mixer_files(tmp_path: Path) -> None:
    two = conv("conv.0") | conv("conv.2")
    files = {
        "pure": mixer_file("pure_linear", [conv(), conv()]),
        "nearlinear": mixer_file("nearlinear", [conv() | feed_forward()] * 2, feed_forward=True),
        "nearlinear_expandconv": mixer_file("nearlinear_expandconv", [two | feed_forward()], feed_forward=True),
        "linear_expandconv_block": mixer_file("linear_expandconv_block", [two]),
    }
    for name, arrays in files.items():
        triangles = {key for key in arrays if key.startswith("w_after") and key.endswith("weight") and "conv" in key}
        gradients = {key for key in arrays if key.startswith("grad.")}
        check(tmp_path / f"mixer_{name}.npz", arrays, {"embed", "layer0.out", "logits", "loss"} | gradients | triangles)


def tiles(x: np.ndarray) -> np.ndarray:
    """Each tile of 128 divided by its root mean square."""
    cut = x.reshape(*x.shape[:-1], -1, 128)
    rms = np.sqrt((cut**2).mean(axis=-1, keepdims=True))
    return (cut / np.where(rms > 0, rms, 1)).reshape(x.shape)


def rope(x: np.ndarray) -> np.ndarray:
    """Heads of 128, pairs (i, i + 32) in either half; x is (B, T, heads * 128)."""
    quarters = x.reshape(*x.shape[:2], -1, 2, 2, 32)
    frequency = 500000.0 ** (-2 * np.arange(64).reshape(2, 32) / 128)
    angle = np.arange(x.shape[1])[:, None, None, None] * frequency
    a, b = quarters[..., 0, :], quarters[..., 1, :]
    turned = np.stack([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-2)
    return turned.reshape(x.shape)


def tscale_mask(tokens: np.ndarray, width: int) -> np.ndarray:
    """(B, T, T): whether t reads u, with documents that begin at token 3."""
    mask = np.zeros((*tokens.shape, tokens.shape[1]), dtype=bool)
    for row, t in np.ndindex(tokens.shape):
        begin = max([0, *(i for i in range(1, t + 1) if tokens[row, i] == 3)])
        mask[row, t, max(begin, t - width) : t] = width > 0
        mask[row, t, t] |= width == 0
    return mask


def lin(matrix: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x @ matrix.T / x.shape[-1] ** 0.5


def test_tscale_with_document_starts_two_heads_and_two_tiles(tmp_path: Path) -> None:
    width, heads, wide, vocab_size, source_ln2 = 256, 2, 512, 11, float(np.float32(0.693147))
    tokens = np.random.default_rng(5).integers(4, vocab_size, (2, 14))
    tokens[0, [4, 5, 11]] = tokens[1, [0, 7]] = 3
    arrays: dict[str, Any] = {"MP_MODEL_EMBED": draw(33 + vocab_size, width, scale=1), "Bias": draw(vocab_size)}
    arrays["MP_MODEL_FINAL"] = draw(vocab_size, width, scale=1)
    layers, s = [[0, 0.0], [1, 0.5], [2, 0.0]], arrays["MP_MODEL_EMBED"][33 + tokens]
    arrays["state_embed"] = s
    for index, (width_id, slope) in enumerate(layers):
        shapes = {f"ATT_{name}": (256, width) for name in ("QK", "QV", "K", "V")}
        shapes |= {"ATT_COMBINER": (width, 1024), "RELU_EXPAND": (wide, width), "RELU_CONTRACT": (width, wide)}
        w = {name: draw(*shape, scale=1) for name, shape in shapes.items()}
        arrays |= {f"layer{index}.MP_{name}": array for name, array in w.items()}
        x = tiles(s)
        qk, qv = rope(tiles(lin(w["ATT_QK"], x))), rope(lin(w["ATT_QV"], x))
        k, v = (tiles(lin(w[name], x)).reshape(2, 14, heads, 128) for name in ("ATT_K", "ATT_V"))
        logits = np.einsum("bthd,buhd->bhtu", qk.reshape(v.shape), qv.reshape(v.shape)) * 128**-0.5 * 0.5 / source_ln2
        distance = np.arange(14)[:, None] - np.arange(14)
        mask = tscale_mask(tokens, [0, 8, 64][width_id])[:, None]
        weights = np.where(mask, 2 ** (logits - slope * distance), 0)
        value = np.einsum("bhtu,buhd->bthd", weights / (1 + weights.sum(axis=-1, keepdims=True)), v)
        products = np.stack([k[..., np.arange(128) ^ b] * value for b in range(4)], axis=-2)
        s = s + lin(w["ATT_COMBINER"], products.reshape(2, 14, -1))
        arrays[f"layer{index}.state_att"] = s
        s = s + lin(w["RELU_CONTRACT"], np.maximum(tiles(lin(w["RELU_EXPAND"], tiles(s))), 0))
        arrays[f"layer{index}.state_ffn"] = s
    scores = lin(arrays["MP_MODEL_FINAL"], tiles(s)) / source_ln2 + arrays["Bias"]
    prob = 2**scores / (2**scores).sum(axis=-1, keepdims=True)
    arrays |= {"prob": prob, "log_prob": np.log(prob), "logits_nat": scores * np.log(2), "FinalNormState": tiles(s)}
    arrays |= {f"att_mask_width{size}": tscale_mask(tokens, size) for size in (8, 64)}
    expected = {name for name in arrays if not name.startswith("MP_") and ".MP_" not in name and name != "Bias"}
    targets = np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    meta = {"dim": width, "heads": heads, "relu_mult": 2, "vocab": vocab_size, "widths": [0, 8, 64]}
    arrays |= {"tokens": tokens, "targets": targets, "meta_json": json.dumps(meta | {"layers": layers, "doc_start": 3})}
    check(tmp_path / "tscale_docstart.npz", arrays, expected)


def test_other_systems_are_named_and_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "foreign_base.npz"
    np.savez(path, x=np.zeros(3))
    assert main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert "foreign_base.npz: belongs to none of the systems here" in shown
    assert "1 files were not read" in shown
