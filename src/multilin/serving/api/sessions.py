"""The endpoints of sessions: list, create, show, fork, rewind, export, import and delete."""

import asyncio
import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.responses import Response

from multilin.errors import InputError
from multilin.serving.api.requests import RewindRequest, SessionRequest
from multilin.serving.api.routes import Owner, Served, find_session
from multilin.serving.api.streams import JsonResponse
from multilin.serving.errors import NOT_FOUND, ApiError, from_validation
from multilin.serving.service import Service
from multilin.serving.sessions import Session
from multilin.serving.turns import Turn

router = APIRouter()
STATE = "application/octet-stream"
Json = dict[str, Any]


@router.get("/v1/sessions")
def list_sessions(service: Served, owner: Owner) -> Response:
    """List all sessions, the most recently changed first."""
    return JsonResponse({"object": "list", "data": [_summary(session) for session in service.sessions.all(owner)]})


@router.post("/v1/sessions")
async def create_session(request: Request, service: Served, owner: Owner) -> Response:
    """Create a session: empty, from a turn, or from a state file that is the body of the request."""
    content = await request.body()
    if request.headers.get("content-type", "").partition(";")[0] == STATE:
        turn = await asyncio.to_thread(service.import_state, owner, content)
        return await asyncio.to_thread(_created, service, owner, turn.id)
    try:
        body = SessionRequest.model_validate_json(content or b"{}")
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None
    return await asyncio.to_thread(_created, service, owner, body.turn)


@router.get("/v1/sessions/{session_id}")
def get_session(session_id: str, service: Served, owner: Owner) -> Response:
    """Show a session with all its turns."""
    return JsonResponse(_details(service, find_session(service, owner, session_id)))


@router.post("/v1/sessions/{session_id}/fork")
def fork_session(session_id: str, service: Served, owner: Owner, body: SessionRequest | None = None) -> Response:
    """Copy a session into a new one, with its turns up to a given turn, or with all turns."""
    with service.sessions.sharing:
        session = find_session(service, owner, session_id)
        num_turns = len(session.turns)
        if body is not None and body.turn is not None:
            num_turns = session.turns.index(_check_turn(session, body.turn)) + 1
        fork = service.sessions.create(owner, session.turns[:num_turns])
    return JsonResponse(_details(service, fork))


@router.post("/v1/sessions/{session_id}/rewind")
def rewind_session(session_id: str, body: RewindRequest, service: Served, owner: Owner) -> Response:
    """Remove the last turns from a session."""
    session = find_session(service, owner, session_id)
    if body.turns > len(session.turns):
        raise ApiError(400, f"turns: {body.turns} given, but the session has {len(session.turns)}", "turns")
    with service.changing(session):
        session.turns = session.turns[: -body.turns]
        service.sessions.save(session)
    return JsonResponse(_summary(session))


@router.get("/v1/sessions/{session_id}/state")
def export_state(session_id: str, service: Served, owner: Owner, turn: str | None = None) -> Response:
    """Export the state after a turn of a session, by default the last turn, as a state file."""
    wanted = _check_turn(find_session(service, owner, session_id), turn)
    kept = service.turns.get(owner, wanted)
    if kept is None:
        raise ApiError(404, f"turn: {wanted} is no longer kept", "turn", NOT_FOUND)
    headers = {"content-disposition": f'attachment; filename="{wanted}.safetensors"'}
    return Response(kept[1], media_type=STATE, headers=headers)


@router.get("/v1/sessions/{session_id}/reading")
def get_reading(
    session_id: str, request: Request, service: Served, owner: Owner, turn: str | None = None,
    step: Annotated[int, Query(ge=0, lt=2**31)] = 0,
) -> Response:  # fmt: skip
    """Show the weights with which tokens read earlier tokens, in the text up to a turn (by default the last turn)."""
    wanted = _check_turn(find_session(service, owner, session_id), turn)
    return JsonResponse(request.app.state.readings.get(_find_turn(service, owner, wanted), step))


@router.post("/v1/sessions/{session_id}/stop")
def stop_session(session_id: str, service: Served, owner: Owner) -> Response:
    """End a session's present answer early, but keep its turn (a turn is not kept if its client disconnects)."""
    find_session(service, owner, session_id)
    generation = service.busy.get(session_id)
    if generation is not None:
        generation.finish()
    return JsonResponse({"id": session_id, "object": "session", "stopped": generation is not None})


@router.delete("/v1/sessions/{session_id}")
def delete_session(session_id: str, service: Served, owner: Owner) -> Response:
    """Delete a session, and all of its turns that belong to no other session."""
    session = find_session(service, owner, session_id)
    with service.changing(session):
        service.sessions.remove(session)
    with service.sessions.sharing:
        others = {turn for other in service.sessions.all(owner) for turn in other.turns}
        for turn_id in set(session.turns) - others:
            service.turns.remove(owner, turn_id)
    return JsonResponse({"id": session_id, "object": "session", "deleted": True})


def _check_turn(session: Session, turn: str | None) -> str:
    """Return the id of a turn of the session, by default the last; fails if the session does not have it."""
    wanted = turn or (session.turns[-1] if session.turns else None)
    if wanted is None:
        raise ApiError(404, "turn: the session has no turn yet", "turn", NOT_FOUND)
    if wanted not in session.turns:
        raise ApiError(404, f"turn: the session has no turn {wanted!r:.60}", "turn", NOT_FOUND)
    return wanted


def _find_turn(service: Service, owner: str, turn_id: str) -> Turn:
    """Return a turn of this owner; fails if it does not exist."""
    turn = service.turns.peek(owner, turn_id)
    if turn is None:
        raise ApiError(404, f"turn: there is no turn {turn_id!r:.60}", "turn", NOT_FOUND)
    return turn


def _created(service: Service, owner: str, turn: str | None) -> Response:
    if turn is None:
        session = service.sessions.create(owner, [])
    else:
        with service.sessions.sharing:
            session = service.sessions.create(owner, [_find_turn(service, owner, turn).id])
    return JsonResponse(_details(service, session))


def _summary(session: Session) -> Json:
    return {
        "id": session.id, "object": "session", "created": session.created, "changed": session.changed,
        "num_turns": len(session.turns), "turn": session.turns[-1] if session.turns else None,
    }  # fmt: skip


def _details(service: Service, session: Session) -> Json:
    turns = []
    for turn_id in session.turns:
        entry, turn = service.turns.entry(session.owner, turn_id), None
        with contextlib.suppress(InputError):  # its files are damaged
            turn = service.turns.peek(session.owner, turn_id)
        if entry is None or turn is None:  # also if it was deleted because of its age or the store's size
            turns.append({"id": turn_id, "kept": False})
            continue
        turns.append({
            "id": turn.id, "kept": True, "parent": turn.parent, "created": turn.created, "kind": turn.kind,
            "prompt": turn.prompt, "text": turn.text, "tokens": turn.num_tokens, "state_bytes": entry.state_size,
        })  # fmt: skip
    return _summary(session) | {"turns": turns}
