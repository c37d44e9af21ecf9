import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from multilin.cli.main import main

Call = Callable[..., str]


def test_a_tokenizer_is_trained_and_shown(cli: Call, refusal: Call, text_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "tokenizer"
    assert "300 tokens" in cli("tokenizer", "train", text_file, output, "--vocab-size", 300)
    found = json.loads(cli("tokenizer", "show", output, "--source", text_file, "--text", "the house", "--json"))
    assert found["vocabulary"] == 300
    assert found["special_tokens"]["eos_token"] == "<|endoftext|>"
    assert found["bytes"] == text_file.stat().st_size
    assert found["bytes_per_token"] == pytest.approx(found["bytes"] / found["tokens"])
    assert found["bytes_per_token"] > 2
    assert "".join(found["pieces"]) == "the house"
    assert f"{found['bytes_per_token']:.3f}" in cli("tokenizer", "show", output, "--source", text_file)

    assert refusal("tokenizer", "train", text_file, output).endswith("or replace it with --overwrite")
    cli("tokenizer", "train", text_file, output, "--kind", "byte", "--overwrite")
    assert "258 tokens" in cli("tokenizer", "show", output)


@pytest.mark.filterwarnings("always")
def test_verbs_that_read_a_source_name_once_what_they_pass_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} {text_file.read_text()}")
    (tmp_path / "texts" / "a.pdf").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = "--model.hidden_size 16 --model.num_layers 1 --training.max_steps 2 --training.batch_size 1"
    for command in (
        "tokenizer train texts tokenizer --vocab-size 300",
        "tokenizer show tokenizer --source texts",
        "prepare texts --output shards --tokenizer tokenizer --workers 1",
        f"train --data.source texts --output run --tokenizer.path tokenizer {small}",
        "evaluate run",
    ):
        monkeypatch.setattr("multilin.errors._warned", set())
        assert main(command.split()) == 0
        assert capsys.readouterr().err.count("'texts': skipped 1 file of other kinds: .pdf (1)\n") == 1


def test_a_refused_tokenizer_leaves_nothing(refusal: Call, text_file: Path, tmp_path: Path) -> None:
    message = refusal("tokenizer", "train", text_file, tmp_path / "out", "--vocab-size", 100_000)
    assert "the corpus supports" in message
    assert "does not exist" in refusal("tokenizer", "train", tmp_path / "no.txt", tmp_path / "out")
    assert "OUTPUT" in refusal("tokenizer", "train", text_file, text_file)
    assert list(tmp_path.iterdir()) == []


def test_a_text_without_a_token_is_refused(refusal: Call, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>").save_pretrained(tmp_path / "words")
    (tmp_path / "blank.txt").write_text("  \n ")
    message = refusal("tokenizer", "show", tmp_path / "words", "--source", tmp_path / "blank.txt")
    assert "this tokenizer makes no token of" in message
