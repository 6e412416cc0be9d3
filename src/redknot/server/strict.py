"""Reading a body: bounded, in time, and strictly JSON."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from redknot.server.errors import ApiError
from redknot.server.settings import ServerSettings

MAX_DEPTH = 64  # of nested arrays and objects


class StrictRequest(Request):
    """A request whose JSON body is read by this module."""

    async def body(self) -> bytes:
        """The body, if it is JSON and not too large."""
        if self.method == "POST":
            check_type(self, "application/json")
        if not hasattr(self, "_body"):
            self._body = await read_body(self)
        return self._body

    async def json(self) -> Any:
        """The parsed body."""
        return parse_json(await self.body())


class StrictRoute(APIRoute):
    """A route with a JSON body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's, over a `StrictRequest`."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


def check_type(request: Request, *allowed: str) -> None:
    """Refuse any other content type."""
    header = Message()
    header["content-type"] = request.headers.get("content-type", "none/none")
    if header.get_content_type() not in allowed:
        raise ApiError(415, f"the content type must be {' or '.join(allowed)}")


async def read_body(request: Request) -> bytes:
    """The whole body; 413 as soon as it is known to be too large."""
    settings: ServerSettings = request.app.state.service.settings
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError as error:
        raise ApiError(408, "the body took too long") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client left before its body was complete") from error
    return b"".join(parts)


def parse_json(data: bytes) -> Any:
    """What ``data`` says in strict JSON: no NaN, no key twice, no lone surrogate, little depth."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            parse_constant=_not_finite,
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except UnicodeDecodeError as error:
        raise _broken("it is not UTF-8") from error
    except RecursionError as error:
        raise _broken("it is nested too deeply") from error
    except ValueError as error:
        raise _broken(str(error).replace("\n", " ")) from error
    _check(value)
    return value


def _check(value: Any) -> None:
    """Walk all of ``value``, level by level."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _broken("it is nested too deeply")
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, dict):
                for key in item:
                    _check_text(key)
                below += item.values()
            elif isinstance(item, list):
                below += item
        level = below


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _broken("a string holds half of a surrogate pair") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:64]!r} stands twice")
        found[key] = value
    return found


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        _not_finite(text)
    return number


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text[:32]} is no finite number")


def _broken(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes")
