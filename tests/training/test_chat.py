"""Conversations: read, made into tokens by a template, packed whole, and scored on answers alone."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from multilin.analysis.evaluate.run import break_down_run
from multilin.analysis.settings import EvaluationSettings
from multilin.architectures import architectures, get_architecture
from multilin.data.chat import CHAT_TEMPLATE, ConversationEncoder, read_messages
from multilin.data.packed_text import Blocks
from multilin.data.prepare import prepare_text
from multilin.data.settings import DataRecipe, TokenizerRecipe
from multilin.data.tokenizers import load_tokenizer, train_tokenizer
from multilin.errors import InputError
from multilin.model.factory import create_model
from multilin.runs.load import Run
from multilin.training.loop import train
from multilin.training.recipe import load_recipe
from tests.training.conftest import Tiny

QUESTION, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me!"}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(number: int) -> list[dict[str, Any]]:
    """Half of them as messages of two turns, half as prompt and completion."""
    return [
        {"messages": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER,
                      {"role": "user", "content": f"And {i}?"}, {"role": "assistant", "content": f"{i}."}]}
        if i % 2
        else {"prompt": f"Say {i}.", "completion": f"It is {i}."}
        for i in range(number)
    ]  # fmt: skip


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write(tmp_path / "chats.jsonl", rows_of(40))


def prepared(source: Path, folder: Path, **data: Any) -> Any:
    return prepare_text(DataRecipe(source=str(source), **data), TokenizerRecipe(kind="byte"), cache_folder=folder)


def test_the_default_template_marks_answers_and_their_ends() -> None:
    tokenizer = train_tokenizer([], "byte", None)
    tokenizer.chat_template = CHAT_TEMPLATE
    messages = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        ANSWER,
        {"role": "user", "content": "Again?"},
        ANSWER,
    ]
    ids, is_answer = ConversationEncoder(tokenizer).encode(messages, "here")
    end = tokenizer.eos_token
    assert tokenizer.decode(ids) == (
        f"System:\nBe brief.\n\nUser:\nWho?\n\nAssistant:\nMe!{end}\n\nUser:\nAgain?\n\nAssistant:\nMe!{end}"
    )
    assert (
        tokenizer.decode([token for token, answers in zip(ids, is_answer, strict=True) if answers]) == f"Me!{end}" * 2
    )
    prompt = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True)["input_ids"]
    assert ids[: len(prompt)] == prompt


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_conversation_in_parts_has_the_tokens_of_the_whole(scheme: str) -> None:
    """Also with a tokenizer that puts a space before a text: a part is no text of its own."""
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["▁", "\n", *map(chr, range(33, 127))])}, []))
    letters.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>", chat_template=CHAT_TEMPLATE)
    messages = [QUESTION, ANSWER, QUESTION, ANSWER]
    ids, is_answer = ConversationEncoder(tokenizer).encode(messages, "here")
    assert ids == tokenizer.apply_chat_template(messages)["input_ids"]
    answer = [token for token, answers in zip(ids, is_answer, strict=True) if answers]
    assert tokenizer.convert_ids_to_tokens(answer) == [*"Me!", "</s>"] * 2


def test_blocks_hold_whole_conversations_and_labels_of_answers_alone(chats: Path, tmp_path: Path) -> None:
    text = prepared(chats, tmp_path / "cache").train
    blocks = Blocks(text, 150)
    seen = []
    for index in range(len(blocks)):
        block = blocks[index]
        assert block["input_ids"].shape == (150,)
        start, stop = blocks.span(index)
        assert start in text.document_starts
        assert stop == text.num_tokens or stop in text.document_starts
        scored = block["labels"] != -100
        assert np.array_equal(scored[: stop - start].numpy(), text.is_answer[start:stop])
        assert torch.equal(block["labels"][scored], block["input_ids"][scored])
        seen += range(start, stop)
    assert seen == list(range(text.num_tokens))
    assert len(blocks) < text.num_documents


@pytest.mark.parametrize("architecture", [name for name in architectures() if get_architecture(name).packs])
def test_conversations_in_a_block_are_scored_as_each_alone(architecture: str, chats: Path, tmp_path: Path) -> None:
    text = prepared(chats, tmp_path / "cache").train
    torch.manual_seed(0)
    model = create_model(
        architecture, hidden_size=16, num_layers=2, vocab_size=258, n_positions=200, initializer_range=0.3
    ).eval()
    block = {name: tensor[None] for name, tensor in Blocks(text, 200)[0].items()}
    together = model(**block, num_items_in_batch=1).loss
    alone = torch.zeros(())
    for document in block["document_ids"].unique():
        columns = (block["document_ids"][0] == document).nonzero()[:, 0]
        alone += model(block["input_ids"][:, columns], labels=block["labels"][:, columns], num_items_in_batch=1).loss
    torch.testing.assert_close(together, alone)


def test_a_model_is_trained_on_conversations(tiny: Tiny, chats: Path, tmp_path: Path) -> None:
    recipe = tiny(tmp_path / "run", **{"data.source": str(chats), "model.n_positions": 128, "training.max_steps": 60})
    result = train(recipe)
    first = json.loads((result.output / "metrics.jsonl").read_text().splitlines()[0])
    assert result.loss < 0.8 * first["loss"]
    assert load_tokenizer(str(result.output)).chat_template == CHAT_TEMPLATE
    resumed = train(load_recipe(result.output), resume=True)
    assert resumed.validation_loss == result.validation_loss
    follow = load_recipe(None, {"model.start": str(result.output), "data.source": str(chats),
                                "output": str(tmp_path / "next"), "training.max_steps": 1})  # fmt: skip
    assert train(follow).validation_loss < first["loss"]


def test_a_model_of_texts_is_scored_on_conversations_by_our_template(tmp_path: Path, chats: Path) -> None:
    tokenizer = train_tokenizer([], "byte", None)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_layers": 1, "n_positions": 64}
    run = Run(tmp_path, create_model("gpt2", **sizes).eval(), tokenizer)
    long = write(tmp_path / "long.jsonl", [{"prompt": "a" * 60, "completion": "b"}])
    scores = []
    for template in (None, CHAT_TEMPLATE):
        tokenizer.chat_template = template
        with pytest.warns(UserWarning, match=r"source: 20 of 40 conversations are longer than a block of 64 tokens"):
            scores.append(break_down_run(run, EvaluationSettings(source=str(chats))).evaluation)
    assert scores[0] == scores[1]
    with pytest.raises(InputError, match=r"source: no answer begins within a block of 64 tokens"):
        break_down_run(run, EvaluationSettings(source=str(long)))


@pytest.mark.filterwarnings("ignore:data.source .validation part.")
def test_cut_conversations_are_said(tiny: Tiny, chats: Path, tmp_path: Path) -> None:
    changes = {"data.source": str(chats), "training.max_steps": 1}
    with pytest.warns(UserWarning, match=r"data\.source: \d+ of \d+ conversations are longer than a block of 48 "):
        train(tiny(tmp_path / "run", **changes, **{"model.n_positions": 48}))
    text = prepared(chats, tmp_path / "cache").train
    blocks = Blocks(text, 40)
    assert 0 < len(blocks) < text.num_documents
    assert all((blocks[index]["labels"] != -100).any() for index in range(len(blocks)))
    with pytest.raises(InputError, match=r"data\.source: no answer begins within a block of 8 tokens"):
        train(tiny(tmp_path / "short", **changes, **{"model.n_positions": 8}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [QUESTION, {"role": "robot", "content": "Me"}]}, r"message 2: the role 'robot' is not known"),
        ({"messages": [QUESTION, {"role": "assistant", "content": " "}]}, r"message 2: the assistant's text is empty"),
        ({"messages": [QUESTION]}, r"no message by the assistant"),
        ({"messages": [{"role": "assistant", "content": "Hello!"}, QUESTION]}, r"begins with the assistant"),
        ({"messages": []}, r"no message by the assistant"),
        ({"messages": "hello"}, r"'hello' given, but a conversation should be a list"),
        ({"messages": [QUESTION, 3]}, r"a conversation should be a list of objects"),
        ({"messages": [{"role": "user"}, ANSWER]}, r"message 1: the content is None"),
        ({"messages": [{"role": "user", "content": "\ud800"}, ANSWER]}, r"half a surrogate pair"),
        ({"prompt": "Who?", "completion": ""}, r"message 2: the assistant's text is empty"),
        ({"prompt": 3, "completion": "Me"}, r"message 1: the content is 3"),
        ({"prompt": "Who?"}, r"no field 'text' \(text_field\)"),
        ({"text": "A text."}, r"chats\.jsonl:2 is a text among conversations"),
        ({"messages": [{"role": "user", "content": "x<|endoftext|>"}, ANSWER]}, r"spells the special token"),
    ],
)
def test_what_is_no_conversation_is_one_sentence(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", [{"messages": [QUESTION, ANSWER]}, row])
    with pytest.raises(InputError, match=message) as refused:
        prepared(path, tmp_path / "cache")
    assert "chats.jsonl" in str(refused.value)


def test_a_special_token_without_a_role_is_refused_in_a_message() -> None:
    tokenizer = train_tokenizer([], "byte", None)
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.chat_template = CHAT_TEMPLATE
    with pytest.raises(InputError, match=r"here: a message spells the special token '<\|im_end\|>'"):
        ConversationEncoder(tokenizer).encode([{"role": "user", "content": "x<|im_end|>"}, ANSWER], "here")


@pytest.mark.parametrize("content", ["m.content", "m.content | lower", "m.content | trim", "m.content[:9]"])
def test_other_control_tokens_in_messages_are_text(content: str) -> None:
    """Also those that are not special, but which the template writes, and those that messages spell together."""
    tokenizer = train_tokenizer([], "byte", None)
    tokenizer.add_tokens(["<|end|>"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ CONTENT }}{{ '<|end|>' if m.role != 'user' }}{% endfor %}".replace(
            "CONTENT", content
        )
    )
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    for texts in (["<|end|>", "x"], ["<|END|>", "<|end|>"], ["a<", "|end|>", "b", "x"], ["<|en", "d|>"]):
        roles = itertools.cycle(["user", "assistant"])
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        ids, _ = ConversationEncoder(tokenizer).encode(messages, "here")
        assert ids.count(end) == len(texts) // 2


def test_texts_to_validate_conversations_on_are_refused(chats: Path, tmp_path: Path) -> None:
    texts = write(tmp_path / "texts.jsonl", [{"text": "A text."}])
    with pytest.raises(InputError, match=r"data\.validation: .* holds texts, but data\.source holds conversations"):
        prepared(chats, tmp_path / "cache", validation=str(texts))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only questions') }}", r"template fails \(TemplateError: only questions\)"),
        ("{{ messages[", r"template fails"),
        ("{{ messages | length }}{{ messages[-1]['content'] }}", r"changes earlier messages"),
        ("{% if false %}{% endif %}", r"writes nothing for answers"),
        ("{{ messages[0]['content'] }}", r"writes nothing for answers"),
    ],
)
def test_a_template_that_fails_is_one_sentence(template: str, message: str) -> None:
    tokenizer = train_tokenizer([], "byte", None)
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=message):
        ConversationEncoder(tokenizer).encode([QUESTION, ANSWER], "chats.jsonl:1")


def test_rows_without_conversations_are_left_to_texts() -> None:
    assert read_messages({"text": "A text."}, "here") is None
