"""Conversion of messages to tokens, with the model's chat template or, without a template, in a plain layout."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from multilin.data.chat import ChatTemplate, cut_marked
from multilin.errors import InputError
from multilin.inference.text import TextCodec, checked
from multilin.serving.turns import Turn

Messages = list[dict[str, str]]
ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}


class PlainLayout:
    """A layout without a template. A message is a line with the role, the content, and an empty line:

        User:
        Hello

        Assistant:

    An answer ends when the model begins another message.
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
        # Each part is encoded alone, so that later messages do not change the tokens of earlier ones.
        return ids + [token for part in others for token in self._codec.encode_more(part)]


class TemplateLayout:
    """The chat template of a tokenizer. Control tokens of the template become tokens; in messages they stay text.

    Args:
        codec: the model's tokenizer.
        template: the source of the Jinja template.
        names: the special tokens, by names such as bos_token that the template may use.
    """

    stops: tuple[str, ...] = ()

    def __init__(self, codec: TextCodec, template: str, names: dict[str, str]) -> None:
        try:
            self._jinja, self._names = _environment().from_string(template), names
        except TemplateError as error:
            raise InputError(f"run: the model's chat template is not valid ({error})") from None
        self._template = ChatTemplate(codec.tokenizer, self._render)
        self._end_id = codec.end_id
        self._starts = {codec.end_id, codec.tokenizer.token_to_id(names.get("bos_token", ""))}
        self.ends = frozenset(self._control_after_answer())

    def token_ids(self, messages: Messages, before: Turn | None) -> list[int]:
        """Tokens of the messages and of the head of the answer, after the conversation `before` if there is one."""
        if before is None:
            ids = self._template.encode(self._marked(messages))
            return ids if ids and ids[0] in self._starts else [self._end_id, *ids]
        last = before.token_ids[-1] if before.token_ids else -1
        return self._template.encode(self._after(before.messages or [], messages), last)

    def _after(self, before: Messages, messages: Messages) -> str:
        """The text of messages after the conversation `before`, with the marks that `ChatTemplate.render` adds."""
        if before:
            *earlier, answer = before
            given, bare = answer["content"], answer["content"].strip()
            head, marked = self._render(earlier), self._marked([*earlier, answer | {"content": bare}, *messages])
            whole = self._template.plain(marked)
            rest = whole.removeprefix(head)
            # Templates may change the spaces around an answer; here the spaces of the model count.
            for text, after in ((given, rest), (bare, rest.lstrip())):
                if whole.startswith(head) and after.startswith(text):
                    return cut_marked(marked, len(whole) - len(after) + len(text))[1]
        return self._marked(messages)

    def _control_after_answer(self) -> list[int]:
        """The control token that the template puts after an answer, if any."""
        try:
            whole = self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
        except InputError:
            return []
        ids = self._template.encode(whole.rpartition("!")[2].lstrip(), -1)[:1]
        return [token for token in ids if token in self._template.control]

    def _marked(self, messages: Messages) -> str:
        for message in messages:
            checked(message["content"] + message.get("name", ""))
        return self._template.render(messages, prompt=True)

    def _render(self, messages: Sequence[dict[str, str]], prompt: bool = True) -> str:
        try:
            nothing = {"tools": None, "documents": None}  # transformers passes them too
            return self._jinja.render(messages=messages, add_generation_prompt=prompt, **nothing, **self._names)
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"messages: the model's chat template refuses them ({str(error)[:200]})") from None


Layout = PlainLayout | TemplateLayout


def open_layout(codec: TextCodec, folder: Path) -> Layout:
    """Return the layout of chat messages for the model in a folder."""
    config: dict[str, Any] = {}
    if (path := folder / "tokenizer_config.json").is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
    template = config.get("chat_template")
    if (path := folder / "chat_template.jinja").is_file():
        template = path.read_text(encoding="utf-8")
    elif isinstance(template, list):  # older versions of transformers wrote a list
        template = {one["name"]: one["template"] for one in template}.get("default")
    if not isinstance(template, str):
        return PlainLayout(codec)
    tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in config.items()}
    names = {name: token for name, token in tokens.items() if name.endswith("_token") and isinstance(token, str)}
    return TemplateLayout(codec, template, names)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the text that training learns; the tag has no effect in the server."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        """Return the statements between the opening and the closing tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """A Jinja environment like the environment of transformers, so that templates give the same text as in training."""
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
    # The filter of Jinja would escape HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
