"""The JSON of answers, either whole or as the pieces of a stream."""

import secrets
import time
from collections.abc import Iterator
from typing import Any

from multilin.inference.text import TextStream
from multilin.serving.generation import Generation, Result
from multilin.serving.jobs import Logprob, Piece
from multilin.serving.service import Service

Json = dict[str, Any]


class Form:
    """The form of answers to one kind of request.

    Attributes:
        kind, chunk_kind: the field `object` of an answer, and of a piece of a stream.
        prefix: beginning of the ids of answers.

    Args:
        service: the model and its name.
        has_logprobs: whether answers report the probabilities of tokens.
        include_usage: whether a stream ends with a piece that reports the numbers of tokens.
    """

    kind = chunk_kind = prefix = ""

    def __init__(self, service: Service, *, has_logprobs: bool = False, include_usage: bool = False) -> None:
        self.service, self.has_logprobs, self.include_usage = service, has_logprobs, include_usage
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())

    def _object(self, kind: str, *choices: Json) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.name,
                "choices": list(choices)}  # fmt: skip

    def whole(self, generation: Generation) -> Json:
        """The answer as a whole."""
        choices = [
            {"index": index, **self._content(index, result.text, result.tokens), **_end(result)}
            for index, result in enumerate(generation.results)
        ]
        return self._object(self.kind, *choices) | _totals(generation)

    def opening(self, generation: Generation) -> Iterator[Json]:
        """The pieces that a stream begins with."""
        raise NotImplementedError

    def pieces(self, index: int, piece: Piece, result: Result) -> Iterator[Json]:
        """The pieces for new text of a sequence, and for the sequence's end."""
        if piece.text or piece.tokens:
            yield self._object(self.chunk_kind, {"index": index, **self._delta(index, piece), "finish_reason": None})
        if result.finish_reason is not None:
            yield self._object(self.chunk_kind, {"index": index, **self._delta(index, Piece("", [])), **_end(result)})

    def closing(self, generation: Generation) -> Iterator[Json]:
        """The pieces that a stream ends with."""
        if self.include_usage:
            yield self._object(self.chunk_kind) | _totals(generation)

    def _content(self, index: int, text: str, tokens: list[Any]) -> Json:
        raise NotImplementedError

    def _delta(self, index: int, piece: Piece) -> Json:
        raise NotImplementedError


class CompletionForm(Form):
    """The answers of /v1/completions.

    Args:
        echoes: for each answer, the text of its prompt if the answer repeats the prompt, else "".
        first_ids: for each answer, its prompt's first token if reported (without probability), else None.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, service: Service, *, echoes: list[str], first_ids: list[int | None], **options: bool) -> None:
        super().__init__(service, **options)
        self.echoes = echoes
        self._first: list[list[tuple[Logprob, int]]] = [
            [] if token is None else [(Logprob(token, None, []), -1)] for token in first_ids
        ]
        self._prompts = [TextStream(service.codec, (), skip_special_tokens=True) for _ in echoes]

    def opening(self, generation: Generation) -> Iterator[Json]:
        """The pieces with the prompts, if the answers repeat them."""
        for index, (echo, first) in enumerate(zip(self.echoes, self._first, strict=True)):
            if echo or first:
                content = self._content(index, echo, first)
                yield self._object(self.kind, {"index": index, **content, "finish_reason": None})

    def whole(self, generation: Generation) -> Json:
        """The answer as a whole."""
        for echo, first, result in zip(self.echoes, self._first, generation.results, strict=True):
            result.tokens = [*first, *result.tokens]
            result.text = echo + result.text
        return super().whole(generation)

    def _content(self, index: int, text: str, tokens: list[Any]) -> Json:
        return {"text": text, "logprobs": self._logprobs(index, tokens) if self.has_logprobs else None}

    def _delta(self, index: int, piece: Piece) -> Json:
        return self._content(index, piece.text, piece.tokens)

    def _logprobs(self, index: int, tokens: list[tuple[Logprob, int]]) -> Json:
        entries = [entry for entry, _ in tokens]
        texts = [self.service.token_text(entry.token_id) for entry in entries]
        offsets = [self._offset(index, entry.token_id, num_before) for entry, num_before in tokens]
        # As in OpenAI's API, the chosen token is always an entry, even if it is not one of the likeliest.
        tops = [
            {self.service.token_text(token): value for token, value in [*entry.top, (entry.token_id, entry.value)]}
            if entry.value is not None
            else {}
            for entry in entries
        ]
        return {
            "tokens": texts, "token_logprobs": [entry.value for entry in entries],
            "top_logprobs": tops, "text_offset": offsets,
        }  # fmt: skip

    def _offset(self, index: int, token: int, num_before: int) -> int:
        """The offset of a token in the text; `num_before` new characters precede it (-1: it belongs to the prompt)."""
        if num_before >= 0:
            return len(self.echoes[index]) + num_before
        stream = self._prompts[index]
        length = stream.length
        stream.put(token)
        return stream.begin(token, length)


class ChatForm(Form):
    """The answers of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self, generation: Generation) -> Iterator[Json]:
        """The pieces with the role of the messages."""
        for index in range(len(generation.results)):
            delta = {"role": "assistant", "content": ""}
            yield self._object(
                self.chunk_kind, {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            )

    def _content(self, index: int, text: str, tokens: list[Any]) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": self._logprobs(tokens)}

    def _delta(self, index: int, piece: Piece) -> Json:
        return {"delta": {"content": piece.text} if piece.text else {}, "logprobs": self._logprobs(piece.tokens)}

    def _logprobs(self, tokens: list[tuple[Logprob, int]]) -> Json | None:
        if not self.has_logprobs:
            return None
        entries = [
            self._token(entry.token_id, entry.value) | {"top_logprobs": [self._token(*top) for top in entry.top]}
            for entry, _ in tokens
        ]
        return {"content": entries, "refusal": None}

    def _token(self, token: int, value: float | None) -> Json:
        content = list(self.service.codec.token_bytes(token))
        return {"token": self.service.token_text(token), "logprob": value, "bytes": content}


def _end(result: Result) -> Json:
    return {"finish_reason": result.finish_reason, "turn": result.turn}


def _totals(generation: Generation) -> Json:
    """The fields of an answer with the numbers of tokens and the session."""
    num_prompt, num_generated = generation.num_prompt_tokens, generation.num_generated
    usage = {
        "prompt_tokens": num_prompt, "completion_tokens": num_generated, "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }  # fmt: skip
    session = generation.ask.session
    return {"usage": usage} | ({} if session is None else {"session": session.id})
