"""Messages as tokens: by the model's chat template, or in a plain layout for a model that has none."""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from multilin.errors import InputError
from multilin.inference.text import TextCodec
from multilin.serving.turns import Turn

Messages = list[dict[str, str]]
ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


class PlainLayout:
    """A line with the role, the content, and an empty line:

        User:
        Hello

        Assistant:

    An answer ends where the model begins another message.
    """

    stops = tuple(f"\n\n{name}:" for name in dict.fromkeys(ROLES.values()))
    ends: frozenset[int] = frozenset()

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def token_ids(self, messages: Messages, before: Turn | None) -> list[int]:
        """Tokens of the messages and of the head of the answer, after the conversation `before` if there is one."""
        parts = [f"{ROLES[message['role']]}:\n{message['content']}\n\n" for message in messages]
        if before is not None and before.num_tokens:
            parts.insert(0, "\n\n")
        first, *others = [*parts, "Assistant:\n"]
        ids = self._codec.encode(first, is_start=True) if before is None else self._codec.encode_more(first)
        # Each part on its own, so that the tokens of a conversation begin with those of a shorter one.
        return ids + [token for part in others for token in self._codec.encode_more(part)]


class TemplateLayout:
    """The chat template of a tokenizer; special tokens in its text become tokens.

    Args:
        codec: the model's tokenizer.
        template: the template in Jinja.
        names: special tokens by name, such as bos_token, for the template.
    """

    stops: tuple[str, ...] = ()

    def __init__(self, codec: TextCodec, template: str, names: dict[str, str]) -> None:
        tokenizer = Tokenizer.from_str(codec.tokenizer.to_str())
        tokenizer.encode_special_tokens = False
        self._codec, self._names = dataclasses.replace(codec, tokenizer=tokenizer), names
        try:
            self._template = _environment().from_string(template)
        except TemplateError as error:
            raise InputError(f"run: its chat template is not valid ({error})") from None
        self._starts = {codec.end_id, tokenizer.token_to_id(names.get("bos_token", ""))}
        self.ends = frozenset(self._special_after_answer())

    def token_ids(self, messages: Messages, before: Turn | None) -> list[int]:
        """Tokens of the messages and of the head of the answer, after the conversation `before` if there is one."""
        if before is not None and before.messages:
            *earlier, answer = before.messages
            given, bare = answer["content"], answer["content"].strip()
            head, whole = self._render(earlier), self._render([*earlier, answer | {"content": bare}, *messages])
            if whole.startswith(head):
                rest = whole[len(head) :]
                # Templates leave out spaces around an answer, or put some there, which the model then writes itself.
                for text, after in ((given, rest), (bare, rest.lstrip())):
                    if after.startswith(text):
                        return self._codec.encode_more(after[len(text) :])
        if before is not None:
            return self._codec.encode_more(self._render(messages))
        ids = self._codec.encode(self._render(messages))
        return ids if ids and ids[0] in self._starts else [self._codec.end_id, *ids]

    def _special_after_answer(self) -> list[int]:
        """The special token that the template puts after an answer, if it puts one there."""
        try:
            whole = self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
        except InputError:
            return []
        ids = self._codec.encode_more(whole.rpartition("!")[2].lstrip())[:1]
        added = self._codec.tokenizer.get_added_tokens_decoder()
        return [token for token in ids if token in added and added[token].special]

    def _render(self, messages: Messages) -> str:
        try:
            nothing = {"tools": None, "documents": None}  # as transformers says it
            return self._template.render(messages=messages, add_generation_prompt=True, **nothing, **self._names)
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"messages: the model's chat template refuses them ({str(error)[:200]})") from None


Layout = PlainLayout | TemplateLayout


def open_layout(codec: TextCodec, folder: Path) -> Layout:
    """The layout of the model in a folder."""
    config: dict[str, Any] = {}
    if (path := folder / "tokenizer_config.json").is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
    template = config.get("chat_template")
    if (path := folder / "chat_template.jinja").is_file():
        template = path.read_text(encoding="utf-8")
    elif isinstance(template, list):  # several, as older versions of transformers wrote them
        template = {one["name"]: one["template"] for one in template}.get("default")
    if not isinstance(template, str):
        return PlainLayout(codec)
    tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in config.items()}
    names = {name: token for name, token in tokens.items() if name.endswith("_token") and isinstance(token, str)}
    return TemplateLayout(codec, template, names)


class _Generation(Extension):
    """`{% generation %}`, which marks in training what the model is to learn; here it has no effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        """The statements between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers offers to chat templates, so that a conversation is laid out as in training."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    return environment


def _refuse(message: str) -> Any:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
