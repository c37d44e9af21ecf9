"""Documents become one row of tokens with nothing lost, and blocks that predict every token exactly once."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from multilin.data.files import Document
from multilin.data.packed_text import Blocks, PackedText, pack
from multilin.data.tokenizers import load_tokenizer, train_tokenizer
from multilin.errors import InputError

TEXTS = ["One short text.\n", "", "Zwei: naïve 你好 😀 <|endoftext|>", "x", "And the cat sat on the mat.\n" * 9]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, "bpe", 280)


@pytest.fixture(scope="module")
def packed(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> PackedText:
    return pack_texts(TEXTS, tokenizer, tmp_path_factory.mktemp("packed"))


def pack_texts(texts: list[str], tokenizer: PreTrainedTokenizerFast, folder: Path) -> PackedText:
    return pack((Document(str(i), text) for i, text in enumerate(texts)), tokenizer, folder / "text")


def count_bytes(packed: PackedText, start: int, stop: int) -> int:
    return round(int(packed.token_sizes(packed.tokens[start:stop]).sum()) * packed.bytes_per_counted)


def decoded(packed: PackedText, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    rows = np.split(packed.tokens, packed.document_starts[1:])
    assert all(row[0] == tokenizer.eos_token_id for row in rows)
    return [tokenizer.decode(row[1:].tolist()) for row in rows]


def test_every_document_comes_back_exactly(packed: PackedText, tokenizer: PreTrainedTokenizerFast) -> None:
    assert decoded(packed, tokenizer) == TEXTS
    assert packed.document_bytes.tolist() == [len(text.encode()) for text in TEXTS]
    assert (packed.num_documents, packed.num_tokens) == (len(TEXTS), len(packed.tokens))
    assert packed.num_bytes == sum(packed.document_bytes)
    assert packed.tokens.dtype == np.uint16


def test_batches_and_pieces_leave_no_trace(
    packed: PackedText, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilin.data.packed_text.BATCH_CHARACTERS", 20)
    monkeypatch.setattr("multilin.data.encoding.PIECE_CHARACTERS", 7)
    seen: list[int] = []
    again = pack(
        (Document(str(i), text) for i, text in enumerate(TEXTS)), tokenizer, tmp_path / "text", progress=seen.append
    )
    assert again.tokens.tolist() == packed.tokens.tolist()
    assert again.document_starts.tolist() == packed.document_starts.tolist()
    assert again.document_bytes.tolist() == packed.document_bytes.tolist()
    assert seen == sorted(seen)
    assert seen[-1] == packed.num_bytes
    assert len(seen) > 5


@pytest.mark.parametrize("block_size", [2, 7, 13, 64])
def test_blocks_predict_every_token_but_the_first_once(packed: PackedText, block_size: int) -> None:
    whole, partial = Blocks(packed, block_size), Blocks(packed, block_size, partial=True)
    predicted = torch.cat([partial[i]["labels"][1:] for i in range(len(partial))])
    assert predicted[predicted != -100].tolist() == packed.tokens[1:].tolist()
    assert len(whole) == (packed.num_tokens - 1) // (block_size - 1)
    for i in range(len(whole)):
        item = whole[i]
        assert all(torch.equal(item[key], partial[i][key]) for key in item)
        assert torch.equal(item["labels"], item["input_ids"])
        assert all(value.shape == (block_size,) and value.dtype == torch.int64 for value in item.values())
    with pytest.raises(IndexError):
        whole[len(whole)]


def test_document_ids_number_the_document_of_each_token(packed: PackedText) -> None:
    expected = [number for number, text in enumerate(np.split(packed.tokens, packed.document_starts[1:])) for _ in text]
    blocks = Blocks(packed, 5, partial=True)
    found = [blocks[i]["document_ids"][: blocks.span(i)[1] - blocks.span(i)[0] - 1] for i in range(len(blocks))]
    assert torch.cat(found).tolist() == expected[:-1]
    last = blocks[len(blocks) - 1]
    assert last["document_ids"][-1] == len(TEXTS) - 1


def test_the_last_block_is_padded_for_evaluation(packed: PackedText, tokenizer: PreTrainedTokenizerFast) -> None:
    blocks = Blocks(packed, packed.num_tokens + 3, partial=True)
    item = blocks[0]
    assert len(blocks) == 1
    assert item["input_ids"].tolist() == packed.tokens.tolist() + [tokenizer.pad_token_id] * 3
    assert item["labels"].tolist() == packed.tokens.tolist() + [-100] * 3


def test_bytes_of_any_span_are_those_of_its_tokens(packed: PackedText) -> None:
    assert count_bytes(packed, 0, packed.num_tokens) == packed.num_bytes
    places = [0, 1, 3, 20, 21, 22, 40, packed.num_tokens]
    assert sum(count_bytes(packed, a, b) for a, b in itertools.pairwise(places)) == packed.num_bytes
    start, stop = packed.document_starts[2], packed.document_starts[3]
    assert count_bytes(packed, start, stop) == len(TEXTS[2].encode())


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="open files are counted there")
def test_open_texts_hold_no_files(packed: PackedText) -> None:
    """A text of many shards has more of them than a process may have open files."""
    before = len(list(Path("/dev/fd").iterdir()))
    texts = [PackedText.open(packed.folder) for _ in range(5)]
    assert len(list(Path("/dev/fd").iterdir())) == before
    assert not any(text.tokens.flags.writeable for text in texts)


def test_a_foreign_tokenizer_that_is_not_lossless_keeps_the_byte_count_and_warns(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1, "sat": 2, "</s>": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    words = load_tokenizer(str(tmp_path))
    words.unk_token = "[UNK]"
    with pytest.warns(UserWarning, match=r"1 of 5 tokens are \[UNK\]"):
        packed = pack_texts(["cat sat", "naïve"], words, tmp_path)
    assert packed.tokens.tolist() == [3, 1, 2, 3, 0]
    assert packed.num_bytes == 13
    assert count_bytes(packed, 0, 5) == 13


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    vocabulary = {"</s>": 0} | {f"w{i}": i for i in range(1, 70_000)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    packed = pack_texts(["w69999 w1"], load_tokenizer(str(tmp_path)), tmp_path)
    assert packed.tokens.dtype == np.uint32
    assert packed.tokens.tolist() == [0, 69999, 1]


@pytest.mark.parametrize(
    ("block_size", "message"),
    [
        (1, "block_size: 1 given, but a block needs at least 2 tokens"),
        (100_000, r"block_size: 100000 given, but the text text has only \d+ tokens"),
    ],
)
def test_block_sizes_that_cannot_be_are_refused(packed: PackedText, block_size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Blocks(packed, block_size)


def test_an_interrupted_packing_leaves_nothing(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    def stopping() -> object:
        yield Document("a", "text")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(stopping(), tokenizer, tmp_path / "text")
    with pytest.raises(InputError, match="no document"):
        pack([], tokenizer, tmp_path / "text")
    assert list(tmp_path.iterdir()) == []


def test_damaged_packings_are_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no packed text, as packed.json is missing"):
        PackedText.open(tmp_path)
    again = pack_texts(TEXTS, tokenizer, tmp_path)
    with pytest.raises(InputError, match="exists already"):
        pack_texts(TEXTS, tokenizer, tmp_path)
    tokens, index = again.folder / "tokens.bin", again.folder / "index.safetensors"
    description = again.folder / "packed.json"
    plain = description.read_text()
    description.write_text(plain.replace('"is_chat": false', '"is_chat": true'))
    with pytest.raises(InputError, match=r"no packed text, as answers.bin is missing"):
        PackedText.open(again.folder)
    (again.folder / "answers.bin").write_bytes(b"1")
    with pytest.raises(InputError, match=r"answers.bin has 1 byte instead of \d+"):
        PackedText.open(again.folder)
    description.write_text(plain)
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(InputError, match=r"tokens.bin has \d+ bytes instead of \d+"):
        PackedText.open(again.folder)
    index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(InputError, match="damaged"):
        PackedText.open(again.folder)
