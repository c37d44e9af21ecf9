"""Conversations: in rows of `messages` or of `prompt` and `completion`, and as tokens by a chat template."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from multilin.data.added_text import AddedTextEncoder, encode_whole, plain_tokenizer
from multilin.errors import InputError, as_input_error, nearest, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT_FIELDS = ("messages", "prompt", "completion")
ROLES = ("system", "user", "assistant")
Message = dict[str, str]

CHAT_TEMPLATE = (
    r"{% for message in messages %}{{ '' if loop.first else '\n\n' }}{{ message['role'] | capitalize + ':\n' }}"
    r"{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '' }}{% endfor %}"
    r"{{ '\n\nAssistant:\n' if add_generation_prompt else '' }}"
)
"""Template for tokenizers without one: `User:` or another role, a line break, the text, end of text after answers."""


def read_messages(row: Mapping[str, Any], where: str) -> list[Message] | None:
    """The conversation in a row: its `messages`, or a user's `prompt` and the `completion`; None in any other row.

    Where one of these or the content of a message is null, the conversation is empty.

    Args:
        row: the fields. `prompt` and `completion` are texts, or lists of messages.
        where: place of the row; error messages begin with it.

    Raises:
        InputError: messages of another form, an unknown role, an empty message, no message by the assistant, or none
            before it.
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
        raise InputError(f"{where}: no message by the assistant, which is what training learns to write")
    return messages


def _as_messages(part: Any, role: str) -> list[Any]:
    return part if isinstance(part, list) else [{"role": role, "content": part}]


def _check(message: Mapping[str, Any], where: str) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        hint = nearest(str(role), ROLES)
        raise InputError(f"{where}: the role {shown(role)} is not known; known are {', '.join(ROLES)}{hint}")
    if not isinstance(content, str):
        raise InputError(f"{where}: its content is {shown(content)}, but it should be a text")
    if not content.strip():
        raise InputError(f"{where}: the {role}'s text is empty")
    return {"role": str(role), "content": content}


class ConversationEncoder:
    """Turns conversations into tokens, by the chat template of a tokenizer.

    Args:
        tokenizer: its template may write special tokens; without one, it is CHAT_TEMPLATE.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self._template = None if tokenizer.chat_template else CHAT_TEMPLATE  # None takes the tokenizer's own
        self._backend = plain_tokenizer(tokenizer.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = False
        self._added_text = AddedTextEncoder(self._backend)
        added = self._backend.get_added_tokens_decoder()  # also those without a role, as <|im_start|> often is
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}

    def encode(self, messages: list[Message], where: str) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, and for each whether it belongs to an answer of the assistant.

        An answer is the text that the template adds after the prompt for an answer, so that a model learns to go on
        from exactly the text that it is given in use, and its tokens are those of text that is added there.

        Raises:
            InputError: the template fails or has no place for answers, or a message spells a special token.
        """
        for message in messages:
            for token in self._special.values():
                if token in message["content"]:
                    raise InputError(f"{where}: a message spells the special token {token!r}; write it in another way")
        ids: list[int] = []
        is_answer: list[bool] = []
        for text, answers in self._parts(messages, where):
            if not ids:
                part = encode_whole(self._backend, text)
            elif ids[-1] in self._special:  # it decides how the part begins
                part = self._added_text.encode(self._special[ids[-1]] + text)[1:]
            else:
                part = self._added_text.encode(text)
            ids += part
            is_answer += [answers] * len(part)
        if not any(is_answer):
            raise InputError(
                f"{where}: the tokenizer's chat template writes nothing for answers; give a tokenizer with another one"
            )
        return ids, is_answer

    def _parts(self, messages: list[Message], where: str) -> Iterator[tuple[str, bool]]:
        """The text of a conversation, cut where answers begin and end; True for answers."""

        def render(number: int, *, prompt: bool) -> str:
            with as_input_error(lambda reason: f"{where}: the tokenizer's chat template fails ({reason})"):
                text = self._tokenizer.apply_chat_template(
                    messages[:number], chat_template=self._template, tokenize=False, add_generation_prompt=prompt
                )
                return str(text)

        done = ""
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = render(number, prompt=True), render(number + 1, prompt=False)
                if not before.startswith(done) or not after.startswith(before):
                    raise InputError(
                        f"{where}: the tokenizer's chat template writes earlier messages anew when an answer follows, "
                        "so answers cannot be told apart; give a tokenizer with another one"
                    )
                yield before[len(done) :], False
                yield after[len(before) :], True
                done = after
