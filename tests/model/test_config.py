"""Configs and models by name: presets, hybrids, files, and messages for what does not fit."""

import json
from pathlib import Path

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


HYBRID = [
    {"architecture": "tscale", "width": 8, "initializer_range": 0.5},
    {"architecture": "additive", "stabilizer": "head_norm"},
]


def test_a_hybrid_is_plain_data(tmp_path) -> None:
    config = MultilinConfig.from_architecture("additive", **{**SIZES, "num_layers": None}, layers=HYBRID)
    model = MultilinForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert json.loads((tmp_path / "config.json").read_text())["layers"][1]["stabilizer"] == "head_norm"
    assert AutoConfig.from_pretrained(tmp_path).max_position_embeddings == 32


def test_heads_of_tscale_with_a_size_of_their_own_need_not_fill_the_hidden_size() -> None:
    config = MultilinConfig.from_architecture("tscale", **SIZES, options={"num_heads": 3, "head_size": 4})
    assert config.num_attention_heads == 3
    assert MultilinForCausalLM(config).model.layers[0].attention.query.weight.shape == (12, 16)


def test_a_layer_that_reads_less_than_its_model_is_refused() -> None:
    layers = [{"architecture": "linear_mixer", "context": 31}]
    config = MultilinConfig(vocab_size=29, hidden_size=16, layers=layers)
    with pytest.raises(InputError, match=r"n_positions: no limit given, but layers\.0 .* reads at most 31"):
        MultilinForCausalLM(config)


def test_a_hybrid_reads_as_much_as_its_layers_where_the_frame_has_no_limit() -> None:
    for sizes, longest in (((), None), ((31, 17), 17)):
        mixers = [{"architecture": "linear_mixer", "context": size} for size in sizes]
        layers = [{"architecture": "elita"}, *mixers]
        model = create_model("elita", **{**SIZES, "num_layers": None}, layers=layers)
        assert model.config.n_positions == longest


def test_a_layer_of_a_hybrid_may_have_its_own_initial_range() -> None:
    model = create_model("additive", **{**SIZES, "num_layers": None, "hidden_size": 64}, layers=HYBRID)
    assert 0.4 < model.model.layers[0].attention.query.weight.std() < 0.6
    assert 0.015 < model.model.layers[1].attention.projections.weight.std() < 0.025


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
        ("additive", {"options": {"windows": 0}}, "model.options.windows: 0 given"),
        ("additive", {"options": {"windows": [1]}}, "windows: 1 given, but the model has 4 layers"),
        ("additive", {"options": {"rescale": 3.0}}, "rescale: 3.0 given"),
        ("additive", {"num_layers": 0}, "num_layers: 0 given"),
        ("additive", {"n_positions": 0}, "n_positions"),
        ("additive", {"label_smoothing": 1.0}, "label_smoothing: 1.0 given"),
        ("additive", {"positoins": "none"}, "positoins: unknown field of the model; did you mean 'positions'"),
        ("additive", {"positions": "some"}, "positions: 'some' given, but it should be 'learned' or 'none'"),
        ("additive", {"layers": HYBRID}, "num_layers: 4 given, but 2 layers are listed"),
        ("additive", {"layers": [{"architecture": "tscale", "width": -1}], "num_layers": None}, "width: -1 given"),
        ("additive", {"layers": [{"architecture": "tscale", "slope": -0.5}], "num_layers": None}, "slope: -0.5 given"),
        ("additive", {"layers": [{"architecture": "threelin", "window": -2}], "num_layers": None}, "window: -2 given"),
        (
            "additive",
            {"layers": [{"architecture": "threelin", "hyper": "nan"}], "num_layers": None},
            "hyper: 'nan' given, but it should be a finite number",
        ),
        ("threelin", {"options": {"block": 12}}, "block: 12 given, but it must be a power of two"),
        ("additive", {"layers": []}, "layers: [] given, but it must be a list"),
        ("additive", {"layers": [{}], "num_layers": None}, "layers.0: no architecture given"),
        (
            "additive",
            {"layers": [*HYBRID, {"architecture": "elit"}], "num_layers": None},
            "layers.2.architecture: 'elit' is not known; did you mean 'elita'",
        ),
        ("additive", {"layers": HYBRID, "num_layers": None, "options": {"num_heads": 2}}, "options.num_heads: given"),
        (
            "additive",
            {"layers": [*HYBRID, {"architecture": "elita", "num_heads": 3}], "num_layers": None},
            "layers.2.num_heads: 3 given",
        ),
        (
            "additive",
            {"layers": [*HYBRID, {"architecture": "linear_mixer", "context": 31}], "num_layers": None},
            "n_positions: 32 given, but layers.2 (linear_mixer) reads at most 31 tokens",
        ),
        ("additive", {"options": {"num_heads": 16, "stabilizer": "head_norm"}}, "num_heads: 16 given, but heads"),
        (
            "leap",
            {"options": {"num_heads": 16, "rescale": 10.0}},
            "num_heads: 16 given, but heads",
        ),
        ("tscale", {"hidden_size": 18}, "head_size: none given, so it is 18, but it must"),
        ("tscale", {"final_norm_tile": 5}, "final_norm_tile: 5 given, but it must divide the hidden size 16"),
        ("additive", {"final_norm_tile": 8}, "final_norm_tile: 8 given, but only tile_norm has tiles"),
        (
            "tscale",
            {"final_norm": "none", "final_norm_tile": 8},
            "final_norm_tile: 8 given, but only tile_norm has tiles",
        ),
        ("gpt2", {"layers": HYBRID, "num_layers": None}, "layers: given, but gpt2 has no list of layers"),
        ("gpt2", {"options": {"window": 2}}, "model.options.window: unknown field"),
        ("gpt2", {"options": {"num_heads": 0}}, "model.options.num_heads: 0 given"),
        ("gpt2", {"options": {"dropout": "abc"}}, "model.options.dropout: 'abc' given"),
        ("gpt2", {"n_inner": 10**9}, "model.config.n_inner: unknown field"),
        ("llama", {"options": {"num_heads": 3}}, "num_heads: 3 given"),
        ("llama", {"options": {"num_heads": 16}}, "num_heads: 16 given"),
        (
            "additive",
            {"layers": [{"architecture": ["tscale"]}], "num_layers": None},
            "layers.0.architecture: ['tscale']",
        ),
        ("additive", {"eos_token_id": -1}, "eos_token_id: -1 given"),
        ("linear_mixer", {"options": {"expansion": 2}}, "expansion: 2 given, but only feed_forward gelu uses it"),
    ],
)
def test_a_mistake_is_named(name: str, changes: dict, words: str) -> None:
    with pytest.raises(InputError) as caught:
        create_model(name, **{**SIZES, **changes})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_number_of_heads_and_layers_is_known_to_tools() -> None:
    heads = {"num_heads": 2}
    counts = {
        name: MultilinConfig.from_architecture(name, **SIZES, options=options).num_attention_heads
        for name, options in {"additive": heads, "elita": heads, "tscale": {"head_size": 4}, "threelin": {}}.items()
    }
    assert counts == {"additive": 2, "elita": 2, "tscale": 4, "threelin": 1}
    config = MultilinConfig.from_architecture("additive", **{**SIZES, "num_layers": None}, layers=HYBRID)
    assert (config.num_attention_heads, config.num_hidden_layers) == (4, 2)
    assert MultilinConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert (config.to_dict()["num_attention_heads"], json.loads(config.to_json_string())["num_attention_heads"]) == (
        4,
        4,
    )
    assert MultilinConfig().num_attention_heads == 1
    for name in ("num_attention_heads", "num_hidden_layers"):
        with pytest.raises(InputError, match=f"{name}: 7 given"):
            MultilinConfig(**{**config.to_dict(), name: 7})


def test_without_positions_there_is_no_limit() -> None:
    config = create_config("additive", **{**SIZES, "n_positions": None}, positions="none")
    model = MultilinForCausalLM(config).eval()
    state = model.new_state()
    with torch.no_grad():
        for _ in range(3):
            model(torch.zeros(1, 100, dtype=torch.long), past_key_values=state)
    assert state.num_tokens.tolist() == [300]


@pytest.mark.parametrize(("architecture", "name"), [("tscale", "full_width"), ("threelin", "wide")])
def test_a_window_of_0_is_none_and_not_the_default(architecture: str, name: str) -> None:
    config = MultilinConfig.from_architecture(architecture, **SIZES, options={name: 0})
    windows = {entry.get("width", entry.get("window")) for entry in config.layers}
    assert 0 in windows
    assert SIZES["n_positions"] not in windows


def test_fields_that_would_have_no_effect_are_refused() -> None:
    config = create_model("additive", **SIZES).config.to_dict()
    # Trainers that compute the logits themselves would apply this scale, the model would not.
    with pytest.raises(InputError, match="logit_scale: given, but this model has final_scale"):
        MultilinConfig(**config, logit_scale=0.5)
    with pytest.raises(InputError, match="label_smoothin: unknown field of the model; did you mean 'label_smoothing'"):
        MultilinConfig(**config, label_smoothin=0.1)
    of_others = {"embedding_size": 3, "hidden_act": "relu", "initializer_factor": 2.0, "task_specific_params": {"a": 1}}
    assert MultilinConfig(**config, **of_others).to_dict().items() >= of_others.items()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 5}, "num_hidden_layers: 5 given, but 4 layers are listed"),
        ({"final_norm": "rms_norm"}, "final_norm: 'rms_norm' given"),
        ({"label_smoothing": -7}, "label_smoothing: -7 given"),
        ({"max_position_embeddings": "abc"}, "n_positions: 'abc' given"),
    ],
)
def test_fields_given_to_from_pretrained_are_checked(fields: dict, words: str, tmp_path: Path) -> None:
    create_model("elita", **SIZES).save_pretrained(tmp_path)
    for load in (AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(InputError, match=f"^{words}"):
            load(tmp_path, **fields)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, embedding_dropout=0.25, eos_token_id=5)
    assert (model.model.embedding.dropout.p, model.config.eos_token_id) == (0.25, 5)
    config, unused = AutoConfig.from_pretrained(tmp_path, label_smoothing=0.1, other=3, return_unused_kwargs=True)
    assert (config.label_smoothing, unused) == (0.1, {"other": 3})
