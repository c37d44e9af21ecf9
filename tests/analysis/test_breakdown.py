"""Scores by position, document and kind of token: every breakdown sums up to the whole, and long texts stream."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from multilin.analysis.evaluate.breakdown import CLASSES, FEWEST_BYTES, Breakdown, TokenKinds, as_data, break_down
from multilin.analysis.evaluate.run import check_reads_any_length, read_whole
from multilin.data.corpora import Document
from multilin.data.packed_text import PackedText, pack
from multilin.data.tokenizers import train_tokenizer
from multilin.errors import InputError
from multilin.model.factory import create_model
from multilin.runs.load import Run
from multilin.training.losses import evaluate, read_blocks

TEXTS = ["The cat sat on 12 mats,\nand 7 dogs ran. " * 9, "", "naïve 你好 😀 " * 13, "x"]
PARTS = ("by_position", "by_document", "by_class", "by_frequency")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, "bpe", 280)


@pytest.fixture(scope="module")
def packed(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> PackedText:
    return pack([Document("", text) for text in TEXTS], tokenizer, tmp_path_factory.mktemp("packed") / "text")


@pytest.fixture(scope="module")
def make_run(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], Run]:
    def make(architecture: str) -> Run:
        torch.manual_seed(0)
        model = create_model(
            architecture, hidden_size=16, num_layers=2, vocab_size=len(tokenizer), n_positions=32,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        ).eval()  # fmt: skip
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return Run(Path("nowhere"), model, tokenizer)

    return make


def sums_up(found: Breakdown) -> None:
    whole = found.evaluation
    for name in PARTS:
        parts = getattr(found, name)
        assert sum(part.tokens for part in parts) == whole.tokens, name
        assert sum(part.bytes for part in parts) == pytest.approx(whole.bytes), name
        assert sum(part.nats for part in parts) == pytest.approx(whole.loss * whole.tokens, rel=1e-9), name
        assert all(part.tokens for part in parts)


@pytest.mark.parametrize("architecture", ["additive", "linear_mixer", "gpt2"])
def test_every_breakdown_sums_up_to_the_score(
    architecture: str, make_run: Callable[[str], Run], packed: PackedText, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = make_run(architecture).model
    found = break_down(read_blocks(model, packed, block_size=11, batch_size=3), packed, tokenizer)
    sums_up(found)
    whole = evaluate(model, packed, block_size=11)
    assert found.evaluation.loss == pytest.approx(whole.loss, rel=1e-9)
    assert (found.evaluation.tokens, found.evaluation.bytes) == (whole.tokens, whole.bytes)
    assert whole.bytes == packed.num_bytes
    # A block of 11 tokens has at most 10 before one.
    assert [part.name for part in found.by_position] == ["1", "2 to 3", "4 to 7", "8 to 15"]


def test_parts_of_a_text_have_their_own_losses(
    make_run: Callable[[str], Run], packed: PackedText, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Token by token, with what the blocks hold of the document before each."""
    model = make_run("additive").model
    (scored,) = [*read_blocks(model, packed, block_size=17, batch_size=10**6)]
    losses, contexts = dict(zip(scored.places, scored.losses, strict=True)), {}
    for place in losses:
        block_start = (place - 1) // 16 * 16
        first = max(block_start, packed.document_starts[packed.document_starts <= place].max())
        contexts[place] = place - first
        row = torch.from_numpy(packed.tokens[first : place + 1].astype(np.int64))[None]
        with torch.no_grad():
            expected = -model(row[:, :-1]).logits[0, -1].log_softmax(-1)[row[0, -1]]
        assert losses[place] == pytest.approx(float(expected), rel=1e-4)
    assert dict(zip(scored.places, scored.contexts, strict=True)) == contexts
    found = break_down([scored], packed, tokenizer)
    for part in found.by_position:
        low = int(part.name.split(" to ")[0])
        chosen = [loss for place, loss in losses.items() if low <= contexts[place] < 2 * low]
        assert (part.tokens, part.nats) == (len(chosen), pytest.approx(sum(chosen)))
    for part in found.by_document:
        start = packed.document_starts[int(part.name)]
        text = TEXTS[int(part.name)]
        chosen = [losses[place] for place in range(start + 1, start + part.tokens + 1)]
        assert part.nats == pytest.approx(sum(chosen))
        assert part.bytes == len(text.encode())
        assert part.bits_per_byte == pytest.approx(sum(chosen) / math.log(2) / len(text.encode()))


def test_documents_are_ordered_by_their_score(
    make_run: Callable[[str], Run], packed: PackedText, tokenizer: PreTrainedTokenizerFast
) -> None:
    found = break_down(read_blocks(make_run("elita").model, packed, block_size=11), packed, tokenizer)
    ordered = found.documents_by_score()
    assert {part.name for part in ordered} == {"0", "2"}  # the others are shorter than counts
    assert ordered[0].bits_per_byte <= ordered[1].bits_per_byte
    shown = as_data(found)["by_document"]
    assert shown["number"] == 3  # the empty one has no token
    assert (shown["long_enough"], shown["fewest_bytes"]) == (2, FEWEST_BYTES)
    middle = (ordered[0].bits_per_byte + ordered[1].bits_per_byte) / 2
    assert shown["bits_per_byte_quantiles"]["0.5"] == pytest.approx(middle)
    assert any(part["begins_with"].startswith("The cat") for part in shown["best"])


def test_frequent_tokens_come_first(
    make_run: Callable[[str], Run], packed: PackedText, tokenizer: PreTrainedTokenizerFast
) -> None:
    found = break_down(read_blocks(make_run("elita").model, packed, block_size=11), packed, tokenizer)
    counts = np.sort(np.delete(packed.token_counts(), packed.description.start_token_id))[::-1]
    assert found.by_frequency[0].name == "rank 1 to 10"
    assert found.by_frequency[0].tokens == counts[:10].sum()  # the start token is not scored, and has no rank


def test_kinds_of_tokens() -> None:
    """Words, numbers and signs, whose kind depends on the token before."""
    tokenizer = train_tokenizer([], "byte", None)
    text = "ab 1é,\n\tB2c 世"
    ids = np.array([tokenizer.eos_token_id, *tokenizer.encode(text, add_special_tokens=False)])
    kinds = TokenKinds(tokenizer, len(tokenizer)).classes(ids[1:], ids[:-1])
    named = [CLASSES[kind] for kind in kinds]
    assert named == [
        *("word start", "word continuation", "space", "digits", "other", "other", "punctuation", "new line", "space"),
        *("word start", "digits", "word continuation", "space", "other", "other", "other"),
    ]


@pytest.mark.parametrize("architecture", ["elita", "threelin", "tscale"])
def test_a_long_text_is_scored_as_if_read_at_once(
    architecture: str, make_run: Callable[[str], Run], packed: PackedText, tokenizer: PreTrainedTokenizerFast
) -> None:
    run = make_run(architecture)
    run.model.double()
    found = break_down(read_whole(run.model, packed, chunk_tokens=7), packed, tokenizer)
    sums_up(found)
    at_once = break_down(read_whole(run.model, packed, chunk_tokens=10**6), packed, tokenizer)
    assert found.evaluation.loss == pytest.approx(at_once.evaluation.loss, rel=1e-6)
    assert found.evaluation.tokens == at_once.evaluation.tokens == packed.num_tokens - packed.num_documents
    longest = max(np.diff([*packed.document_starts, packed.num_tokens])) - 1
    low, high = map(int, found.by_position[-1].name.split(" to "))
    assert low <= longest <= high
    assert found.by_position[0].tokens == 3  # one first token in each document that has any


def test_only_answers_of_conversations_are_scored(make_run: Callable[[str], Run], packed: PackedText) -> None:
    model, is_answer = make_run("elita").model, np.arange(packed.num_tokens) % 3 == 0
    whole = list(read_whole(model, packed, chunk_tokens=7))
    packed = copy.copy(packed)
    packed.is_answer = is_answer
    for one, part in zip(whole, read_whole(model, packed, chunk_tokens=7), strict=True):
        for every, scored in zip(one, part, strict=True):
            np.testing.assert_array_equal(every[is_answer[one.places]], scored)


def test_a_text_is_read_whole_without_dropout_and_the_training_mode_is_left(
    make_run: Callable[[str], Run], packed: PackedText
) -> None:
    model = make_run("elita").model
    expected = [scored.losses for scored in read_whole(model, packed)]
    model.model.embedding.dropout.p = 0.5
    found = [scored.losses for scored in read_whole(model.train(), packed)]
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))
    assert model.training


def test_memory_does_not_grow_with_a_long_text(make_run: Callable[[str], Run], tmp_path: Path) -> None:
    """100,000 tokens in one text, of which the state keeps as many bytes as of ten."""
    run = make_run("elita")
    long = pack([Document("", "The cat sat. " * 20_000)], run.tokenizer, tmp_path / "long")
    assert long.num_tokens > 100_000
    sizes, forward = set(), run.model.forward

    def watched(input_ids: torch.Tensor, **arguments: object) -> object:
        result = forward(input_ids, **arguments)
        sizes.add(result.past_key_values.num_bytes)
        return result

    run.model.forward = watched
    done: list[int] = []
    found = break_down(read_whole(run.model, long, chunk_tokens=4096, progress=done.append), long, run.tokenizer)
    sums_up(found)
    assert len(sizes) == 1
    assert done[-1] == found.evaluation.tokens == long.num_tokens - 1
    low, high = (int(edge.replace(",", "")) for edge in found.by_position[-1].name.split(" to "))
    assert low <= long.num_tokens - 1 <= high
    some = break_down(read_whole(run.model, long, max_tokens=1000), long, run.tokenizer)
    assert 1000 <= some.evaluation.tokens <= 1512


def test_models_that_cannot_read_long_texts_say_so(make_run: Callable[[str], Run]) -> None:
    for architecture in ("additive", "linear_mixer", "gpt2", "llama"):
        with pytest.raises(InputError, match=r"^long: this model reads at most 32 tokens; leave out --long"):
            check_reads_any_length(make_run(architecture))
