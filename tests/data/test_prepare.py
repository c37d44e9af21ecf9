"""Preparation splits by document, is done once, follows its input, and never leaves half an entry."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multilin.data.packed_text import PackedText
from multilin.data.prepare import PreparedText, prepare_text
from multilin.data.progress import Progress, no_progress
from multilin.data.settings import DataRecipe, TokenizerRecipe
from multilin.errors import InputError
from tests.processes import PYTHON, run

DEFAULTS: dict[str, Any] = {"kind": "bpe", "vocab_size": 270, "path": None}


def prepare(source: Path | str, cache: Path | None, progress: Progress = no_progress, **options: Any) -> PreparedText:
    tokenizer = TokenizerRecipe(**DEFAULTS | {name: options.pop(name) for name in DEFAULTS.keys() & options.keys()})
    data = DataRecipe(source=str(source), **{"validation_fraction": 0.1} | options)
    return prepare_text(data, tokenizer, cache_folder=cache, progress=progress)


def texts_of(prepared: PreparedText, side: PackedText) -> list[str]:
    rows = np.split(side.tokens, side.document_starts[1:])
    return [prepared.tokenizer.decode(row[1:].tolist()) for row in rows]


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"Document number {number} tells of {number * number} cats.\n" * 3)
    return folder


def test_whole_documents_are_set_aside_and_none_is_lost(corpus: Path, tmp_path: Path) -> None:
    prepared = prepare(corpus, tmp_path / "cache", validation_fraction=0.2)
    train, validation = texts_of(prepared, prepared.train), texts_of(prepared, prepared.validation)
    everything = [path.read_text() for path in sorted(corpus.iterdir())]
    assert sorted(train + validation) == sorted(everything)
    sizes = [side.description.num_bytes for side in (prepared.train, prepared.validation)]
    assert 0.1 < sizes[1] / sum(sizes) <= 0.2
    assert train == [text for text in everything if text in train]


@pytest.mark.filterwarnings("ignore:.* are also in the training text")
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_validation_text_is_halved_by_document_whatever_the_tokenizer(corpus: Path, tmp_path: Path, kind: str) -> None:
    """Every second document, without preparing anything anew."""
    options = {"validation": str(corpus), "kind": kind, "vocab_size": 265}
    whole = prepare(corpus, tmp_path / "cache", **options)
    everything = [path.read_text() for path in sorted(corpus.iterdir())]
    for name, expected in (("final", everything[::2]), ("tuning", everything[1::2])):
        half = prepare(corpus, tmp_path / "cache", validation_part=name, **options)
        part = half.validation
        assert texts_of(half, part) == texts_of(whole, whole.validation)[name == "tuning" :: 2]
        assert part.num_bytes == part.document_bytes.sum() == sum(len(text.encode()) for text in expected)
        assert (part.num_documents, part.num_tokens) == (10, len(part.tokens))
        assert part.bytes_per_counted == pytest.approx(whole.validation.bytes_per_counted, rel=0.01)
        assert part.document_of(0, part.num_tokens)[-1] == 9
        assert half.identity == whole.identity
    assert len(entries(tmp_path / "cache")) == 1
    (tmp_path / "one.txt").write_text("alone\n")
    with pytest.raises(InputError, match="validation_part: final given, but there is only one document to validate on"):
        prepare(
            corpus, tmp_path / "cache", **options | {"validation": str(tmp_path / "one.txt")}, validation_part="final"
        )


@pytest.mark.parametrize("kind", ["byte", "unigram"])
def test_of_ends_of_documents_each_half_has_a_part_of_each(tmp_path: Path, kind: str) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("book", "code", "verse"):
        (tmp_path / "texts" / f"{name}.txt").write_text("".join(f"line {n} of {name}, naïve\n" for n in range(200)))
    options: dict[str, Any] = {"kind": kind, "vocab_size": None if kind == "byte" else 280}
    whole = prepare(tmp_path / "texts", tmp_path / "cache", **options)
    final, tuning = (
        prepare(tmp_path / "texts", tmp_path / "cache", **options, validation_part=part) for part in ("final", "tuning")
    )
    ends, halves = texts_of(whole, whole.validation), [texts_of(part, part.validation) for part in (tuning, final)]
    if kind == "byte":
        assert [first + second for first, second in zip(*halves, strict=True)] == ends
    sizes = [part.validation.document_bytes for part in (tuning, final)]
    assert (sum(sizes) == whole.validation.document_bytes).all()
    np.testing.assert_allclose(sizes[0], sizes[1], rtol=0.2)
    for part in (final.validation, tuning.validation):
        assert (part.tokens[part.document_starts] == part.description.start_token_id).all()
        assert part.description.num_tokens == len(part.tokens) == part.num_tokens


def test_the_tokenizer_is_trained_on_the_training_text_alone(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("the cat and the dog and the cat\n" * 5)
    (tmp_path / "valid.txt").write_text("zzzz zzzz zzzz zzzz\n" * 50)
    prepared = prepare(tmp_path / "train.txt", tmp_path / "cache", validation=str(tmp_path / "valid.txt"))
    assert "zz" not in prepared.tokenizer.get_vocab()
    assert texts_of(prepared, prepared.validation) == ["zzzz zzzz zzzz zzzz\n" * 50]


def test_conversations_and_single_characters_are_set_aside_whole(tmp_path: Path) -> None:
    for text in (["a", "long " * 50, "longer " * 90], ["a", "b" * 200]):
        rows = tmp_path / f"{len(text)}.jsonl"
        rows.write_text("".join(json.dumps({"text": one}) + "\n" for one in text))
        prepared = prepare(rows, tmp_path / "cache", kind="byte", vocab_size=None, validation_fraction=0.0001)
        assert texts_of(prepared, prepared.validation) == ["a"]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"prompt": "q", "completion": "x" * size}) + "\n" for size in (100, 200)))
    prepared = prepare(chats, tmp_path / "cache", kind="byte", vocab_size=None)
    assert (prepared.train.num_documents, prepared.validation.num_documents) == (1, 1)


def test_a_single_document_is_split_at_a_line(tmp_path: Path) -> None:
    text = "".join(f"line {number} of a play\n" for number in range(100))
    (tmp_path / "play.txt").write_text(text)
    prepared = prepare(tmp_path / "play.txt", tmp_path / "cache")
    (train,), (validation,) = texts_of(prepared, prepared.train), texts_of(prepared, prepared.validation)
    assert train + validation == text
    assert train.endswith("\n")
    assert 0.08 < len(validation) / len(text) <= 0.1


def test_text_to_validate_on_that_is_trained_on_is_reported(corpus: Path, tmp_path: Path) -> None:
    held_out = corpus / "held out"
    held_out.mkdir()
    (corpus / "03.txt").rename(held_out / "03.txt")
    with pytest.warns(UserWarning, match=r"data\.validation: 1 document of 1 from .* are also in the training text"):
        prepare(corpus, tmp_path / "cache", validation=str(held_out))


def test_the_second_time_nothing_is_read_again(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    first = prepare(corpus, tmp_path / "cache", progress=lambda stage, count: stages.append(stage))
    assert list(dict.fromkeys(stages)) == [
        "reading",
        "training the tokenizer",
        "packing the training text",
        "packing the validation text",
    ]
    monkeypatch.setattr("multilin.data.prepare.read_documents", None)
    again = prepare(corpus.rename(tmp_path / "moved"), tmp_path / "cache", validation_fraction=0.1)
    assert again.train.folder == first.train.folder
    assert again.train.tokens.tolist() == first.train.tokens.tolist()


@pytest.mark.parametrize(
    "change",
    [{"validation_fraction": 0.3}, {"vocab_size": 265}, {"kind": "byte", "vocab_size": None}, "content"],
)
def test_other_settings_or_content_are_prepared_anew(corpus: Path, tmp_path: Path, change: Any) -> None:
    first = prepare(corpus, tmp_path / "cache")
    if change == "content":
        (corpus / "00.txt").write_text("Other words\n")
    again = prepare(corpus, tmp_path / "cache", **(change if isinstance(change, dict) else {}))
    assert again.train.folder != first.train.folder


def test_a_given_tokenizer_is_used_and_decides_alone(corpus: Path, tmp_path: Path) -> None:
    first = prepare(corpus, tmp_path / "cache")
    first.tokenizer.save_pretrained(tmp_path / "tokenizer")
    given = str(tmp_path / "tokenizer")
    again = prepare(corpus, tmp_path / "cache", path=given, vocab_size=999)
    assert again.train.description.tokenizer_hash == first.train.description.tokenizer_hash
    assert again.train.folder == prepare(corpus, tmp_path / "cache", path=given).train.folder


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("where", ["train_tokenizer", "pack"])
def test_an_interruption_leaves_nothing_and_the_next_run_succeeds(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Any
) -> None:
    def interrupted(*args: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(f"multilin.data.prepare.{where}", interrupted)
        with pytest.raises((KeyboardInterrupt, InputError)) as raised:
            prepare(corpus, tmp_path / "cache")
    if raised.type is InputError:
        assert "cannot be written (No space left on device); set XDG_CACHE_HOME" in str(raised.value)
    assert entries(tmp_path / "cache") == []
    assert prepare(corpus, tmp_path / "cache").train.num_tokens > 0


def test_a_killed_preparation_does_not_stand_in_the_way(corpus: Path, tmp_path: Path) -> None:
    killed = (
        "import os, sys, multilin.data.prepare as p\n"
        "p.train_tokenizer = lambda *args: os.kill(os.getpid(), 9)\n"
        "data = p.DataRecipe(source=sys.argv[1], validation_fraction=0.1)\n"
        f"p.prepare_text(data, p.TokenizerRecipe(**{DEFAULTS!r}), cache_folder=sys.argv[2])"
    )
    cache = tmp_path / "cache"
    run([*PYTHON, "-c", killed, str(corpus), str(cache)], status=-signal.SIGKILL)
    (left,) = entries(cache)
    assert left.endswith(".partial")
    prepared = prepare(corpus, cache)
    assert entries(cache) == [prepared.train.folder.parent.name]
    assert entries(prepared.train.folder.parent) == ["tokenizer", "train", "validation"]


def test_the_cache_lies_where_the_system_says(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    prepared = prepare(corpus, None)
    assert prepared.train.folder.parents[1] == tmp_path / "caches" / "multilin"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "nowhere.txt"}, "data.source: 'nowhere.txt' does not exist"),
        ({"validation": "nowhere.txt"}, "data.validation: 'nowhere.txt' does not exist"),
        ({"vocab_size": 50_000}, r"vocab_size: 50000 given, but the corpus supports \d+ tokens"),
        ({"path": "./nowhere"}, r"tokenizer: './nowhere' does not exist"),
    ],
)
def test_bad_settings_are_refused_and_leave_nothing(
    corpus: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepare(options.pop("source", corpus), tmp_path / "cache", **options)
    assert not (tmp_path / "cache").exists() or entries(tmp_path / "cache") == []
