"""The shapes of answers on the wire, whole and in pieces."""

import secrets
import time
from collections.abc import Iterator
from typing import Any

from multilin.serving.generation import Generation, Result
from multilin.serving.jobs import Logprob, Piece
from multilin.serving.service import Service

Json = dict[str, Any]


def usage(generation: Generation) -> Json:
    """Tokens of a request; cached are those of the prompt whose state was kept."""
    num_prompt, num_generated = generation.num_prompt_tokens, generation.num_generated
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_generated, "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }  # fmt: skip


class Form:
    """Answers of one kind of request.

    Args:
        service: whose model answers.
        kind: of the objects; `chunk_kind` of those in a stream.
        include_usage: end a stream with the numbers of tokens.
    """

    kind = chunk_kind = prefix = ""

    def __init__(self, service: Service, *, include_usage: bool = False) -> None:
        self.service, self.include_usage = service, include_usage
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.name, "choices": choices}

    def whole(self, generation: Generation) -> Json:
        """The answer at once."""
        choices = []
        for index, result in enumerate(generation.results):
            ends = {"finish_reason": result.finish_reason, "turn": result.turn}
            choices.append({"index": index, **self._content(index, result.text, result.tokens), **ends})
        return self._object(self.kind, choices) | {"usage": usage(generation)} | _session(generation)

    def opening(self, generation: Generation) -> Iterator[Json]:
        """What a stream begins with."""
        raise NotImplementedError

    def pieces(self, index: int, piece: Piece, result: Result) -> Iterator[Json]:
        """What is new in a sequence."""
        content = self._delta(index, piece)
        if piece.text or piece.tokens:
            yield self._object(self.chunk_kind, [{"index": index, **content, "finish_reason": None}])
        if result.finish_reason is not None:
            ends = {"finish_reason": result.finish_reason, "turn": result.turn}
            yield self._object(self.chunk_kind, [{"index": index, **self._delta(index, Piece("", [])), **ends}])

    def closing(self, generation: Generation) -> Iterator[Json]:
        """What a stream ends with."""
        if self.include_usage:
            yield self._object(self.chunk_kind, []) | {"usage": usage(generation)} | _session(generation)

    def _content(self, index: int, text: str, tokens: list[Any]) -> Json:
        raise NotImplementedError

    def _delta(self, index: int, piece: Piece) -> Json:
        raise NotImplementedError


class CompletionForm(Form):
    """Of /v1/completions.

    Args:
        echoes: the text of each prompt, where it comes first; else "".
        first_ids: the first token of each prompt, where tokens of prompts are reported and it has no probability.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, service: Service, *, include_usage: bool, has_logprobs: bool, echoes: list[str],
        first_ids: list[int | None],
    ) -> None:  # fmt: skip
        super().__init__(service, include_usage=include_usage)
        self.echoes, self.first_ids, self.has_logprobs = echoes, first_ids, has_logprobs
        self._offsets: dict[int, int] = {}

    def opening(self, generation: Generation) -> Iterator[Json]:
        """The prompts, if they are wanted."""
        for index in range(len(generation.results)):
            if echo := self.echoes[self._prompt(index, generation)]:
                yield self._object(self.kind, [{"index": index, "text": echo, "logprobs": None, "finish_reason": None}])

    def whole(self, generation: Generation) -> Json:
        """The answer at once."""
        for index, result in enumerate(generation.results):
            number = self._prompt(index, generation)
            first = self.first_ids[number]
            if first is not None:
                result.tokens.insert(0, (Logprob(first, None, []), -1))
            result.text = self.echoes[number] + result.text
        return super().whole(generation)

    def _prompt(self, index: int, generation: Generation) -> int:
        return index // len(generation.ask.settings)

    def _content(self, index: int, text: str, tokens: list[Any]) -> Json:
        return {"text": text, "logprobs": self._logprobs(index, tokens) if self.has_logprobs else None}

    def _delta(self, index: int, piece: Piece) -> Json:
        return self._content(index, piece.text, piece.tokens)

    def _logprobs(self, index: int, tokens: list[tuple[Logprob, int]]) -> Json:
        texts, offset = [self.service.token_text(entry.token_id) for entry, _ in tokens], self._offsets.get(index, 0)
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        tops = [{self.service.token_text(token): value for token, value in entry.top} for entry, _ in tokens]
        return {
            "tokens": texts, "token_logprobs": [entry.value for entry, _ in tokens],
            "top_logprobs": tops, "text_offset": offsets,
        }  # fmt: skip


class ChatForm(Form):
    """Of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, service: Service, *, include_usage: bool, has_logprobs: bool) -> None:
        super().__init__(service, include_usage=include_usage)
        self.has_logprobs = has_logprobs

    def opening(self, generation: Generation) -> Iterator[Json]:
        """The role of the message."""
        for index in range(len(generation.results)):
            delta = {"role": "assistant", "content": ""}
            yield self._object(
                self.chunk_kind, [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
            )

    def _content(self, index: int, text: str, tokens: list[Any]) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": self._logprobs(tokens)}

    def _delta(self, index: int, piece: Piece) -> Json:
        return {"delta": {"content": piece.text} if piece.text else {}, "logprobs": self._logprobs(piece.tokens)}

    def _logprobs(self, tokens: list[tuple[Logprob, int]]) -> Json | None:
        if not self.has_logprobs:
            return None
        entries = []
        for entry, _ in tokens:
            top = [self._token(token, value) for token, value in entry.top]
            entries.append({**self._token(entry.token_id, entry.value), "top_logprobs": top})
        return {"content": entries, "refusal": None}

    def _token(self, token: int, value: float | None) -> Json:
        text = self.service.token_text(token)
        # Of a token that is a part of a character the bytes are not known here.
        return {"token": text, "logprob": value, "bytes": None if "\ufffd" in text else list(text.encode())}


class ResponseForm(Form):
    """Of /v1/responses.

    Args:
        fields: of the request, which the answer repeats.
    """

    kind, prefix = "response", "resp"

    def __init__(self, service: Service, fields: Json) -> None:
        super().__init__(service)
        self.fields, self._number, self._item = fields, 0, f"msg_{secrets.token_hex(12)}"

    def response(self, generation: Generation | None, result: Result | None) -> Json:
        """The response as it stands."""
        is_done = result is not None and result.finish_reason is not None
        is_cut = is_done and result is not None and result.finish_reason == "length"
        status = "incomplete" if is_cut else "completed" if is_done else "in_progress"
        counts = None
        if generation is not None and result is not None and is_done:
            counts = {
                "input_tokens": generation.num_prompt_tokens, "output_tokens": result.num_generated,
                "input_tokens_details": {"cached_tokens": generation.num_cached_tokens},
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": generation.num_prompt_tokens + result.num_generated,
            }  # fmt: skip
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None, "model": self.service.name,
            "output": [self._message(result.text, "incomplete" if is_cut else "completed")]
            if is_done and result is not None else [],
            "parallel_tool_calls": False, "tool_choice": "none", "tools": [], "usage": counts, **self.fields,
        }  # fmt: skip

    def _message(self, text: str, status: str) -> Json:
        return {"id": self._item, "type": "message", "role": "assistant", "status": status,
                "content": [_part(text)]}  # fmt: skip

    def whole(self, generation: Generation) -> Json:
        """The answer at once."""
        return self.response(generation, generation.results[0])

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def opening(self, generation: Generation) -> Iterator[Json]:
        """The empty response, message and part."""
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self.response(None, None))
        message = self._message("", "in_progress") | {"content": []}
        yield self._event("output_item.added", output_index=0, item=message)
        yield self._event("content_part.added", **self._place(), part=_part(""))

    def pieces(self, index: int, piece: Piece, result: Result) -> Iterator[Json]:
        """New text."""
        if piece.text:
            yield self._event("output_text.delta", **self._place(), delta=piece.text, logprobs=[])

    def closing(self, generation: Generation) -> Iterator[Json]:
        """The whole part, message and response."""
        response = self.whole(generation)
        message = response["output"][0]
        yield self._event("output_text.done", **self._place(), text=generation.results[0].text, logprobs=[])
        yield self._event("content_part.done", **self._place(), part=message["content"][0])
        yield self._event("output_item.done", output_index=0, item=message)
        yield self._event(response["status"], response=response)

    def _place(self) -> Json:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _session(generation: Generation) -> Json:
    session = generation.ask.session
    return {} if session is None else {"session": session.id}
