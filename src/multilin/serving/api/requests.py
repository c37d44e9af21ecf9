"""The bodies of requests. Requests with other fields are refused."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, model_validator

from multilin.inference.settings import GenerationSettings
from multilin.settings import load_settings

Text = Annotated[str, MaxLen(2**24)]
Id = Annotated[str, MaxLen(64)]
Name = Annotated[str, MaxLen(256)]
TokenIds = Annotated[list[int], MinLen(1), MaxLen(2**20)]
Number = Annotated[int, Ge(0), Lt(2**31)]
Penalty = Annotated[float, Ge(-2), Le(2)]
NumTop = Annotated[int, Ge(0), Le(20)]
Stop = Annotated[str, MinLen(1), MaxLen(1000)]
MOST_STOPS = 8
# Unsupported fields. Each is accepted only with this value, which changes nothing. An object may lack members.
IDLE: dict[str, list[Any]] = {
    "annotations": [[]], "best_of": [1], "function_call": ["auto", "none"], "functions": [[]],
    "include_obfuscation": [False], "metadata": [{}], "modalities": [["text"]], "parallel_tool_calls": [True, False],
    "prompt_cache_retention": ["in_memory"], "reasoning_effort": ["none"], "response_format": [{"type": "text"}],
    "service_tier": ["auto", "default"], "suffix": [""], "tool_calls": [[]], "tool_choice": ["auto", "none"],
    "tools": [[]], "top_logprobs": [0], "verbosity": ["medium"],
}  # fmt: skip


def _is_idle(value: Any, idle: Any) -> bool:
    """True if a value equals `idle`, or is an object whose members are null or equal the members of `idle`."""
    if isinstance(value, dict) and isinstance(idle, dict):
        return all(member is None or _is_idle(member, idle.get(name)) for name, member in value.items())
    return type(value) is type(idle) and bool(value == idle)


class Body(BaseModel):
    """The base class of all bodies. It refuses unknown fields and values of a wrong type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_idle_fields(cls, body: Any) -> Any:
        """Drop nulls and values that change nothing: clients send back the server's messages with null fields."""
        if not isinstance(body, dict):
            return body
        fields = cls.model_fields
        idle = IDLE | {"best_of": [1, body.get("n")]}  # equal to n
        return {
            name: value for name, value in body.items()
            if (fields[name].is_required() or value is not None if name in fields
                else value is not None and not any(_is_idle(value, one) for one in idle.get(name, ())))
        }  # fmt: skip


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


class TextRequest(Body):
    """The fields that completion requests and chat requests share."""

    model: Name | None = None
    max_tokens: Number | None = None
    n: Annotated[int, Ge(1), Le(128)] | None = None
    session: Id | None = None
    temperature: Annotated[float, Ge(0), Le(1000)] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    top_k: Annotated[int, Ge(0), Le(2**20)] | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    repetition_penalty: Annotated[float, Gt(0), Le(1000)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[Name, Annotated[float, Ge(-1e6), Le(1e6)]], MaxLen(1000)] | None = None
    seed: Annotated[int, Ge(-(2**63)), Lt(2**63)] | None = None
    stop: Stop | Annotated[list[Stop], MaxLen(MOST_STOPS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    user: Name | None = None  # this field and the next two have no effect
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None

    def settings(self, stops: tuple[str, ...], index: int) -> GenerationSettings:
        """The settings for answer number `index`. The default temperature is 1; 0 takes the likeliest token."""
        temperature = 1.0 if self.temperature is None else self.temperature
        values: dict[str, Any] = {
            "repetition_penalty": self.repetition_penalty or 1.0, "logit_bias": self.logit_bias or {},
            "presence_penalty": self.presence_penalty or 0.0, "frequency_penalty": self.frequency_penalty or 0.0,
            "stop": (*([self.stop] if isinstance(self.stop, str) else self.stop or ()), *stops),
            "stop_at_end": not self.ignore_eos, "temperature": temperature,
        }  # fmt: skip
        if temperature:
            seed = None if self.seed is None else (self.seed + index) % 2**32
            values |= {"top_p": self.top_p, "top_k": self.top_k or None, "min_p": self.min_p or None, "seed": seed}
        return load_settings(GenerationSettings, values)


class CompletionRequest(TextRequest):
    """POST /v1/completions."""

    prompt: Text | list[Text] | TokenIds | list[TokenIds] = ""
    echo: bool | None = None
    logprobs: NumTop | None = None


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], MaxLen(1000)]
    name: Name | None = None  # name of the speaker, for chat templates that use it

    def plain(self) -> dict[str, str]:
        """The message as a dictionary for chat templates."""
        given = self.content
        content = given if isinstance(given, str) else "".join(part.text for part in given)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatRequest(TextRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], MinLen(1), MaxLen(10_000)]
    max_completion_tokens: Number | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None


class TokenizeRequest(Body):
    """POST /tokenize."""

    model: Name | None = None
    prompt: Text


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[int], MaxLen(2**20)]


class SessionRequest(Body):
    """POST /v1/sessions, and /v1/sessions/{id}/fork."""

    turn: Id | None = None


class RewindRequest(Body):
    """POST /v1/sessions/{id}/rewind."""

    turns: Annotated[int, Ge(1), Le(10**6)]
