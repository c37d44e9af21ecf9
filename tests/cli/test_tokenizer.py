import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
    assert "has no token for this tokenizer" in message
