"""Reads conversations from rows, and encodes them by a chat template."""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from multilin.data.added_text import TextReader, plain_tokenizer
from multilin.errors import InputError, as_input_error, nearest, prefixed, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARK = "\ud800"  # half a surrogate pair, which no text holds
CHAT_FIELDS = ("messages", "prompt", "completion")
ROLES = ("system", "user", "assistant")
Message = dict[str, str]

CHAT_TEMPLATE = (
    r"{% for message in messages %}{{ '' if loop.first else '\n\n' }}{{ message['role'] | capitalize + ':\n' }}"
    r"{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '' }}{% endfor %}"
    r"{{ '\n\nAssistant:\n' if add_generation_prompt else '' }}"
)
"""Default chat template: `User:` or another role, a line break, the text, and end of text after answers."""


def read_messages(row: Mapping[str, Any], where: str) -> list[Message] | None:
    """The conversation in a row: `messages`, or a user's `prompt` and the `completion`; None for any other row.

    If one of these fields, or the content of a message, is null, the conversation is empty.

    Args:
        row: the fields. `prompt` and `completion` are texts, or lists of messages.
        where: place of the row; error messages begin with it.

    Raises:
        InputError: messages have another form, a role is unknown, a message is empty, there is no message by the
            assistant, or the assistant's message comes first.
    """
    if "messages" in row:
        given = row["messages"]
    elif "prompt" in row and "completion" in row:
        given = [*_as_messages(row["prompt"], "user"), *_as_messages(row["completion"], "assistant")]
    else:
        return None
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise InputError(
            f"{where}: {shown(given)} given, but a conversation should be a list of objects with role and content"
        )
    if any(message.get("content", "") is None for message in given):
        return []
    messages = [_check(message, f"{where}: message {number}") for number, message in enumerate(given, 1)]
    if messages and messages[0]["role"] == "assistant":
        raise InputError(
            f"{where}: the conversation begins with the assistant; put a message by the user or the system before it"
        )
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(f"{where}: no message by the assistant, but training learns from such messages")
    return messages


def _as_messages(part: Any, role: str) -> list[Any]:
    return part if isinstance(part, list) else [{"role": role, "content": part}]


def _check(message: Mapping[str, Any], where: str) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        hint = nearest(str(role), ROLES)
        raise InputError(f"{where}: the role {shown(role)} is not known; known are {', '.join(ROLES)}{hint}")
    if not isinstance(content, str):
        raise InputError(f"{where}: the content is {shown(content)}, but it should be a text")
    if not content.strip():
        raise InputError(f"{where}: the {role}'s text is empty")
    return {"role": str(role), "content": content}


class ChatTemplate:
    """Turns messages into tokens by a chat template. Control tokens come from the template, never from a message.

    Control tokens are the special tokens, and all other added tokens that the template writes around messages. While
    the template is rendered, characters of messages are marked: either `MARK` is put before a character, or another
    half of a surrogate pair replaces the character. So a control token that a message spells is read as text.

    Attributes:
        special: the texts of special tokens.
        control: the texts of control tokens by their ids.

    Args:
        tokenizer: see `plain_tokenizer`.
        render: renders messages as text; if its second argument is true, the text ends where an answer would begin.
    """

    def __init__(self, tokenizer: Tokenizer, render: Callable[[Sequence[Message], bool], str]) -> None:
        self._render = render
        written, frame = self._examples()
        added = tokenizer.get_added_tokens_decoder()
        self.special = [token.content for token in added.values() if token.special]
        others = {token.content for token in added.values() if token.content.strip() and token.content in written}
        control = [*self.special, *others.difference(self.special)]
        self.control = {number: token.content for number, token in added.items() if token.content in control}
        self._reader, self._pattern = TextReader(tokenizer, control), _any_of(control, f"(?<!{MARK})")
        self._spelled = _any_of(control, "(?i)")
        self._own = _any_of(text for text in others.difference(self.special) if text not in frame)
        first = sorted({text[0] for token in control for text in (token, token.lower(), token.upper())})
        self._substitutes = {letter: chr(ord(MARK) + number) for number, letter in enumerate(first, 1)}
        self._originals = str.maketrans({MARK: "", **{mark: letter for letter, mark in self._substitutes.items()}})

    def _examples(self) -> tuple[str, str]:
        """The template's output for examples, and the parts of it that lie outside the assistant's answers."""
        system, user, answer = (
            {"role": role, "content": text} for role, text in zip(ROLES, (".", "?", "\ue000"), strict=True)
        )
        written, frame = "", ""
        for messages in ([system, user, answer], [system, user], [user, answer], [user]):
            with contextlib.suppress(InputError):  # a template may refuse a role, or need another order
                written += self._render(messages, True)
                frame += self._render(messages, False).rpartition("\ue000")[2]
        return written, frame

    def render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """The text of messages for `encode`, in which characters of messages' contents are marked.

        Args:
            messages: messages whose contents have no half of a surrogate pair.
            prompt: whether the text ends with a prompt for an answer.

        Raises:
            InputError: the template looks for a control token that a message spells, or `render` fails.
        """
        # A template that tests or cuts contents may write another text if every character has a mark.
        for mark in (self._mark_all, self._mark_spelled):
            marked = [
                {name: text if name == "role" else mark(text, message["role"]) for name, text in message.items()}
                for message in messages
            ]
            text = self._render(marked, prompt)
            if self.plain(text) == self._render(messages, prompt):
                return text
        raise InputError(
            "messages: a message spells a control token that the chat template looks for; change the message"
        )

    def plain(self, text: str) -> str:
        """A text from `render` without marks."""
        return text.translate(self._originals)

    def _mark_all(self, text: str, role: str) -> str:
        if role != "assistant":
            return _marked(text)
        # Tokens that the template writes only in answers, such as <think>, stay tokens: the model writes them too.
        parts = self._own.split(text)
        return "".join(part if number % 2 else _marked(part) for number, part in enumerate(parts))

    def _mark_spelled(self, text: str, role: str) -> str:
        def mark(match: re.Match[str]) -> str:
            is_kept = role == "assistant" and self._own.fullmatch(match[0])
            first, rest = match[0][0], match[0][1:]
            return match[0] if is_kept else self._substitutes.get(first, MARK + first) + rest

        return self._spelled.sub(mark, text)

    def encode(self, text: str, after: int | None = None) -> list[int]:
        """Token ids of a text from `render`, or of a part of one.

        Args:
            text: the text.
            after: the token before it; None at the beginning of a text.
        """
        names = self._reader.names
        text = self.plain(self._pattern.sub(lambda match: names[match[0]], text))
        if after is None:
            return self._reader.encode(text)
        if after in self.control:  # it decides how the text begins
            return self._reader.encode(names[self.control[after]] + text)[1:]
        return self._reader.encode_more(text)


def _any_of(texts: Iterable[str], before: str = "") -> re.Pattern[str]:
    """A regular expression, as a group, that finds these texts; at each place it matches the longest text."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(f"{before}({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _marked(text: str) -> str:
    return re.sub(r"(?=\S)", MARK, text)


def cut_marked(text: str, length: int) -> tuple[str, str]:
    """Cut a text from `ChatTemplate.render` in two; the first part has `length` characters, not counting marks."""
    places = (place + 1 for place, character in enumerate(text) if character != MARK)
    place = next(itertools.islice(places, length - 1, None)) if length else 0
    return text[:place], text[place:]


class ConversationEncoder:
    """Turns conversations into tokens, by the chat template of a tokenizer.

    Args:
        tokenizer: a tokenizer; CHAT_TEMPLATE is used if it has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self._source = None if tokenizer.chat_template else CHAT_TEMPLATE  # None takes the tokenizer's template
        self._template = ChatTemplate(plain_tokenizer(tokenizer.backend_tokenizer.to_str()), self._render)

    def _render(self, messages: Sequence[Message], prompt: bool) -> str:
        with as_input_error(lambda reason: f"messages: the tokenizer's chat template fails ({reason})"):
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), chat_template=self._source, tokenize=False, add_generation_prompt=prompt
                )
            )

    def encode(self, messages: list[Message], where: str) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, and for each token whether it belongs to an answer of the assistant.

        An answer is the text that the template adds after the prompt, encoded as a text that follows the prompt. So in
        training a model continues exactly the same tokens as in generation.

        Raises:
            InputError: the template fails or writes no answers, or a message spells a special token.
        """
        for message in messages:
            for token in self._template.special:
                if token in message["content"]:
                    raise InputError(f"{where}: a message spells the special token {token!r}; write it differently")
        ids: list[int] = []
        is_answer: list[bool] = []
        with prefixed(f"{where}: ", "messages: "):
            for text, answers in self._parts(messages):
                part = self._template.encode(text, ids[-1] if ids else None)
                ids += part
                is_answer += [answers] * len(part)
        if not any(is_answer):
            raise InputError(
                f"{where}: the tokenizer's chat template writes nothing for answers; give another tokenizer"
            )
        return ids, is_answer

    def _parts(self, messages: list[Message]) -> Iterator[tuple[str, bool]]:
        """The text of a conversation, cut where answers begin and end, and for each part whether it is an answer."""
        done, numbers = "", [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        rest = self._template.render(messages[: numbers[-1] + 1], prompt=False)
        for number in numbers:
            before, after = self._render(messages[:number], True), self._render(messages[: number + 1], False)
            if not before.startswith(done) or not after.startswith(before):
                raise InputError(
                    "messages: the tokenizer's chat template changes earlier messages when an answer follows, so "
                    "answers cannot be told apart; give a tokenizer with another template"
                )
            for text, answers in ((before[len(done) :], False), (after[len(before) :], True)):
                part, rest = cut_marked(rest, len(text))
                yield part, answers
            done = after
