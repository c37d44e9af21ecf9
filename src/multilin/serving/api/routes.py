"""The endpoints that generate text, convert text and tokens, or describe the model and the server."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from multilin.serving.api.answers import ChatForm, CompletionForm
from multilin.serving.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TextRequest,
    TokenizeRequest,
)
from multilin.serving.api.streams import Answer, JsonResponse
from multilin.serving.errors import NOT_FOUND, ApiError
from multilin.serving.generation import Ask, Prompt
from multilin.serving.service import Service
from multilin.serving.sessions import Session
from multilin.serving.turns import Turn

router = APIRouter()
COMPLETION_TOKENS, CHAT_TOKENS = 16, 512  # new tokens if a request gives no number
Json = dict[str, Any]


async def get_service(request: Request) -> Service:
    """The service of the app."""
    service: Service = request.app.state.service
    return service


async def get_owner(request: Request) -> str:
    """The user who made the request; the guard finds the user by the API key."""
    owner: str = request.scope["owner"]
    return owner


Served = Annotated[Service, Depends(get_service)]
Owner = Annotated[str, Depends(get_owner)]


@router.post("/v1/completions")
async def completions(body: CompletionRequest, service: Served, owner: Owner) -> Response:
    """Continue one or more texts."""
    _check_model(service, body.model)
    session, before = await asyncio.to_thread(_find_text, service, owner, body.session)
    prompts = await asyncio.to_thread(_prompts, service, body, before)
    if session is not None and len(prompts) * (body.n or 1) > 1:
        raise ApiError(400, "session: a session continues one text; give one prompt, and n = 1", "session")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 given, but without echo it should be at least 1", "max_tokens")
    ask = _ask(
        body, "completion", owner, prompts, session, COMPLETION_TOKENS,
        num_logprobs=body.logprobs, prompt_logprobs=bool(body.echo) and body.logprobs is not None,
    )  # fmt: skip
    answered = [prompt for prompt in prompts for _ in ask.settings]
    is_first_unknown = ask.prompt_logprobs and not (before and before.unread_ids)
    form = CompletionForm(
        service, include_usage=_include_usage(body), has_logprobs=body.logprobs is not None,
        echoes=[prompt.text if body.echo else "" for prompt in answered],
        first_ids=[
            p.token_ids[0] if is_first_unknown and p.token_ids and not p.has_start else None for p in answered
        ],
    )  # fmt: skip
    return Answer(await service.begin(ask), form)


def _prompts(service: Service, body: CompletionRequest, before: Turn | None) -> list[Prompt]:
    """The prompts of a request. A string that begins a text gets a start token; a list of tokens does not."""
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if given and isinstance(given[0], int):
        given = [given]
    if not given:
        raise ApiError(400, "prompt: an empty list given, but it should have an entry", "prompt")
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            codec, is_start = service.codec, before is None
            token_ids = codec.encode(prompt, is_start=True) if is_start else codec.encode_more(prompt)
            prompts.append(Prompt(prompt, token_ids, before, has_start=is_start))
        else:
            prompts.append(Prompt(service.text(prompt, "prompt"), prompt, before))
    return prompts


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, service: Served, owner: Owner) -> Response:
    """Answer the messages of a conversation."""
    _check_model(service, body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: given without logprobs; set logprobs to true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens: given together with max_completion_tokens; give one of them", "max_tokens")
    session, before = await asyncio.to_thread(_find_text, service, owner, body.session)
    if session is not None and (body.n or 1) > 1:
        raise ApiError(400, f"n: {body.n} given, but a session gets one answer; give 1", "n")
    messages = [message.plain() for message in body.messages]
    prompt = await asyncio.to_thread(service.chat_prompt, messages, before)
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if getattr(body, limit_name) == 0:
        raise ApiError(400, f"{limit_name}: 0 given, but it should be at least 1", limit_name)
    ask = _ask(
        body, "chat", owner, [prompt], session, CHAT_TOKENS, limit_name=limit_name,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None, stops=service.layout.stops,
    )  # fmt: skip
    form = ChatForm(service, include_usage=_include_usage(body), has_logprobs=bool(body.logprobs))
    return Answer(await service.begin(ask), form)


@router.get("/v1/models")
async def models(service: Served) -> Response:
    """List the models; the list always has exactly one model."""
    return JsonResponse({"object": "list", "data": [_model(service)]})


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Served) -> Response:
    """Describe the model with this name."""
    _check_model(service, name)
    return JsonResponse(_model(service))


@router.post("/tokenize")
def tokenize(body: TokenizeRequest, service: Served) -> Response:
    """Convert text to tokens, without a start token."""
    _check_model(service, body.model)
    tokens = service.codec.encode(body.prompt)
    return JsonResponse({"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.longest_text})


@router.post("/detokenize")
def detokenize(body: DetokenizeRequest, service: Served) -> Response:
    """Convert tokens to text."""
    _check_model(service, body.model)
    return JsonResponse({"prompt": service.text(body.tokens, "tokens")})


@router.get("/health")
@router.head("/health")
async def health() -> Response:
    """Answer that the server runs."""
    return JsonResponse({"status": "ok"})


@router.get("/metrics")
async def metrics(service: Served) -> Response:
    """Return metrics for Prometheus."""
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _check_model(service: Service, name: str | None) -> None:
    """Refuse a request that names another model."""
    if name is not None and name != service.name:
        raise ApiError(404, f"model: {name!r:.80} given, but this server has {service.name!r}", "model", NOT_FOUND)


def find_session(service: Service, owner: str, session_id: str) -> Session:
    """Return a session of this owner; fails if it does not exist."""
    session = service.sessions.get(owner, session_id)
    if session is None:
        raise ApiError(404, f"session: there is no session {session_id!r:.60}", "session", NOT_FOUND)
    return session


def _find_text(service: Service, owner: str, session_id: str | None) -> tuple[Session | None, Turn | None]:
    """Return the session that a request continues, and the session's last turn; each may be None."""
    if session_id is None:
        return None, None
    session = find_session(service, owner, session_id)
    before = service.turns.peek(owner, session.turns[-1]) if session.turns else None
    if session.turns and before is None:
        raise ApiError(404, "session: the last turn is no longer kept; give another session", "session", NOT_FOUND)
    return session, before


def _model(service: Service) -> Json:
    longest = service.engine.longest_text
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "multilin",
            "max_model_len": longest}  # fmt: skip


def _include_usage(body: TextRequest) -> bool:
    options = body.stream_options
    if options is not None and options.include_usage is not False and not body.stream:
        raise ApiError(400, "stream_options: given without stream; leave it out", "stream_options")
    return options is not None and bool(options.include_usage)


def _ask(
    body: TextRequest, kind: str, owner: str, prompts: list[Prompt], session: Session | None, default_tokens: int, *,
    limit_name: str = "max_tokens", num_logprobs: int | None, prompt_logprobs: bool = False,
    stops: tuple[str, ...] = (),
) -> Ask:  # fmt: skip
    if session is not None and body.store is False:
        raise ApiError(400, "store: false given, but a session keeps its turns; leave it out", "store")
    settings = [body.settings(stops, index) for index in range(body.n or 1)]
    return Ask(
        kind, owner, prompts, settings, getattr(body, limit_name), default_tokens, limit_name,
        num_logprobs=num_logprobs, prompt_logprobs=prompt_logprobs, store=body.store is not False, session=session,
        is_streamed=bool(body.stream),
    )  # fmt: skip
