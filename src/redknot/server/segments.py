"""/v1/segments: texts whose state is built before anybody asks about them."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from redknot.engine.client import RequestRefused, new_request_id
from redknot.engine.messages import SegmentAdd, SegmentDelete, SegmentInfo, SegmentQuery
from redknot.errors import InputError
from redknot.server.answer import unless_left
from redknot.server.errors import ApiError, as_api_error
from redknot.server.registry import Registered, segment_id
from redknot.server.schema.segments import SegmentRequest, SegmentText
from redknot.server.service import Service
from redknot.server.strict import StrictRoute, check_type, parse_json, read_body

LINE_TYPES = ("application/x-ndjson", "application/jsonl", "application/json-lines")
STATES = ("absent", "building", "ready")
router = APIRouter(tags=["segments"])
strict = APIRouter(route_class=StrictRoute, tags=["segments"])


@strict.post("/v1/segments", response_model=None)
async def register_segments(request: Request, body: Annotated[SegmentRequest, Body()]) -> Response:
    """Register one text, or many, and build their state."""
    if (body.text is None) == (body.documents is None):
        raise ApiError(400, "a body has either text or documents", param="text")
    if body.documents is None:
        text = SegmentText(text=body.text or "", title=body.title)
        return JSONResponse(await unless_left(request, _register(request, text)))
    if body.title:
        raise ApiError(400, "each of the documents has its own title", param="title")
    made = await unless_left(request, _register_all(request, body.documents))
    return JSONResponse({"object": "list", "data": made})


@router.post(
    "/v1/segments/batch",
    response_model=None,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {LINE_TYPES[0]: {"schema": {"type": "string"}}},
        }
    },
)
async def register_batch(request: Request) -> Response:
    """Register the texts of a JSON-lines file; each line is answered by itself."""
    check_type(request, *LINE_TYPES)
    data = await read_body(request)
    lines = [line for line in data.splitlines() if line.strip()]
    if not lines:
        raise ApiError(400, "the body holds no lines", code="invalid_json")
    made = await unless_left(request, _register_lines(request, lines))
    failed = sum("error" in one for one in made)
    return JSONResponse({"object": "list", "data": made, "failed": failed})


@router.get("/v1/segments", response_model=None)
async def list_segments(request: Request) -> Response:
    """All that this tenant has registered."""
    service: Service = request.app.state.service
    salt = request.state.tenant.salt
    entries = service.registry.of_tenant(salt)
    states = await _states(service, salt, entries)
    data = [_shown(entry, states) for entry in entries]
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/segments/{segment}", response_model=None)
async def get_segment(request: Request, segment: str) -> Response:
    """One registered text and the state of its state."""
    service: Service = request.app.state.service
    entry = _known(request, segment)
    states = await _states(service, request.state.tenant.salt, [entry])
    return JSONResponse(_shown(entry, states))


@router.delete("/v1/segments/{segment}", response_model=None)
async def delete_segment(request: Request, segment: str) -> Response:
    """Forget a text and its state."""
    service: Service = request.app.state.service
    entry, salt = _known(request, segment), request.state.tenant.salt
    service.registry.remove(salt, entry.id)
    used = {key for one in service.registry.of_tenant(salt) for key in one.keys}
    for key in set(entry.keys) - used:
        try:
            await service.client.segments(
                SegmentDelete(request_id=new_request_id(), salt=salt, key=key)
            )
        except RequestRefused as error:
            if error.refusal.status != 404:  # evicted before
                raise
    return JSONResponse({"id": entry.id, "object": "segment", "deleted": True})


async def _register(request: Request, text: SegmentText) -> dict[str, Any]:
    service: Service = request.app.state.service
    salt = request.state.tenant.salt
    infos = []
    for token_ids in await service.off_loop(service.renderer.forms, text.text, text.title):
        ids = token_ids.tolist()
        answer = await service.client.segments(
            SegmentAdd(request_id=new_request_id(), salt=salt, token_ids=ids, title=text.title)
        )
        infos.append(answer.segments[0])
    entry = Registered(
        id=segment_id(salt, text.text, text.title),
        text=text.text,
        title=text.title,
        keys=tuple(info.key for info in infos),
        num_tokens=infos[0].num_tokens,
    )
    service.registry.add(salt, entry)
    return _shown(entry, {info.key: info for info in infos})


async def _register_all(request: Request, texts: list[SegmentText]) -> list[dict[str, Any]]:
    return [await _register(request, text) for text in texts]


async def _register_lines(request: Request, lines: list[bytes]) -> list[dict[str, Any]]:
    made = []
    for number, line in enumerate(lines, 1):
        try:
            made.append(await _register(request, _line(line, number)))
        except (ApiError, RequestRefused, InputError) as error:
            made.append({"line": number, **as_api_error(error).body()})
    return made


def _line(line: bytes, number: int) -> SegmentText:
    try:
        return SegmentText.model_validate(parse_json(line))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"line {number}: {place or 'line'}: {first['msg']}") from error


async def _states(service: Service, salt: str, entries: list[Registered]) -> dict[str, SegmentInfo]:
    if not entries:
        return {}
    keys = tuple(dict.fromkeys(key for entry in entries for key in entry.keys))
    answer = await service.client.segments(
        SegmentQuery(request_id=new_request_id(), salt=salt, keys=keys)
    )
    return {info.key: info for info in answer.segments}


def _known(request: Request, segment: str) -> Registered:
    service: Service = request.app.state.service
    entry = service.registry.get(request.state.tenant.salt, segment)
    if entry is None:
        raise ApiError(404, "no such segment is registered", param="id", code="segment_not_found")
    return entry


def _shown(entry: Registered, states: dict[str, SegmentInfo]) -> dict[str, Any]:
    found = [states[key] for key in entry.keys if key in states]
    worst = min(found, key=lambda info: STATES.index(info.state), default=None)
    if len(found) < len(entry.keys):
        worst = None
    return {
        "id": entry.id,
        "object": "segment",
        "created": entry.created,
        "title": entry.title,
        "tokens": entry.num_tokens,
        "bytes": sum(info.num_bytes for info in found),
        "state": "absent" if worst is None else worst.state,
        "tier": "none" if worst is None else worst.tier,
    }
