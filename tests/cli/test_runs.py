import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from multilin.analysis.evaluate.run import validation_text
from multilin.data.tokenizers import load_tokenizer, tokenizer_hash
from multilin.inference.generate_run import text_codec
from multilin.runs.load import load_run
from multilin.training.recipe import load_recipe
from multilin.training.run_folder import RunFolder

Call = Callable[..., str]


@pytest.fixture
def damaged(additive: Path, tmp_path: Path) -> Path:
    """A copy of a run, to be damaged."""
    return Path(shutil.copytree(additive, tmp_path / "run"))


def test_train_takes_options_of_the_architecture_both_ways(trained: Path, refusal: Call) -> None:
    assert AutoConfig.from_pretrained(trained).layers[0]["num_heads"] == 2
    message = refusal("train", "--model.options", '{"num_heads": 3}', "--model.hidden_size", 16)
    assert message == "num_heads: 3 given, but it must divide the hidden size 16"


def test_train_refuses_to_replace_a_run(trained: Path, refusal: Call) -> None:
    assert f"{trained} already holds a run" in refusal("train", trained)


def test_evaluate_scores_the_validation_text_of_the_run(trained: Path, cli: Call, tmp_path: Path) -> None:
    found = json.loads(cli("evaluate", trained, "--json", "--output", tmp_path / "found.json"))
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["bits_per_byte"] == pytest.approx(last["validation_bits_per_byte"], rel=1e-5)
    assert found["loss"] == pytest.approx(last["validation_loss"], rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert json.loads((tmp_path / "found.json").read_text()) == found


def test_evaluate_warns_where_the_text_of_the_run_has_changed(trained: Path, tmp_path: Path) -> None:
    """Also where the tokenizer, here of bytes, is the same for any text."""
    run, recipe = load_run(trained), load_recipe(trained)
    (tmp_path / "text.txt").write_text(Path(recipe.data.source).read_text() + "the dog ran\n" * 20)
    validation_text(run, recipe)
    changed = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, source=str(tmp_path / "text.txt")))
    with pytest.warns(UserWarning, match="has changed since .* was trained"):
        validation_text(run, changed)


def test_evaluate_scores_any_text(trained: Path, cli: Call, tmp_path: Path) -> None:
    text = "the cat sat on the mat\n" * 20
    (tmp_path / "text.txt").write_text(text)
    found = json.loads(cli("evaluate", trained, "--json", "--source", tmp_path / "text.txt"))
    assert found["tokens"] == found["bytes"] == len(text)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    some = json.loads(
        cli("evaluate", trained, "--source", tmp_path / "text.txt", "--max-tokens", 50, "--batch-size", 1, "--json")
    )
    assert 50 <= some["tokens"] < 120


def test_evaluate_needs_a_text(additive: Path, refusal: Call, tmp_path: Path) -> None:
    assert refusal("evaluate", additive).startswith(f"source: none given, and {additive} has no recipe.yaml")
    assert "does not exist" in refusal("evaluate", additive, "--source", tmp_path / "no.txt")
    message = refusal("evaluate", additive, "--output", tmp_path / "no" / "found.json")
    assert message == f"--output: the folder {tmp_path / 'no'} does not exist"


def test_a_run_continues_and_can_be_replaced_only_on_request(trained: Path, cli: Call, tmp_path: Path) -> None:
    """What `train` says to type next works: generate from a checkpoint too."""
    checkpoint = next(RunFolder(trained).checkpoints.glob("checkpoint-*"))
    assert cli("generate", trained, "--prompt", "the", "--max-new-tokens", 5, "--seed", 1).startswith("the")
    assert cli("generate", checkpoint, "--prompt", "the", "--max-new-tokens", 5, "--seed", 1).startswith("the")


def test_a_truncated_weights_file_is_named(damaged: Path, refusal: Call) -> None:
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert refusal("generate", damaged, "--prompt", "x").startswith(f"run: {weights} is damaged or incomplete")


def test_another_tokenizer_of_the_same_size_is_refused(damaged: Path, cli: Call, refusal: Call) -> None:
    config = json.loads((damaged / "config.json").read_text())
    config["tokenizer_hash"] = tokenizer_hash(load_tokenizer(str(damaged)))
    (damaged / "config.json").write_text(json.dumps(config))
    cli("generate", damaged, "--prompt", "x", "--max-new-tokens", 1)
    tokenizer = json.loads((damaged / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (damaged / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "not the tokenizer that its model was trained" in refusal("evaluate", damaged, "--source", "python-docs")


def written(verb: str, run: Path, text: Path, output: Path) -> tuple[list[object], Path]:
    """The command that writes a folder with the tokenizer of a run, and where the tokenizer then is."""
    data = ["--data.source", text, "--training.max_steps", 1, "--training.batch_size", 2]
    return {
        "export": (["export", run, "--output", output, "--precision", "float32"], output),
        "publish": (["publish", run, "someone/letters", "--folder", output], output),
        "quantize": (["quantize", run, "--source", text, "--output", output], output),
        "prepare": (["prepare", text, "--tokenizer", run, "--output", output], output / "tokenizer"),
        "train": (["train", "--model.start", run, *data, "--output", output], output),
    }[verb]


@pytest.mark.parametrize("verb", ["export", "publish", "quantize", "prepare", "train"])
def test_truncation_and_padding_are_not_handed_on(damaged: Path, cli: Call, tmp_path: Path, verb: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(damaged)
    tokenizer(["a b c d e", "x"], truncation=True, padding="max_length", max_length=4)
    tokenizer.model_max_length = 5
    tokenizer.save_pretrained(damaged)
    assert json.loads((damaged / "tokenizer.json").read_text())["truncation"]["max_length"] == 4
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"{number}.txt").write_text(f"the cat sat on the mat {number} times\n" * 5)
    command, folder = written(verb, damaged, tmp_path / "text", tmp_path / "output")
    cli(*command)
    content = json.loads((folder / "tokenizer.json").read_text())
    assert (content["truncation"], content["padding"]) == (None, None)
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert theirs.decode(theirs("the cat sat", truncation=True)["input_ids"]) == "the cat sat"


@pytest.mark.parametrize("changes_end", [False, True])
def test_a_vocabulary_that_was_grown_in_transformers_is_used(
    damaged: Path, cli: Call, text_file: Path, tmp_path: Path, changes_end: bool
) -> None:
    """As TRL does it for chats, with rows of the embedding that stand for no token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(damaged), AutoTokenizer.from_pretrained(damaged)
    model.config.tokenizer_hash = tokenizer_hash(tokenizer)
    model.save_pretrained(damaged)
    torch.manual_seed(0)
    prompt = ("--prompt", "a cat", "--max-new-tokens", 8)
    expected = cli("generate", damaged, *prompt, "--temperature", 0)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    if changes_end:
        tokenizer.eos_token = "<|im_end|>"
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    torch.nn.init.ones_(model.get_output_embeddings().weight.data[len(tokenizer) :])
    model.save_pretrained(damaged)
    tokenizer.save_pretrained(damaged)
    assert cli("generate", damaged, *prompt, "--temperature", 0) == expected
    cli("generate", damaged, *prompt, "--num-beams", 2)  # its scores count the new tokens too
    cli("info", damaged)
    cli("explain", damaged, "--text", "a cat")
    for verb in ("quantize", "publish", "train"):
        command, folder = written(verb, damaged, text_file, tmp_path / verb)
        cli(*command)
        run = load_run(folder)
        assert (len(run.tokenizer), run.model.config.vocab_size) == (260, 320)
        assert json.loads((folder / "config.json").read_text())["tokenizer_hash"] == tokenizer_hash(run.tokenizer)
        assert (text_codec(run.tokenizer).end_id, text_codec(run.tokenizer).eos_id) == (0, 259 if changes_end else 0)


def test_added_tokens_without_embeddings_are_refused_with_what_to_do(damaged: Path, refusal: Call) -> None:
    tokenizer = AutoTokenizer.from_pretrained(damaged)
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"tokenizer_hash": tokenizer_hash(tokenizer)}))
    tokenizer.add_tokens(["<x>"])
    tokenizer.save_pretrained(damaged)
    message = refusal("generate", damaged, "--prompt", "x")
    assert message.endswith("if tokens were added, save the model again after model.resize_token_embeddings(259)")
    assert "original" not in message


@pytest.mark.parametrize("verb", ["generate", "evaluate", "info"])
def test_a_folder_without_a_model_is_refused(refusal: Call, tmp_path: Path, verb: str) -> None:
    assert refusal(verb, tmp_path).startswith(f"run: {tmp_path} holds no model (no config.json)")
    (tmp_path / "recipe.yaml").write_text("{}")
    assert refusal(verb, tmp_path).endswith(f"finish its training with `multilin train {tmp_path} --resume`")


def test_missing_parts_are_named(damaged: Path, refusal: Call) -> None:
    assert refusal("generate", "nowhere").startswith("run: there is no folder 'nowhere'")
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"layers": config["layers"] * 2, "num_hidden_layers": 4}))
    assert "lack model.layers.2." in refusal("generate", damaged, "--prompt", "x")
    unknown = {"layers": [{"architecture": "addtive"}], "num_hidden_layers": 1}
    (damaged / "config.json").write_text(json.dumps(config | unknown))
    assert "did you mean 'additive'?" in refusal("generate", damaged, "--prompt", "x")
    (damaged / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal("generate", damaged, "--prompt", "x")
    (damaged / "model.safetensors").unlink()
    assert refusal("info", damaged).startswith(f"run: {damaged} holds no weights")


def test_evaluate_shows_where_the_bits_go(trained: Path, cli: Call) -> None:
    found = json.loads(cli("evaluate", trained, "--json"))
    shown = " ".join(cli("evaluate", trained).split())
    assert f"{found['bits_per_byte']:.4f} bits per byte, {found['loss']:.4f} nats per token" in shown
    for name in ("by_position", "by_class", "by_frequency"):
        assert sum(part["tokens"] for part in found[name]) == found["tokens"]
        for part in found[name]:
            assert f"{part['name']} {part['bits_per_byte']:.3f} {part['loss']:.3f}" in shown
    # The validation text is the end of one document: no best, no worst, and "1 document".
    assert found["by_document"] == {"number": 1, "long_enough": 1, "fewest_bytes": 100}
    assert shown.endswith("1 document, 1 of them with at least 100 bytes")


def test_evaluate_shows_the_best_and_the_worst_of_several_documents(trained: Path, cli: Call, tmp_path: Path) -> None:
    texts = [
        "the cat sat on the mat and ran " * 5,
        "Zürich, 12.34%! " * 20,
        "a dog saw the tree " * 9,
        "short",
        "@#$%&" * 40,
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["evaluate", trained, "--source", tmp_path / "texts.jsonl"]
    documents = json.loads(cli(*arguments, "--json"))["by_document"]
    shown = " ".join(cli(*arguments).split())
    assert "5 documents, 4 of them with at least 100 bytes: median" in shown
    assert "best" in shown
    assert documents["worst"][0]["begins_with"][:20] in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--long"], "long: this model reads at most 32 tokens; leave out --long to read in blocks"),
        (["--tasks", "x", "--long"], "--long: given with --tasks, but tasks have their own texts"),
        (["--tasks", "x", "--source", "y"], "--source: given with --tasks"),
        (["--task-limit", "3"], "--task-limit: given without --tasks; name the tasks to score on"),
        (["--tasks", "x", "--text-field", "y"], "--text-field: given with --tasks, but tasks"),
        (["--encoding-errors", "replace"], "--encoding-errors: given without --source, but it describes"),
        (["--task-limit", "0"], "--task-limit: 0 given, but it should be at least 1"),
        (["--tasks", " ,"], "tasks: ' ,' given, but it should be names of lm-eval tasks, separated by commas"),
    ],
)
def test_what_evaluate_would_ignore_is_refused(
    trained: Path, refusal: Call, arguments: list[str], message: str
) -> None:
    assert refusal("evaluate", trained, *arguments).startswith(message)


def test_tasks_need_lm_eval(trained: Path, refusal: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal("evaluate", trained, "--tasks", "x").startswith(
        "--tasks: needs lm_eval, which is not installed; pip install"
    )


def test_explain_takes_a_passage_of_the_validation_text(
    trained: Path, text_file: Path, cli: Call, refusal: Call, tmp_path: Path
) -> None:
    cli("explain", trained, "--output", tmp_path / "out", "--max-tokens", 12)
    found = json.loads((tmp_path / "out" / "explain.json").read_text(encoding="utf-8"))
    assert found["source"] == "the first 12 tokens of document 0 of the run's validation text"
    text = "".join(token["text"] for token in found["tokens"][1:])
    assert len(text) == 12
    assert text in text_file.read_text()
    assert "--document: 1 given together with a text" in refusal("explain", trained, "--text", "a", "--document", 1)
    assert "--document: 99999 given, but the validation text has" in refusal("explain", trained, "--document", 99999)
