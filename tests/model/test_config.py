"""Configs and models by name: presets, hybrids, files, and messages for what does not fit."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from multilin import InputError, MultilinConfig, MultilinForCausalLM
from multilin.model.factory import create_config, create_model, model_names, training_defaults

SIZES = {"hidden_size": 16, "num_layers": 4, "vocab_size": 29, "n_positions": 32}


def windows(**options: object) -> list[int | None]:
    return [layer["window"] for layer in MultilinConfig.from_architecture("additive", **SIZES, options=options).layers]


def test_windows_of_a_preset() -> None:
    assert windows() == [4, 8, 16, None]
    assert windows(windows="package") == [None, 4, 8, None]
    assert windows(windows="global") == [None] * 4
    assert windows(windows=7) == [7] * 4
    assert windows(windows=[1, 2, None, 3]) == [1, 2, None, 3]


def test_a_hybrid_is_plain_data(tmp_path) -> None:
    """Layers of several kinds train, stream and save; here one architecture with two stabilizers."""
    config = MultilinConfig.from_architecture("additive", **SIZES)
    config.layers[1]["stabilizer"] = "head_norm"
    model = MultilinForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert json.loads((tmp_path / "config.json").read_text())["layers"][1]["stabilizer"] == "head_norm"
    assert AutoConfig.from_pretrained(tmp_path).max_position_embeddings == 32


@pytest.mark.parametrize("name", model_names())
def test_every_name_makes_a_model_of_the_asked_sizes(name: str) -> None:
    model = create_model(name, **SIZES, eos_token_id=0)
    assert model.get_input_embeddings().weight.shape == (29, 16)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    assert model.config.eos_token_id == 0
    assert model(torch.arange(5)[None], labels=torch.arange(5)[None]).loss > 0
    assert training_defaults(name).learning_rate > 0


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("additiv", {}, "model.architecture: 'additiv' is not known; did you mean 'additive'"),
        ("additive", {"options": {"num_head": 2}}, "model.options.num_head: unknown field; did you mean 'num_heads'"),
        ("additive", {"options": {"num_heads": 3}}, "num_heads: 3 given, but it must divide the hidden size 16"),
        ("additive", {"options": {"windows": 0}}, "window: 0 given"),
        ("additive", {"options": {"windows": [1]}}, "windows: 1 given, but the model has 4 layers"),
        ("additive", {"options": {"rescale": 3.0}}, "rescale: 3.0 given"),
        ("additive", {"num_layers": 0}, "num_layers: 0 given"),
        ("additive", {"n_positions": 0}, "n_positions"),
        ("additive", {"label_smoothing": 1.0}, "label_smoothing: 1.0 given"),
        ("additive", {"positoins": "none"}, "positoins: unknown field of the model; did you mean 'positions'"),
        ("additive", {"positions": "some"}, "positions: 'some' given, but it must be learned or none"),
        ("gpt2", {"options": {"window": 2}}, "model.options.window: unknown field"),
        ("llama", {"options": {"num_heads": 3}}, "num_heads: 3 given"),
    ],
)
def test_a_mistake_is_named(name: str, changes: dict, words: str) -> None:
    with pytest.raises(InputError) as caught:
        create_model(name, **{**SIZES, **changes})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_positions_there_is_no_limit() -> None:
    config = create_config("additive", **{**SIZES, "n_positions": None}, positions="none")
    model = MultilinForCausalLM(config).eval()
    state = model.new_state()
    with torch.no_grad():
        for _ in range(3):
            model(torch.zeros(1, 100, dtype=torch.long), past_key_values=state)
    assert state.num_tokens.tolist() == [300]
