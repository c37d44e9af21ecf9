"""The validation text represents the text: whole documents where there are enough, the ends of long ones elsewhere."""

import random
from pathlib import Path

import numpy as np
import pytest

from multilin.data.files import Document
from multilin.data.prepare import prepare_text
from multilin.data.settings import DataRecipe, TokenizerRecipe
from multilin.data.split import TRAIN, VALIDATION, Census, Split, split_document, text_hash
from multilin.errors import InputError

KINDS = {
    "English": "the cat sat on a mat and the dog ran\n",
    "C": "int x = a[i++] << 2; /* } */\n",
    "Han": "你好世界，早上好。\n",
    "one line": "words without a line end ",
    "no space": "абвгд",
    "paragraphs": "A sentence.\n\nAnother one.\n\n",
    "emoji": "👩‍👩‍👧‍👦🇪🇺 é\r\n",
    "rows": "1.25,2.5,,\n",
}


def make_text(kind: str, size: int, seed: int = 0) -> str:
    """About `size` bytes of a kind of text."""
    words = KINDS[kind]
    return "".join(f"{seed} {number} {words}" for number in range(1 + size // (len(words.encode()) + 4)))


def split_texts(texts: list[str], fraction: float = 0.05) -> tuple[list[str], list[str], Split]:
    """The texts on both sides."""
    documents, census = [Document(f"{number}.txt", text) for number, text in enumerate(texts)], Census()
    for document in documents:
        census.add(document)
    split = Split.of_all(census, fraction)
    train, validation = (list(split.side(documents, side)) for side in (TRAIN, VALIDATION))
    return [document.text for document in train], [document.text for document in validation], split


def size_of(texts: list[str]) -> int:
    return len("".join(texts).encode())


NOVEL = make_text("English", 400_000)
CASES = {
    "a book and four files": [NOVEL, *(make_text("C", 4000, seed) for seed in range(4))],
    "one file": [NOVEL],
    "two files": [NOVEL, make_text("Han", 300_000)],
    "a huge and 1,000 tiny": [NOVEL, *(make_text("C", 100, seed) for seed in range(1000))],
    "kinds of equal size": [make_text(kind, 20_000) for kind in KINDS],
    "thirty of equal size": [make_text("English", 3000, seed) for seed in range(30)],
    "geometric sizes": [make_text("C", 2**power, power) for power in range(7, 18)],
    "many": [make_text("English", 100 + 7 * seed, seed) for seed in range(300)],
    "sorted by kind": [make_text(kind, 2000, seed) for kind in KINDS for seed in range(50)],
    "tiny": [f"text {number}" for number in range(7)],
    "a row": ["a,b,c and d"],
    "copies of one": [make_text("English", 5000)] * 3,
    "a book twice": [NOVEL, make_text("C", 4000), NOVEL, make_text("C", 5000)],
    "many copies of a note": [NOVEL, make_text("Han", 100_000), *["n/a"] * 50_000],
}


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_lost_and_no_text_is_on_both_sides(name: str, fraction: float) -> None:
    texts = CASES[name]
    train, validation, split = split_texts(texts, fraction)
    assert train
    assert validation
    assert "" not in train + validation
    assert not set(train) & set(validation)
    assert size_of(train) + size_of(validation) == size_of(texts)
    whole = [text for text in texts if text_hash(text.encode()) not in split.ends]
    assert sorted(whole) == sorted(text for text in train + validation if text in set(texts))
    for text in set(texts) - set(whole):
        assert any(text.startswith(part) for part in train)
        assert any(text.endswith(part) for part in validation)
    shuffled = random.Random(1).sample(texts, len(texts))
    again = split_texts(shuffled, fraction)
    assert [sorted(side) for side in again[:2]] == [sorted(train), sorted(validation)]
    assert (again[2].whole, again[2].ends) == (split.whole, split.ends)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("tiny", "a row", "many copies of a note")])
def test_the_share_of_each_kind_is_about_the_fraction(name: str) -> None:
    texts = CASES[name]
    _, validation, _ = split_texts(texts)
    assert size_of(validation) / size_of(texts) == pytest.approx(0.05, abs=0.01)
    by_kind: dict[str, list[str]] = {kind: [text for text in texts if words in text] for kind, words in KINDS.items()}
    for kind, documents in by_kind.items():
        if documents and name != "sorted by kind":  # where chance decides among many
            held_out = [text for text in validation if KINDS[kind][:-1].strip() in text]
            assert 0.02 < size_of(held_out) / size_of(documents) < 0.12, kind


def test_enough_documents_are_set_aside_whole() -> None:
    """In the order of their hashes, as many as fit."""
    texts = CASES["many"]
    _, validation, split = split_texts(texts)
    expected, room = [], 0.05 * size_of(texts)
    for text in sorted(texts, key=lambda text: text_hash(text.encode())):
        if len(text) <= room:
            expected.append(text)
            room -= len(text)
    assert sorted(validation) == sorted(expected)
    assert split.summary == f"{len(expected)} of 300 documents"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one file", "the last 5 % of 0.txt"),
        ("a book and four files", "the last 5 % of 5 documents"),
        ("a huge and 1,000 tiny", "the last 5 % of 0.txt and 49 of 1,000 other documents"),
        ("copies of one", "the last 5 % of 3 documents"),
        ("tiny", "1 of 7 documents"),
    ],
)
def test_a_split_says_in_words_what_is_set_aside(name: str, expected: str) -> None:
    assert split_texts(CASES[name])[2].summary == expected


def test_conversations_are_set_aside_whole() -> None:
    documents = [Document(str(size), "x" * size, [{"role": "user", "content": "x" * size}]) for size in (3, 50, 90)]
    census = Census()
    for document in documents:
        census.add(document)
    split = Split.of_all(census, 0.05)
    assert [[len(document.text) for document in split.side(documents, side)] for side in (0, 1)] == [[50, 90], [3]]
    for number, messages in ((1, documents[0].messages), (3, documents[0].messages), (1, None)):
        census = Census()
        for _ in range(number):
            census.add(Document("one", "é" if messages is None else "x" * 999, messages))
        with pytest.raises(InputError, match="the only document is a conversation or a single character"):
            Split.of_all(census, 0.05)


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.5, 0.999])
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_cut_at_a_border_and_no_byte_is_lost(kind: str, fraction: float) -> None:
    text = make_text(kind, 9000)
    first, last = (part.text for part in split_document(Document("a", text), fraction))
    assert (first + last).encode() == text.encode() == first.encode() + last.encode()
    assert first
    assert last
    if 100 < (wanted := fraction * len(text.encode())) < 8900:
        assert 0.5 * wanted <= len(last.encode()) <= 2 * wanted
        assert first[-1] == "\n" or "\n" not in text
        assert first[-1] in "\n " or " " not in text


@pytest.mark.parametrize("text", ["ab", "a\nb", "\n\n\n", "one line only", "one line\n", "x" * 99 + "\nlast", "é€"])
def test_both_parts_of_a_short_document_have_text(text: str) -> None:
    for fraction in (0.001, 0.5, 0.999):
        first, last = split_document(Document("a", text), fraction)
        assert first.text + last.text == text
        assert first.text
        assert last.text


@pytest.mark.parametrize("text", ["Title\n" + "many words " * 900, "a " + "y" * 999, "x" * 9999 + "語" * 9999])
def test_a_long_line_is_cut_itself(text: str) -> None:
    first, last = split_document(Document("a", text), 0.05)
    assert 0.04 < len(last.text.encode()) / len(text.encode()) < 0.08
    assert first.text + last.text == text


def test_the_files_of_a_folder_are_split_as_they_are_packed(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name, kind, size in (("novel", "Han", 60_000), ("a", "C", 3000), ("b", "C", 4000), ("c", "emoji", 3500)):
        (tmp_path / "texts" / f"{name}.txt").write_text(make_text(kind, size), newline="")
    data, tokenizer = DataRecipe(source=str(tmp_path / "texts")), TokenizerRecipe("byte")
    text = prepare_text(data, tokenizer, cache_folder=tmp_path / "cache")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "texts").iterdir())]
    assert (text.train.document_bytes + text.validation.document_bytes).tolist() == sizes
    np.testing.assert_allclose(text.validation.document_bytes / sizes, 0.05, atol=0.02)
    held_out, whole = text.validation.num_bytes, sum(sizes)
    assert text.validation.description.summary == (
        f"the last 5 % of 4 documents, {held_out / 1000:.1f} kB of {whole / 1000:.1f} kB"
    )
    assert text.validation.description.num_cut == 4
    (tmp_path / "other.txt").write_text("x" * 3000)
    data = DataRecipe(source=data.source, validation=str(tmp_path / "other.txt"))
    text = prepare_text(data, tokenizer, cache_folder=tmp_path / "cache")
    assert text.validation.description.summary == "1 document of data.validation, 3.0 kB"
