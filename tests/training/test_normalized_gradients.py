from pathlib import Path
from typing import Any

import pytest
import torch

from multilin.errors import InputError
from multilin.layers.blocks import normalize_gradient
from multilin.model.factory import create_model
from multilin.training.loop import train
from tests.training.conftest import Tiny


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 6e-8, 1.0, 6e4, 1e30])
def test_a_gradient_of_any_size_becomes_unit_size(dtype: torch.dtype, size: float) -> None:
    if dtype == torch.float16 and not 1e-8 < size < 65504:
        pytest.skip("not a number of this dtype")
    x = torch.ones(7, 5, dtype=dtype, requires_grad=True)
    direction = torch.randint(1, 2, (7, 5)).to(dtype)
    assert torch.equal(normalize_gradient(x), x)
    normalize_gradient(x).backward(direction * size)
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert x.grad.double().square().mean().sqrt().item() == pytest.approx(1, rel=1e-2)


def test_a_zero_gradient_stays_zero() -> None:
    x = torch.ones(3, requires_grad=True)
    normalize_gradient(x).backward(torch.zeros(3))
    assert torch.equal(x.grad, torch.zeros(3))


def layer_gradients(scale: float, *, half: bool, normalizes: bool) -> list[torch.Tensor]:
    """Gradients of the layers' matrices for a loss of so large a scale."""
    torch.manual_seed(0)
    model = create_model("tscale", hidden_size=16, num_layers=3, vocab_size=31, n_positions=32).train()
    model.base_model.normalizes_gradients = normalizes
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(31, (2, 20))
    with torch.autocast("cpu", dtype=torch.float16, enabled=half):
        loss = model(ids, labels=ids, use_cache=False).loss
    (loss.float() * scale).backward()
    return [
        weight.grad
        for name, weight in model.named_parameters()
        if name.startswith("model.layers.") and weight.ndim == 2
    ]


def worst_angle(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The smallest cosine between two lists of gradients; that with a gradient of zero or NaN is 0."""
    cosines = [
        torch.cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0, eps=0.0)
        for one, other in zip(gradients, expected, strict=True)
    ]
    return min(float(cosine.nan_to_num(0.0)) for cosine in cosines)


@pytest.mark.parametrize("scale", [1e-7, 1e8])
def test_half_precision_loses_gradients_of_a_size_that_normalised_ones_do_not_have(scale: float) -> None:
    expected = layer_gradients(1.0, half=False, normalizes=True)
    assert worst_angle(layer_gradients(scale, half=True, normalizes=False), expected) < 0.5
    assert worst_angle(layer_gradients(scale, half=True, normalizes=True), expected) > 0.99


def test_every_matrix_keeps_the_direction_of_its_gradient() -> None:
    plain = layer_gradients(1.0, half=False, normalizes=False)
    assert worst_angle(layer_gradients(1.0, half=False, normalizes=True), plain) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "adamw needs the layers' gradients at one common scale; take normalized_sgd or matrix_moment"),
        ({"model.architecture": "gpt2"}, "gpt2 cannot normalise"),
        ({"optimizer.name": "matrix_moment"}, "a tied embedding adds"),
        ({"model.architecture": "tscale", "optimizer.clip_norm": 1.0}, ".*; set optimizer.clip_norm to 0"),
    ],
)
def test_it_is_refused_where_it_would_spoil_training(
    tiny: Tiny, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    recipe = tiny(tmp_path / "run", **{"training.normalize_gradients": True}, **changes)
    with pytest.raises(InputError, match=rf"training\.normalize_gradients: true given, but {sentence}"):
        train(recipe)
    assert not (tmp_path / "run").exists()
