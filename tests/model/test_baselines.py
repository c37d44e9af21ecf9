"""GPT-2 and Llama with the log of the token counts, and Llama with products of unit variance."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from multilin.errors import InputError
from multilin.model.baselines import attend_without_mask
from multilin.model.factory import BASELINES, create_model
from multilin.runs.adapters import insert_adapters
from multilin.runs.load import load_run
from multilin.training.assemble import build_model, read_text
from multilin.training.loop import train
from multilin.training.recipe import load_recipe
from multilin.training.resolve import resolve_recipe
from tests.processes import PYTHON, run

SIZES = {"hidden_size": 16, "num_layers": 2, "vocab_size": 40, "n_positions": 12}
UNIT = {"unit_variance": True, "initializer_range": 0.5, "tie_word_embeddings": False}
IDS = torch.arange(24).view(2, 12) % 40


def test_products_of_unit_variance_are_rates_matrix_by_matrix() -> None:
    """Trained by AdamW beside a plain Llama with weights and rates divided by the root of the inputs."""
    torch.manual_seed(0)
    scaled = create_model("llama", **SIZES, **UNIT)
    plain = create_model("llama", **SIZES, tie_word_embeddings=False)
    plain.load_state_dict(copy.deepcopy(scaled.state_dict()))
    matrices = [module for module in plain.modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for module in matrices:
            module.weight /= module.in_features**0.5
    lr, plain_adam = 1e-2, {"weight_decay": 0.0, "eps": 1e-30}
    rest = [p for p in plain.parameters() if all(p is not module.weight for module in matrices)]
    groups = [{"params": [module.weight], "lr": lr * module.in_features**-0.5} for module in matrices]
    optimizers = [
        torch.optim.AdamW(scaled.parameters(), lr=lr, **plain_adam),
        torch.optim.AdamW([*groups, {"params": rest}], lr=lr, **plain_adam),
    ]
    first = plain(input_ids=IDS, labels=IDS).loss
    for _ in range(4):
        losses = [model(input_ids=IDS, labels=IDS).loss for model in (scaled, plain)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert losses[0] < first - 0.2


@pytest.mark.parametrize("name", BASELINES)
@torch.no_grad()
def test_compiled_they_attend_to_the_past_without_a_mask_tensor(name: str) -> None:
    """Which PyTorch's fast kernels would not take; padding and states of texts are still told apart."""
    torch.manual_seed(0)
    model = create_model(name, **SIZES).eval()
    padding = torch.ones_like(IDS).index_fill(1, torch.arange(3), 0)
    expected = model(IDS, use_cache=False).logits, model(IDS, attention_mask=padding).logits[padding.bool()]
    masks = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        calls = graph.graph.find_nodes(op="call_function", target=nn.functional.scaled_dot_product_attention)
        masks.append([call.kwargs.get("attn_mask") is not None for call in calls])
        return graph.forward

    attend_without_mask(model)
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(IDS, use_cache=False).logits, expected[0])
    assert masks == [[False, False]]
    torch.testing.assert_close(compiled(IDS, attention_mask=padding).logits[padding.bool()], expected[1])
    assert any(masks[-1])
    begun = model(IDS[:, :5], use_cache=True)
    rest = compiled(IDS[:, 5:], past_key_values=begun.past_key_values)
    torch.testing.assert_close(rest.logits, expected[0][:, 5:])
    torch.testing.assert_close(model(IDS).logits, expected[0])


@pytest.mark.parametrize("name", ["llama", "elita"])
def test_a_recipe_that_compiles_a_transformer_has_it_attend_without_a_mask(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A text of some words. " * 200)
    given = {"model.architecture": name, "model.hidden_size": 16, "tokenizer.kind": "byte", "training.max_steps": 1,
             "data.source": str(tmp_path / "text.txt")}  # fmt: skip
    ways = []
    for compiles in (False, True):
        recipe = resolve_recipe(load_recipe(None, given | {"training.compile": compiles}))
        ways.append(build_model(recipe, read_text(recipe)).config._attn_implementation)
    assert (ways[0] != ways[1]) == (name == "llama")


def test_it_begins_with_the_variances_that_it_is_named_for() -> None:
    torch.manual_seed(0)
    model = create_model("llama", **{**SIZES, "hidden_size": 64, "vocab_size": 500}, **UNIT)
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(1.0, rel=0.02)
    assert model.lm_head.weight.std().item() == pytest.approx(0.5, rel=0.02)
    assert model(input_ids=IDS).logits.std().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gpt2", {"output_bias": "unigram"}),
        ("gpt2", {"output_bias": "unigram", "tie_word_embeddings": False}),
        ("llama", UNIT),
        ("llama", {"output_bias": "unigram"}),
        ("llama", {**UNIT, "output_bias": "unigram"}),
    ],
)
def test_they_are_saved_and_loaded_whole(name: str, config: dict[str, object], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = create_model(name, **SIZES, **config).eval()
    if "output_bias" in config:
        before = model(input_ids=IDS).logits
        model.set_token_counts(torch.arange(40))
        bias = torch.log(torch.arange(1, 41) / torch.arange(1, 41).sum())
        torch.testing.assert_close(model(input_ids=IDS).logits, before + bias)
        assert "lm_head.bias" not in dict(model.named_parameters())
    ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    assert (ends[0] is ends[1]) == config.get("tie_word_embeddings", True)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("name", BASELINES)
def test_a_fixed_bias_stays_fixed_in_another_vocabulary(name: str, is_tied: bool) -> None:
    model = create_model(name, **SIZES, output_bias="unigram", tie_word_embeddings=is_tied)
    model.set_token_counts(torch.arange(40))
    before = model.lm_head.bias.clone()
    model.resize_token_embeddings(43)
    assert torch.equal(model.lm_head.bias, torch.cat([before, before.min().expand(3)]))
    assert "lm_head.bias" not in dict(model.named_parameters())
    assert model(input_ids=IDS).logits.shape[-1] == 43


@pytest.mark.parametrize("config", [{}, {"output_bias": "unigram"}, {"tie_word_embeddings": True}])
def test_products_stay_scaled_in_another_vocabulary(config: dict[str, object], tmp_path: Path) -> None:
    model = create_model("llama", **SIZES, **{**UNIT, "tie_word_embeddings": False, **config}).eval()
    before = model(input_ids=IDS).logits
    model.resize_token_embeddings(43)
    after = model(input_ids=IDS).logits
    torch.testing.assert_close(after[..., :40], before)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=IDS).logits, after)


def test_adapters_which_would_not_scale_their_input_are_refused() -> None:
    model = create_model("llama", **SIZES, **UNIT)
    with pytest.raises(InputError, match=r"^lora: given for a Llama with unit_variance"):
        insert_adapters(model, peft.LoraConfig(), "lora")


def test_importing_the_package_is_enough_to_load_them(tmp_path: Path) -> None:
    create_model("gpt2", **SIZES, output_bias="unigram").save_pretrained(tmp_path)
    program = f"""
import multilin
from transformers import AutoModelForCausalLM
assert AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).lm_head.bias.shape == (40,)
"""
    run([*PYTHON, "-c", program])


@pytest.mark.filterwarnings("ignore:.*reads across document borders")
@pytest.mark.parametrize("name", BASELINES)
def test_a_run_begins_at_the_counts_of_its_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("aaab" * 200 + "\n" + "abab" * 20)
    recipe = load_recipe(
        None,
        {
            "model.architecture": name, "model.hidden_size": 16, "model.num_layers": 1, "model.n_positions": 16,
            "model.config": {"output_bias": "unigram"}, "data.source": str(tmp_path / "text.txt"),
            "tokenizer.kind": "byte", "training.max_steps": 1, "output": str(tmp_path / "run"),
        },
    )  # fmt: skip
    bias = train(recipe).model.lm_head.bias
    loaded = load_run(tmp_path / "run")
    assert torch.equal(loaded.model.lm_head.bias, bias)
    a, b, c = (bias[loaded.tokenizer.encode(letter)[0]].exp().item() for letter in "abc")
    assert a > 2 * b > 100 * c
    again = {"model.start": str(tmp_path / "run"), "data.source": str(tmp_path / "text.txt"), "training.max_steps": 1}
    recipe = load_recipe(None, {**again, "output": str(tmp_path / "again")})
    assert recipe.model.architecture == name
    assert torch.equal(train(recipe).model.lm_head.bias, bias)


@pytest.mark.parametrize("name", BASELINES)
def test_smoothed_labels_are_those_of_the_next_tokens(name: str, tmp_path: Path) -> None:
    model = create_model(name, **SIZES, output_bias="unigram").eval()
    trainer = Trainer(model, TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to=[]))
    found = trainer.compute_loss(model, {"input_ids": IDS, "labels": IDS.clone()})
    logits = model(input_ids=IDS).logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, IDS[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found, expected)


def test_gpt2_has_no_scaled_products() -> None:
    with pytest.raises(InputError, match=r"model\.config\.unit_variance: True given, but only llama has it"):
        create_model("gpt2", **SIZES, unit_variance=True)
