"""Runs that begin with the weights, the tokenizer and the sizes of another model."""

import dataclasses
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from multilin.analysis.evaluate.run import recipe_of, validation_text
from multilin.architectures import architectures
from multilin.data.tokenizers import load_tokenizer, tokenizer_hash, train_tokenizer
from multilin.errors import InputError
from multilin.runs.load import load_run
from multilin.training.loop import train
from multilin.training.outcomes import RunResult
from multilin.training.recipe import load_recipe, save_recipe
from multilin.training.run_folder import RunFolder
from multilin.training.start import load_start
from tests.training.conftest import AtStep, Stopped, Tiny, assert_same_run

DECIDED = ("model.architecture", "model.hidden_size", "model.num_layers", "model.n_positions", "tokenizer.kind")


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """The folder of a tokenizer."""
    folder = tmp_path_factory.mktemp("words")
    train_tokenizer([text_file.read_text()], "bpe", 270).save_pretrained(folder)
    return folder


def test_a_run_begins_with_the_weights_and_sizes_of_another(
    tune: Tiny, uninterrupted: RunResult, tmp_path: Path, at_step: AtStep
) -> None:
    begun = []
    at_step(1, lambda model: begun.append({name: tensor.clone() for name, tensor in model.state_dict().items()}))
    recipe = tune(uninterrupted.output, tmp_path / "tuned")
    result = train(recipe)
    before = load_file(uninterrupted.output / "model.safetensors")
    assert all(torch.equal(begun[0][name], tensor) for name, tensor in before.items())
    after = load_file(result.output / "model.safetensors")
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    start = load_recipe(uninterrupted.output)
    recorded = load_recipe(result.output)
    assert recorded.model == dataclasses.replace(
        start.model, start=str(uninterrupted.output), start_hash=recipe.model.start_hash
    )
    assert "trained from `" in (result.output / "README.md").read_text()
    assert tokenizer_hash(result.tokenizer) == tokenizer_hash(uninterrupted.tokenizer)
    assert validation_text(load_run(result.output), recipe_of(load_run(result.output))).num_tokens > 0


def test_training_on_is_better_than_from_nothing(tune: Tiny, uninterrupted: RunResult, tmp_path: Path) -> None:
    """On the text of the start itself, where twelve more steps can only help."""
    source = load_recipe(uninterrupted.output).data.source
    result = train(tune(uninterrupted.output, tmp_path / "tuned", **{"data.source": source}))
    assert result.validation_loss < uninterrupted.validation_loss


@pytest.mark.parametrize("architecture", list(architectures()))
def test_every_architecture_can_be_started_from(architecture: str, tiny: Tiny, tune: Tiny, tmp_path: Path) -> None:
    few = {"training.max_steps": 1, "training.global_batch_size": 2}
    warnings.simplefilter("ignore")  # of documents in a block that a mixer cannot tell apart
    first = train(tiny(tmp_path / "first", **{"model.architecture": architecture, **few}))
    second = train(tune(first.output, tmp_path / "second", **few))
    assert load_recipe(second.output).model.architecture == architecture
    left, right = (load_file(result.output / "model.safetensors") for result in (first, second))
    assert {name: tensor.shape for name, tensor in left.items()} == {n: tensor.shape for n, tensor in right.items()}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers_are_trained_on(kind: str, tune: Tiny, words: Path, tmp_path: Path) -> None:
    config = {
        "gpt2": GPT2Config(vocab_size=280, n_embd=16, n_layer=1, n_head=2, n_positions=32),
        "llama": LlamaConfig(
            vocab_size=280, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=32,
        ),
    }[kind]  # fmt: skip
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    load_tokenizer(str(words)).save_pretrained(tmp_path / "model")
    with pytest.warns(UserWarning, match="reads across document borders inside a block"):
        result = train(tune(tmp_path / "model", tmp_path / "run", **{"training.max_steps": 2}))
    recipe = load_recipe(result.output)
    assert (recipe.model.architecture, recipe.model.hidden_size, recipe.model.n_positions) == (kind, 16, 32)
    run = load_run(result.output)
    assert run.model.dtype == torch.float32
    assert run.model.config.vocab_size == 280


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.architecture": "tscale"}, r"model\.architecture: 'tscale' given, .* has 'additive'; leave it out"),
        ({"model.hidden_size": 256}, r"model\.hidden_size: 256 given, .* has 16"),
        ({"model.num_layers": 2}, r"model\.num_layers: 2 given, .* has 1"),
        ({"model.options.num_heads": 2}, r"model\.options: .* given, .* leave it out"),
        ({"model.config.output_bias": "learned"}, r"model\.config: .* given"),
        ({"model.n_positions": 17}, r"model\.n_positions: 17 given, .* reads at most 16 tokens"),
        ({"tokenizer.kind": "bpe"}, r"tokenizer\.kind: 'bpe' given, .* has 'byte'"),
        ({"tokenizer.vocab_size": 300}, r"tokenizer\.vocab_size: 300 given"),
        ({"tokenizer.path": "elsewhere"}, r"tokenizer\.path: 'elsewhere' given"),
        ({"training.precision": "nonsense"}, r"training\.precision: 'nonsense' given"),
    ],
)
def test_what_contradicts_the_start_is_refused(
    changes: dict[str, Any], message: str, tune: Tiny, uninterrupted: RunResult, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train(tune(uninterrupted.output, tmp_path / "tuned", **changes))
    assert not (tmp_path / "tuned").exists()


def test_what_agrees_with_the_start_is_accepted(tune: Tiny, uninterrupted: RunResult, tmp_path: Path) -> None:
    start = load_recipe(uninterrupted.output)
    given = {name: getattr(getattr(start, section), field)
             for name, (section, field) in ((name, name.split(".")) for name in DECIDED)}  # fmt: skip
    texts = {name: str(value) for name, value in given.items()}
    for agreeing in (given, texts):
        assert tune(uninterrupted.output, tmp_path, **agreeing) == tune(uninterrupted.output, tmp_path)
    assert tune(uninterrupted.output, tmp_path, **{"model.n_positions": "8"}).model.n_positions == 8


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), r"does not exist"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"holds no weights"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "mpt"}'), r"of the type 'mpt' given"),
        (lambda folder: (folder / "config.json").write_text("{"), r"is not JSON"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"holds no tokenizer\.json"),
    ],
)
def test_what_is_no_model_is_refused(
    damage: Callable[[Path], object], message: str, tune: Tiny, uninterrupted: RunResult, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(uninterrupted.output, folder)
    damage(folder)
    with pytest.raises(InputError, match=message) as refused:
        train(tune(folder, tmp_path / "tuned"))
    assert str(refused.value).startswith(("model.start: ", "tokenizer: "))
    assert not (tmp_path / "tuned").exists()


def test_the_hub_without_network_is_one_sentence(tune: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", offline)
    for name in ("someone/some-model", "gpt2"):
        with pytest.raises(InputError, match=r"model\.start: .* neither a folder nor .* no route to the hub"):
            tune(name, tmp_path)


def test_what_a_run_recorded_of_its_model_gives_way_to_another_start(
    tiny: Tiny, uninterrupted: RunResult, tmp_path: Path
) -> None:
    other = tiny(tmp_path / "other", **{"model.hidden_size": 32, "training.max_steps": 2})
    started = train(
        load_recipe(uninterrupted.output, {"model.start": str(train(other).output), "output": str(tmp_path / "run")})
    )
    assert started.model.config.hidden_size == 32


def test_a_start_that_changed_is_said(tune: Tiny, uninterrupted: RunResult, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(uninterrupted.output, folder)
    recipe = tune(folder, tmp_path / "tuned")
    other = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.ones_(other.get_input_embeddings().weight)
    other.save_pretrained(folder)
    given = tune(folder, tmp_path / "tuned", **{"model.start_hash": recipe.model.start_hash})
    for changed in (recipe, given):
        with pytest.raises(InputError, match=r"model\.start: the weights in .* do not have the hash in the recipe"):
            train(changed)


def test_a_start_is_taken_out_of_a_run_with_its_hash(tune: Tiny, uninterrupted: RunResult, tmp_path: Path) -> None:
    save_recipe(tune(uninterrupted.output, tmp_path), tmp_path / "recipe.yaml")
    model = load_recipe(tmp_path, {"model.start": None}).model
    assert (model.start, model.start_hash, model.hidden_size) == (None, None, 16)


def test_another_tokenizer_is_refused(tune: Tiny, uninterrupted: RunResult, words: Path, tmp_path: Path) -> None:
    start = tune(uninterrupted.output, tmp_path).model
    with pytest.raises(
        InputError, match=r"model\.start: the model in .* has another tokenizer than the text to train on"
    ):
        load_start(start.start, start.start_hash, load_tokenizer(str(words)))


def test_a_start_is_not_written_over(tune: Tiny, uninterrupted: RunResult, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(uninterrupted.output, folder)
    with pytest.raises(InputError, match=r"output: .* holds the model to start from"):
        train(tune(folder, folder), overwrite=True)
    checkpoint = tmp_path / "tuned.checkpoints" / "checkpoint-12"
    shutil.copytree(uninterrupted.output, checkpoint)
    with pytest.raises(InputError, match=r"output: .* holds the model to start from"):
        train(tune(checkpoint, tmp_path / "tuned"), overwrite=True)
    assert checkpoint.is_dir()


def test_int8_weights_are_no_start(tune: Tiny, uninterrupted: RunResult, tmp_path: Path) -> None:
    run = load_run(uninterrupted.output)
    run.model.set_arithmetic(dataclasses.replace(run.model.arithmetic, products="int8", stored_as_int8=True))
    run.model.save_pretrained(tmp_path / "int8")
    run.tokenizer.save_pretrained(tmp_path / "int8")
    with pytest.raises(InputError, match=r"model\.start: the weights in .* are int8"):
        train(tune(tmp_path / "int8", tmp_path / "tuned"))


def test_a_tuned_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    tune: Tiny, uninterrupted: RunResult, tmp_path: Path, stopped: Stopped
) -> None:
    whole = train(tune(uninterrupted.output, tmp_path / "whole"))
    recipe = stopped(tune(uninterrupted.output, tmp_path / "tuned"), 5)
    newest = RunFolder(tmp_path / "tuned").last_checkpoint()
    assert newest is not None
    (newest / "config.json").write_text("{")
    with pytest.warns(UserWarning, match=r"config\.json is .*; the run resumes from checkpoint-4"):
        result = train(recipe, resume=True)
    assert_same_run(result.output, whole.output)


def test_a_tuned_run_resumes_bit_for_bit_without_its_start(
    tune: Tiny, uninterrupted: RunResult, tmp_path: Path, stopped: Stopped
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(uninterrupted.output, folder)
    whole = train(tune(folder, tmp_path / "whole"))
    stopped(tune(folder, tmp_path / "tuned"), 5)
    shutil.rmtree(folder)
    result = train(load_recipe(tmp_path / "tuned"), resume=True)
    assert_same_run(result.output, whole.output)
    assert load_run(result.output).model.config.vocab_size == 258
    with pytest.raises(InputError, match=r"model\.start: .* does not exist"):
        train(load_recipe(tmp_path / "tuned", {"output": str(tmp_path / "again")}))
