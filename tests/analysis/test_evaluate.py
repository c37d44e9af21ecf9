"""Evaluation against a direct computation with a small GPT-2."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from multilin.data.files import Document
from multilin.data.packed_text import Blocks, PackedText, pack
from multilin.data.tokenizers import train_tokenizer
from multilin.errors import InputError
from multilin.training.losses import evaluate, token_losses

TEXTS = ["The cat sat on the mat.\n" * 3, "", "naïve 你好 😀", "x"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, "bpe", 270)


@pytest.fixture(scope="module")
def packed(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> PackedText:
    return pack([Document("", text) for text in TEXTS], tokenizer, tmp_path_factory.mktemp("packed") / "text")


@pytest.fixture
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=270, n_positions=64, n_embd=12, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(20)  # so that tokens differ in their losses
    return model


def direct(model: GPT2LMHeadModel, packed: PackedText, block_size: int) -> tuple[float, int]:
    """Nats and tokens, one block and one token at a time."""
    tokens, starts = packed.tokens.tolist(), set(packed.document_starts.tolist())
    nats, count = 0.0, 0
    for begin in range(0, len(tokens) - 1, block_size - 1):
        block = tokens[begin : begin + block_size]
        with torch.no_grad():
            log_probabilities = model(torch.tensor([block])).logits[0].double().log_softmax(-1)
        for place in range(1, len(block)):
            if begin + place not in starts:
                nats -= float(log_probabilities[place - 1, block[place]])
                count += 1
    return nats, count


@pytest.mark.parametrize(("block_size", "batch_size"), [(7, 1), (7, 3), (13, 100), (64, 2)])
def test_equals_a_direct_computation(
    model: GPT2LMHeadModel, packed: PackedText, block_size: int, batch_size: int
) -> None:
    nats, tokens = direct(model, packed, block_size)
    result = evaluate(model, packed, block_size=block_size, batch_size=batch_size)
    assert result.tokens == tokens == packed.num_tokens - packed.num_documents
    assert result.bytes == sum(len(text.encode()) for text in TEXTS)
    assert result.loss == pytest.approx(nats / tokens, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / packed.num_bytes, rel=1e-5)


def test_part_of_a_text_is_scored_with_its_own_bytes(
    model: GPT2LMHeadModel, packed: PackedText, tokenizer: PreTrainedTokenizerFast
) -> None:
    blocks = Blocks(packed, 7, partial=True)
    part = evaluate(model, packed, block_size=7, max_tokens=11)
    scored = []
    for index in (0, len(blocks) - 1):
        start, stop = blocks.span(index)
        scored += [token for token in packed.tokens[start + 1 : stop].tolist() if token != 0]
    assert part.tokens == len(scored)
    assert part.bytes == sum(len(tokenizer.convert_ids_to_tokens(token)) for token in scored)
    assert evaluate(model, packed, block_size=7, max_tokens=10**6) == evaluate(model, packed, block_size=7)


def test_a_model_with_its_own_token_losses_is_asked_for_them(model: GPT2LMHeadModel, packed: PackedText) -> None:
    seen: list[Tensor] = []

    class Own(GPT2LMHeadModel):
        def token_losses(self, input_ids: Tensor, document_ids: Tensor) -> Tensor:
            seen.append(document_ids)
            return torch.full((len(input_ids), input_ids.shape[1] - 1), math.log(2))

    result = evaluate(Own(model.config), packed, block_size=7)
    assert result.loss == pytest.approx(math.log(2))
    assert result.bits_per_byte == pytest.approx(result.tokens / result.bytes)
    assert int(seen[-1].max()) == len(TEXTS) - 1


def test_the_training_mode_is_left_as_it_was_and_dropout_is_off(model: GPT2LMHeadModel, packed: PackedText) -> None:
    done: list[int] = []
    model.train()
    first = evaluate(model, packed, block_size=7, batch_size=2, progress=done.append)
    assert first == evaluate(model, packed, block_size=7, batch_size=2)
    assert model.training
    assert done[-1] == len(Blocks(packed, 7, partial=True))
    model.eval()
    evaluate(model, packed, block_size=7)
    assert not model.training


def test_token_losses_are_those_of_the_labels(model: GPT2LMHeadModel) -> None:
    ids = torch.randint(270, (3, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        losses = token_losses(model, ids, torch.zeros_like(ids))
        expected = model(ids, labels=ids).loss
    assert losses.shape == (3, 10)
    assert losses.mean() == pytest.approx(float(expected), rel=1e-6)


def test_models_that_cannot_read_the_text_are_refused(
    model: GPT2LMHeadModel, packed: PackedText, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(InputError, match="block_size: 65 given, but the model reads at most 64 tokens"):
        evaluate(model, packed, block_size=65)
    model.config.vocab_size = 100
    with pytest.raises(InputError, match="a vocabulary of 270 tokens, but the model has 100"):
        evaluate(model, packed, block_size=7)
    model.config.vocab_size = 270
    nothing = pack([Document("", ""), Document("", "")], tokenizer, tmp_path / "nothing")
    with pytest.raises(InputError, match="there is no token to score"):
        evaluate(model, nothing, block_size=7)
