"""The endpoints of sessions: list, make, look at, fork, rewind, export, import and delete."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ValidationError
from starlette.responses import Response

from multilin.serving.api.requests import RewindRequest, SessionRequest
from multilin.serving.api.routes import Owner, Served, find_turn
from multilin.serving.api.streams import JsonResponse
from multilin.serving.errors import NOT_FOUND, ApiError, from_validation
from multilin.serving.readings import Readings
from multilin.serving.service import Service
from multilin.serving.sessions import Session

router = APIRouter()
STATE = "application/octet-stream"
Json = dict[str, Any]


@router.get("/v1/sessions")
async def list_sessions(service: Served, owner: Owner) -> Response:
    """All sessions, the last changed first."""
    sessions = await asyncio.to_thread(service.sessions.all, owner)
    return JsonResponse({"object": "list", "data": [_summary(session) for session in sessions]})


@router.post("/v1/sessions")
async def create_session(request: Request, service: Served, owner: Owner) -> Response:
    """A new session: empty, from a turn, or from a state file as the body."""
    content = await request.body()
    if request.headers.get("content-type", "").partition(";")[0] == STATE:
        turn = await asyncio.to_thread(service.import_state, owner, content)
        return await _created(service, owner, [turn.id])
    try:
        body = SessionRequest.model_validate_json(content or b"{}")
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None
    turns = [] if body.turn is None else [(await find_turn(service, owner, body.turn, "turn")).id]
    return await _created(service, owner, turns)


@router.get("/v1/sessions/{session_id}")
async def get_session(session_id: str, service: Served, owner: Owner) -> Response:
    """A session with all its turns."""
    session = await _session(service, owner, session_id)
    return JsonResponse(await asyncio.to_thread(_details, service, session))


@router.post("/v1/sessions/{session_id}/fork")
async def fork_session(session_id: str, service: Served, owner: Owner, body: SessionRequest | None = None) -> Response:
    """A new session with the turns of another one, up to one of them or all."""
    session, turns = await _session(service, owner, session_id), None
    if body is not None and body.turn is not None:
        if body.turn not in session.turns:
            raise ApiError(404, f"turn: the session has no turn {body.turn!r:.60}", "turn", NOT_FOUND)
        turns = session.turns[: session.turns.index(body.turn) + 1]
    return await _created(service, owner, list(session.turns) if turns is None else turns)


@router.post("/v1/sessions/{session_id}/rewind")
async def rewind_session(session_id: str, body: RewindRequest, service: Served, owner: Owner) -> Response:
    """Go back by so many turns."""
    session = await _session(service, owner, session_id)
    if session_id in service.busy:
        raise ApiError(409, f"session: another request continues {session_id}", "session", "session_busy")
    if body.turns > len(session.turns):
        raise ApiError(400, f"turns: {body.turns} given, but the session has {len(session.turns)}", "turns")
    session.turns = session.turns[: -body.turns]
    await asyncio.to_thread(service.sessions.save, session)
    return JsonResponse(_summary(session))


@router.get("/v1/sessions/{session_id}/state")
async def export_state(session_id: str, service: Served, owner: Owner, turn: str | None = None) -> Response:
    """The state file of a session's last turn, or of another one."""
    wanted = _turn(await _session(service, owner, session_id), turn)
    kept = await asyncio.to_thread(service.turns.get, owner, wanted)
    if kept is None:
        raise ApiError(404, f"turn: {wanted} is no longer kept", "turn", NOT_FOUND)
    headers = {"content-disposition": f'attachment; filename="{wanted}.safetensors"'}
    return Response(kept[1], media_type=STATE, headers=headers)


def get_readings(request: Request) -> Readings:
    """The readings of the app."""
    readings: Readings = request.app.state.readings
    return readings


@router.get("/v1/sessions/{session_id}/reading")
async def get_reading(
    session_id: str, service: Served, owner: Owner, readings: Annotated[Readings, Depends(get_readings)],
    turn: str | None = None, step: Annotated[int, Query(ge=0, lt=2**31)] = 0,
) -> Response:  # fmt: skip
    """What each token of the text up to a session's last turn, or another one, has read."""
    wanted = _turn(await _session(service, owner, session_id), turn)
    content = await readings.get(await find_turn(service, owner, wanted, "turn"), step)
    return await asyncio.to_thread(JsonResponse, content)


@router.post("/v1/sessions/{session_id}/stop")
async def stop_session(session_id: str, service: Served, owner: Owner) -> Response:
    """End what is generated for a session where it is; the turn is kept, unlike that of a client which leaves."""
    await _session(service, owner, session_id)
    generation = service.busy.get(session_id)
    if generation is not None:
        generation.finish()
    return JsonResponse({"id": session_id, "object": "session", "stopped": generation is not None})


@router.delete("/v1/sessions/{session_id}")
async def delete_session(session_id: str, service: Served, owner: Owner) -> Response:
    """Delete a session, and its turns where no other session has them."""
    session = await _session(service, owner, session_id)
    if session_id in service.busy:
        raise ApiError(409, f"session: another request continues {session_id}", "session", "session_busy")
    await asyncio.to_thread(_delete, service, session)
    return JsonResponse({"id": session_id, "object": "session", "deleted": True})


def _delete(service: Service, session: Session) -> None:
    service.sessions.remove(session)
    others = {turn for other in service.sessions.all(session.owner) for turn in other.turns}
    for turn in set(session.turns) - others:
        service.turns.remove(session.owner, turn)


async def _session(service: Service, owner: str, session_id: str) -> Session:
    session = await asyncio.to_thread(service.sessions.get, owner, session_id)
    if session is None:
        raise ApiError(404, f"session: there is no session {session_id!r:.60}", "session", NOT_FOUND)
    return session


def _turn(session: Session, turn: str | None) -> str:
    """The id of a turn of a session, the last one where none is asked for."""
    wanted = turn or (session.turns[-1] if session.turns else None)
    if wanted is None or wanted not in session.turns:
        raise ApiError(404, f"turn: the session has no turn {wanted!r:.60}", "turn", NOT_FOUND)
    return wanted


async def _created(service: Service, owner: str, turns: list[str]) -> Response:
    session = await asyncio.to_thread(service.sessions.create, owner, turns)
    return JsonResponse(await asyncio.to_thread(_details, service, session))


def _summary(session: Session) -> Json:
    return {
        "id": session.id, "object": "session", "created": session.created, "changed": session.changed,
        "num_turns": len(session.turns), "turn": session.turns[-1] if session.turns else None,
    }  # fmt: skip


def _details(service: Service, session: Session) -> Json:
    turns = []
    for turn_id in session.turns:
        entry, turn = service.turns.entry(session.owner, turn_id), service.turns.peek(session.owner, turn_id)
        if entry is None or turn is None:  # too old, or too much: what was kept of it is deleted
            turns.append({"id": turn_id, "kept": False})
            continue
        turns.append({
            "id": turn.id, "kept": True, "parent": turn.parent, "created": turn.created, "kind": turn.kind,
            "prompt": turn.prompt, "text": turn.text, "tokens": turn.num_tokens, "state_bytes": entry.state_size,
        })  # fmt: skip
    return _summary(session) | {"turns": turns}
