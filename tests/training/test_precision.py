"""Precision int8 and simulated rounding, through the recipe."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from multilin.errors import InputError
from multilin.model.factory import model_names
from multilin.training.loop import train
from multilin.training.precision import tf32_beside_bf16
from tests.training.conftest import Stopped, Tiny, assert_same_run, metrics

INT8 = {"training.precision": "int8"}


def test_int8_learns_and_the_model_stays_int8(tiny: Tiny, tmp_path: Path) -> None:
    result = train(tiny(tmp_path / "int8", **INT8))
    assert result.model.arithmetic.products == result.model.arithmetic.backward == "int8"
    lines = [line for line in metrics(result.output) if "loss" in line]
    assert lines[-1]["loss"] < 0.95 * lines[0]["loss"]
    loaded = AutoModelForCausalLM.from_pretrained(result.output)
    ids = torch.arange(10)[None]
    assert torch.equal(loaded(ids).logits, result.model.float()(ids).logits)


def test_int8_resumes_bit_for_bit(tiny: Tiny, tmp_path: Path, stopped: Stopped) -> None:
    train(tiny(tmp_path / "whole", **INT8))
    train(stopped(tiny(tmp_path / "stopped", **INT8), 7, None), resume=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize(
    ("precision", "own", "inside"),
    [("bf16", "highest", "tf32"), ("float32", "highest", "ieee"), ("float32", "high", "tf32")],
)
def test_products_of_float32_on_a_gpu(precision: str, own: str, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tf32 beside bf16 alone, or where the user chose it, whatever transformers' Trainer allows compiled models."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.set_float32_matmul_precision(own)
    before = torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    try:
        with tf32_beside_bf16(precision):
            torch.backends.fp32_precision = "tf32"  # as the Trainer does
            assert torch.backends.cuda.matmul.fp32_precision == inside
        assert torch.get_float32_matmul_precision() == own
        assert (torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision) == before
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def test_what_was_set_by_the_newer_settings_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.backends.fp32_precision = "ieee"
    try:
        with tf32_beside_bf16("bf16"):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = "none"


@pytest.mark.parametrize("changes", [{}, INT8])
def test_simulated_rounding_is_part_of_the_model(tiny: Tiny, tmp_path: Path, changes: dict[str, str]) -> None:
    result = train(tiny(tmp_path / "sim", **{"training.quantization": "sim_2bit", "training.max_steps": 3}, **changes))
    assert result.model.arithmetic.weights == "sim_2bit"
    loaded, ids = AutoModelForCausalLM.from_pretrained(result.output), torch.arange(10)[None]
    simulated = loaded(ids).logits
    assert torch.equal(simulated, result.model(ids).logits)
    loaded.set_arithmetic(dataclasses.replace(loaded.arithmetic, weights="none"))
    assert not torch.equal(loaded(ids).logits, simulated)


@pytest.mark.parametrize(("field", "value"), [("precision", "int8"), ("quantization", "ternary")])
def test_models_of_transformers_refuse_it_before_any_work(tiny: Tiny, tmp_path: Path, field: str, value: str) -> None:
    options = {"model.architecture": "gpt2", "model.options": {"num_heads": 2}, f"training.{field}": value}
    with pytest.raises(InputError, match=rf"training\.{field}: '{value}' given, but GPT2LMHeadModel"):
        train(tiny(tmp_path / "gpt2", **options))
    assert not (tmp_path / "gpt2").exists()


@pytest.mark.filterwarnings("ignore:.*reads across document borders:UserWarning")
def test_every_model_of_ours_trains_in_int8(tiny: Tiny, tmp_path: Path) -> None:
    ours = [name for name in model_names() if name not in ("gpt2", "llama")]
    assert len(ours) >= 5
    for name in ours:
        steps = {"training.max_steps": 2, "training.save_every_steps": 0, "training.eval_every_steps": 0}
        result = train(tiny(tmp_path / name, **{"model.architecture": name}, **steps, **INT8))
        assert result.loss < 10
