"""Messages as tokens."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from multilin import InputError
from multilin.data.files import Document
from multilin.data.packing import pack
from multilin.data.tokenizers import train_tokenizer
from multilin.inference.generate_run import text_codec
from multilin.inference.runs import Run
from multilin.inference.text import TextCodec
from multilin.inference.torch_engine import TorchEngine
from multilin.serving.layout import PlainLayout, TemplateLayout, open_layout
from multilin.serving.turns import Turn
from tests.serving.conftest import Start
from tests.serving.engines import Script

TALK = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def codec(run: Run) -> TextCodec:
    return text_codec(run.tokenizer)


def turn(token_ids: list[int], messages: list[dict[str, str]]) -> Turn:
    return Turn("turn_", "0", None, "chat", "", "", messages, token_ids, len(token_ids) - 1)


def test_the_plain_layout(run: Run, codec: TextCodec) -> None:
    layout = open_layout(codec, run.folder)
    assert isinstance(layout, PlainLayout)
    ids = layout.token_ids(TALK, None)
    assert ids[0] == codec.end_id
    assert codec.tokenizer.decode(ids) == (
        "System:\nBe brief.\n\nUser:\nHello\n\nAssistant:\nHi!\n\nUser:\nBye\n\nAssistant:\n"
    )
    head = [*layout.token_ids(TALK[:2], None), *codec.encode("Hi!")]
    assert head + layout.token_ids(TALK[3:], turn(head, TALK[:3])) == ids


def test_a_chat_template(codec: TextCodec, tmp_path: Path) -> None:
    """Its special tokens are tokens; a conversation goes on as if it was laid out as a whole."""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    end = codec.tokenizer.id_to_token(codec.end_id)
    (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": "{end}"}}')
    layout = open_layout(codec, tmp_path)
    assert isinstance(layout, TemplateLayout)
    ids = layout.token_ids(TALK, None)
    assert ids.count(codec.end_id) == 1 + len(TALK)
    head = [*layout.token_ids(TALK[:2], None), *codec.encode("Hi!")]
    onward = layout.token_ids(TALK[3:], turn(head, TALK[:3]))
    assert head + onward == ids
    broken = [*TALK[:2], {"role": "assistant", "content": "Hi\ufffd"}]  # an answer that ended inside a character
    assert layout.token_ids(TALK[3:], turn(head, broken)) == onward
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("m.content", "m.content | trim"))
    spacious = [*TALK[:2], {"role": "assistant", "content": " Hi!\n"}]
    assert open_layout(codec, tmp_path).token_ids(TALK[3:], turn(head, spacious)) == onward
    imported = dataclasses.replace(turn(head, TALK), messages=None)
    assert layout.token_ids(TALK[3:], imported)[0] != codec.end_id
    with pytest.raises(InputError, match="no tools"):
        layout.token_ids([{"role": "tool", "content": ""}], None)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}"
        "{{ m.content | tojson(ensure_ascii=False, sort_keys=True) }}"
        "{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    ids = open_layout(codec, tmp_path).token_ids([{"role": "user", "content": "<é>"}] * 2, None)
    assert codec.tokenizer.decode(ids) == '"<é>"4'
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(InputError, match="chat template is not valid"):
        open_layout(codec, tmp_path)


def test_a_configuration_of_an_older_transformers(codec: TextCodec, tmp_path: Path) -> None:
    """It may have several templates, and more about a token than its text."""
    end = {"__type": "AddedToken", "content": codec.tokenizer.id_to_token(codec.end_id), "special": True}
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]
    config = {"eos_token": end, "bos_token": None, "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert open_layout(codec, tmp_path).token_ids(TALK, None).count(codec.end_id) == 1 + len(TALK)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named[:1]}))
    assert isinstance(open_layout(codec, tmp_path), PlainLayout)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<{{ m.content | trim }}<end>{{ '\n' }}{% endfor %}{{ '<' if add_generation_prompt }}",
        "{{ bos_token }}{{ 'T' if tools is not none }}{{ sep_token }}"
        "{% for m in messages %}<{{ m.content }}<end>{% endfor %}{{ '<' if add_generation_prompt }}",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
    ],
)
def test_a_conversation_has_the_tokens_of_training(template: str, tmp_path: Path) -> None:
    """Its first token, the spaces around answers, and what ends an answer, which may be a token without a role."""
    tokenizer = train_tokenizer([], "byte", None)
    tokenizer.add_special_tokens({"bos_token": "<s>", "sep_token": "<sep>"})
    tokenizer.add_tokens([AddedToken("<end>", special=True)])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    codec = text_codec(tokenizer)
    layout = open_layout(codec, tmp_path)
    talk = [{"role": role, "content": text} for text in ("Hello", "Bye") for role in ("user", "assistant")]
    trained = pack([Document("talk", "", talk)], tokenizer, tmp_path / "packed").tokens.tolist()
    ids = layout.token_ids(talk[:1], None)
    assert ids == trained[: len(ids)]
    ends = {codec.end_id, *layout.ends}
    answer = list(itertools.takewhile(lambda token: token not in ends, trained[len(ids) :]))
    before = turn(ids + answer, [talk[0], {"role": "assistant", "content": codec.tokenizer.decode(answer)}])
    whole = before.token_ids + layout.token_ids(talk[2:3], before)
    assert whole == trained[: len(whole)]
    assert len(trained) > len(whole) > len(ids + answer)


def test_an_answer_ends_where_the_template_ends_it(start: Start, run: Run, codec: TextCodec) -> None:
    server = start(Script(TorchEngine(run.model), codec.encode("Hi!x Who?")))
    server.service.layout.ends = frozenset(codec.encode("x"))
    body = {"messages": TALK[1:2], "max_tokens": 9, "temperature": 0}
    (choice,) = server.post("/v1/chat/completions", **body)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hi!", "stop")
