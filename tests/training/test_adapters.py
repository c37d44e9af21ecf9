"""Runs that train low-rank adapters of a model in place of its weights."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from multilin.architectures import architectures
from multilin.cli.main import main
from multilin.errors import InputError
from multilin.model.factory import create_model, model_names
from multilin.runs.adapters import insert_adapters, reach
from multilin.runs.files import base_of, model_type, source_hashes
from multilin.runs.load import load_run
from multilin.training.loop import train
from multilin.training.outcomes import RunResult
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import load_recipe
from tests.training.conftest import Stopped, Tiny, metrics

LORA = {"training.lora": {"rank": 2, "dropout": 0.1}}
ADAPTERS = "adapter_model.safetensors"


class Messages(TrainingProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.cpu().eval()(torch.arange(2, 14)[None]).logits


@pytest.fixture(scope="module")
def base(uninterrupted: RunResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to start from, which a test may damage in a copy."""
    folder = tmp_path_factory.mktemp("base") / "base"
    shutil.copytree(uninterrupted.output, folder)
    return folder


@pytest.fixture(scope="module")
def adapted(base: Path, letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of adapters."""
    given = {"model.start": str(base), "data.source": str(letters), "training.max_steps": 4, **LORA}
    plain = {"training.batch_size": 2, "training.precision": "float32", "training.save_every_steps": 2}
    return train(load_recipe(None, plain | given | {"output": str(tmp_path_factory.mktemp("run") / "run")})).output


@pytest.mark.parametrize("architecture", list(architectures()))
def test_adapters_of_every_architecture_are_trained_alone(
    architecture: str, tiny: Tiny, tune: Tiny, tmp_path: Path
) -> None:
    warnings.simplefilter("ignore")  # of documents in a block that a mixer cannot tell apart
    few = {"training.max_steps": 2, "training.global_batch_size": 2, "training.save_every_steps": 0}
    first = train(tiny(tmp_path / "first", **{"model.architecture": architecture, **few}))
    told, recipe = Messages(), tune(first.output, tmp_path / "run", **few, **LORA)
    result = train(recipe, progress=told)
    assert "of the weights outside embeddings and output" in told.texts[0]
    names = {path.name for path in result.output.iterdir()}
    assert {"adapter_config.json", ADAPTERS, "recipe.yaml", "tokenizer.json"} <= names
    assert not {"config.json", "model.safetensors"} & names
    weights = load_file(result.output / ADAPTERS)
    assert all(tensor.any() for name, tensor in weights.items() if "lora_B" in name)
    # PEFT itself reads it, and merging changes nothing.
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(first.output), result.output)
    expected = logits_of(theirs)
    found = logits_of(load_run(result.output).model)
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * scale)
    assert not torch.equal(found, logits_of(first.model))


@pytest.mark.parametrize("architecture", model_names())
def test_adapters_reach_nearly_all_weights(architecture: str) -> None:
    """Positions are embeddings, too."""
    with torch.device("meta"):
        model = create_model(architecture, vocab_size=258, hidden_size=64, num_layers=1, n_positions=256)
        insert_adapters(model, LoraConfig(r=4, target_modules="all-linear"), "targets")
    share = float(re.search(r"([\d.]+)% of the weights", reach(model))[1])
    assert 98 <= share <= 100


@pytest.mark.parametrize("optimizer", ["adamw", "normalized_sgd"])
def test_adapters_resume_bit_for_bit(tune: Tiny, base: Path, tmp_path: Path, stopped: Stopped, optimizer: str) -> None:
    """The state of the second has no tensor as large as a parameter."""
    options = {**LORA, "optimizer.name": optimizer}
    whole = train(tune(base, tmp_path / "whole", **options))
    stopped(tune(base, tmp_path / "run", **options), 5)
    result = train(load_recipe(tmp_path / "run"), resume=True)
    left, right = load_file(result.output / ADAPTERS), load_file(whole.output / ADAPTERS)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert metrics(result.output) == metrics(whole.output)


@pytest.mark.parametrize("quantization", ["none", "ternary"])
def test_adapters_are_read_as_they_were_trained(tiny: Tiny, tune: Tiny, tmp_path: Path, quantization: str) -> None:
    """Beside float32 weights that no product rounds, whatever the base was trained or saved with."""
    rounded = tiny(tmp_path / "base", **{"training.quantization": quantization, "training.max_steps": 4})
    start = load_run(train(rounded).output)
    if quantization == "none":
        start.model.bfloat16().save_pretrained(start.folder)
    with pytest.warns(UserWarning, match="ternary") if quantization == "ternary" else nullcontext():
        result = train(tune(start.folder, tmp_path / "run", **LORA))
    model = load_run(result.output).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.arithmetic.get("weights", "none") == "none"


def test_recomputed_layers_train_the_same_adapters(tune: Tiny, base: Path, tmp_path: Path) -> None:
    few = {"training.max_steps": 2, **LORA}
    kept = train(tune(base, tmp_path / "kept", **few))
    recomputed = train(tune(base, tmp_path / "recomputed", **few, **{"training.gradient_checkpointing": True}))
    for name, tensor in load_file(kept.output / ADAPTERS).items():
        torch.testing.assert_close(load_file(recomputed.output / ADAPTERS)[name], tensor)


def test_an_adapter_run_and_its_merged_folder_are_used_like_any_model(
    adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = tmp_path / "merged"
    assert main(["merge", str(adapted), "--output", str(merged)]) == 0
    torch.testing.assert_close(logits_of(load_run(merged).model), logits_of(load_run(adapted).model), rtol=0, atol=0)
    texts, scores = [], []
    capsys.readouterr()
    for folder in (adapted, merged):
        arguments = ["--engine", "torch", "--prompt", "dear", "--max-new-tokens", "8", "--seed", "1"]
        assert main(["generate", str(folder), *arguments]) == 0
        texts.append(capsys.readouterr().out)
        assert main(["evaluate", str(folder), "--json"]) == 0
        scores.append(json.loads(capsys.readouterr().out)["bits_per_byte"])
    assert texts[0] == texts[1]
    assert scores[0] == scores[1]
    assert main(["merge", str(merged), "--output", str(tmp_path / "again")]) == 2
    assert "holds a whole model, but only adapters can be merged" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [{}, {"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": [258]}])
def test_adapters_of_a_grown_vocabulary(base: Path, tmp_path: Path, kept: dict[str, Any]) -> None:
    """PEFT keeps the whole embedding beside them, which is read; other weights that it trained are refused."""
    warnings.simplefilter("ignore")  # PEFT says what it keeps
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    model.resize_token_embeddings(len(tokenizer))
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", **kept))
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    if kept:
        with pytest.raises(InputError, match=r"modules_to_save or trainable_token_indices.*merge_and_unload"):
            load_run(tmp_path)
        return
    run = load_run(tmp_path)
    assert (len(run.tokenizer), run.model.config.vocab_size) == (260, 260)
    torch.testing.assert_close(logits_of(run.model), logits_of(adapted), rtol=1e-4, atol=1e-4)


def test_an_adapter_run_is_a_start(tune: Tiny, adapted: Path, tmp_path: Path) -> None:
    result = train(tune(adapted, tmp_path / "next", **{"training.max_steps": 1}))
    assert (result.output / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training.lora": {"rank": 0}}, r"training\.lora\.rank: 0 given"),
        ({"training.lora": {"alpha": 2.0}}, r"training\.lora\.rank: missing"),
        ({"training.lora": {"rank": 2, "ranks": 2}}, r"training\.lora\.ranks: unknown field; did you mean 'rank'"),
        ({"training.lora": {"rank": 2, "targets": ["nowhere"]}}, r"training\.lora\.targets: no adapters .*nowhere"),
        ({**LORA, "training.precision": "int8"}, r"training\.precision: 'int8' given with training\.lora"),
        ({**LORA, "training.quantization": "ternary"}, r"training\.quantization: 'ternary' given"),
        ({**LORA, "model.start": None}, r"training\.lora: given without model\.start"),
    ],
)
def test_what_adapters_cannot_do_is_refused(
    changes: dict[str, Any], message: str, tune: Tiny, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train(tune(base, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_targets_choose_the_matrices(tune: Tiny, base: Path, tmp_path: Path) -> None:
    lora = {"training.lora": {"rank": 2, "targets": ["expand", "lm_head"]}, "training.max_steps": 1}
    with pytest.raises(InputError, match=r"training\.lora\.targets: .* shares its matrix with the embedding"):
        train(tune(base, tmp_path / "run", **lora))
    lora["training.lora"]["targets"].pop()
    result = train(tune(base, tmp_path / "run", **lora))
    assert {name.rsplit(".", 3)[1] for name in load_file(result.output / ADAPTERS)} == {"expand"}


@pytest.fixture
def copied(adapted: Path, tmp_path: Path) -> Path:
    shutil.copytree(adapted, tmp_path / "copied")
    return tmp_path / "copied"


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_base_is_found_beside_its_adapters(
    copied: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(base, tmp_path / "runs" / "base")
    change_config(copied, base_model_name_or_path="runs/base")
    monkeypatch.chdir("/")
    assert Path(base_of(copied)) == tmp_path / "runs" / "base"


def test_an_export_is_out_of_date_when_the_base_or_the_rank_changes(copied: Path, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    change_config(copied, base_model_name_or_path=str(tmp_path / "base"))
    before = source_hashes(copied)
    change_config(copied, lora_alpha=1)
    changed = source_hashes(copied)
    (tmp_path / "base" / "model.safetensors").write_bytes(b"other weights")
    assert len({str(hashes) for hashes in (before, changed, source_hashes(copied))}) == 3


def test_a_base_that_moved_or_changed_is_said(copied: Path, base: Path, tmp_path: Path) -> None:
    change_config(copied, base_model_name_or_path=str(tmp_path / "moved"))
    with pytest.raises(InputError, match=r"run: the model of the adapters in .*: .* does not exist"):
        load_run(copied)
    shutil.copytree(base, tmp_path / "moved")
    load_run(copied)
    other = AutoModelForCausalLM.from_pretrained(base)
    torch.nn.init.ones_(other.get_input_embeddings().weight)
    other.save_pretrained(tmp_path / "moved")
    with pytest.raises(InputError, match=r"the weights in .*moved do not have the hash in the recipe"):
        load_run(copied)


def test_adapters_of_another_model_are_refused(copied: Path, tiny: Tiny, tmp_path: Path) -> None:
    (copied / "recipe.yaml").unlink()
    few = {"training.max_steps": 1, "training.save_every_steps": 0}
    for number, changes in enumerate(({"model.hidden_size": 32}, {"model.architecture": "tscale"})):
        other = train(tiny(tmp_path / str(number), **few, **changes))
        change_config(copied, base_model_name_or_path=str(other.output))
        with pytest.raises(InputError, match=r"run: the adapters in .* belong to another model than "):
            load_run(copied)
    change_config(copied, base_model_name_or_path=str(copied))
    with pytest.raises(InputError, match=r"name themselves"):
        load_run(copied)
    shutil.copytree(copied, tmp_path / "other")
    change_config(copied, base_model_name_or_path=str(tmp_path / "other"))
    with pytest.raises(InputError, match=r"name themselves"):
        load_run(copied)
    assert model_type(copied) is None


@pytest.mark.parametrize("content", ["", "- model", "model:"])
def test_a_recipe_without_sections_records_no_hash(content: str, copied: Path) -> None:
    (copied / "recipe.yaml").write_text(content)
    load_run(copied)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / ADAPTERS).write_bytes(b"nothing"), r"damaged or incomplete"),
        (lambda folder: (folder / ADAPTERS).rename(folder / "other.safetensors"), r"have no weights"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), r"should hold a JSON object"),
        (lambda folder: change_config(folder, base_model_name_or_path=None), r"names no model"),
        (lambda folder: change_config(folder, peft_type="IA3"), r"cannot be read|of the kind"),
        (lambda folder: save_file({"lora_A": torch.tensor([1.0])}, folder / ADAPTERS), r"belong to another model"),
    ],
)
def test_damaged_adapters_are_one_sentence(damage: Callable[[Path], object], message: str, copied: Path) -> None:
    damage(copied)
    with pytest.raises(InputError, match=message) as refused:
        load_run(copied)
    assert str(refused.value).startswith("run: ")
