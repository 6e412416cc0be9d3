"""Errors in the shape that OpenAI's clients read, whatever went wrong."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from redknot.engine.client import EngineGone, RequestRefused
from redknot.errors import InputError
from redknot.server.logs import Trace, logger, stack_of

RETRY_SECONDS = 1
CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    499: "client_left",
    500: "internal_error",
    503: "service_unavailable",
}
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(HTTPException):
    """A request is refused; everything that a client is told about it."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message)
        self.param, self.code = param, code or CODES.get(status, "invalid_value")

    def body(self) -> dict[str, Any]:
        """What stands in the answer, or in an event of a stream."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        error = {
            "message": self.detail,
            "type": TYPES.get(self.status_code, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = dict(self.headers or {})
        if self.status_code in (429, 503):
            headers["Retry-After"] = str(RETRY_SECONDS)
        if self.status_code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status_code in (408, 413):
            headers["Connection"] = "close"  # the rest of the body is not read
        return JSONResponse(self.body(), self.status_code, headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about ``error``."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused):
        refusal = error.refusal
        return ApiError(refusal.status, refusal.message, param=refusal.param, code=refusal.code)
    if isinstance(error, EngineGone):
        return ApiError(503, "the engine has ended", code="engine_gone")
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors(), error.body)
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    if isinstance(error, HTTPException):
        found = ApiError(error.status_code, str(error.detail))
        found.headers = error.headers
        return found
    return ApiError(500, "internal error; the server's log says more")


def owned(error: Exception, trace: Trace) -> ApiError:
    """What a client is told about ``error``; one that is our own fault is logged, here alone."""
    found = as_api_error(error)
    if found.code == "internal_error":
        fields = {"request_id": trace.request_id, "path": trace.path, "error": stack_of(error)}
        logger.error("internal error", extra={"fields": fields})
    return found


def install(app: FastAPI) -> None:
    """Let errors of ``app`` leave in this shape; those that nobody foresaw are the guard's."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return owned(error, request.state.trace).response()

    kinds = (HTTPException, RequestValidationError, RequestRefused, EngineGone, InputError)
    for kind in kinds:
        app.add_exception_handler(kind, answer)


def _invalid(errors: Sequence[Any], body: Any) -> ApiError:
    """The most precise complaint about a body, with the place in it."""
    if not isinstance(body, dict):
        return ApiError(400, "the body must be a JSON object", code="invalid_json")
    first = max(errors, key=_precision)
    missing = first["type"] == "missing"
    param = _place(first["loc"], body, missing)
    context = first.get("ctx", {})
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {param!r}", param=param, code="unknown_parameter")
    if first["type"] == "union_tag_invalid":
        message = f"{context['tag']!r} is not supported (supported: {context['expected_tags']})"
    else:
        message = first["msg"][:1].lower() + first["msg"][1:]
    code = "missing_required_parameter" if missing else "invalid_value"
    return ApiError(400, f"{param or 'body'}: {message}", param=param, code=code)


def _precision(error: Any) -> tuple[bool, int]:
    """Of the alternatives of a union: who took the value's type, then who came furthest into it."""
    return not error["type"].endswith("_type"), len(error["loc"])


def _place(loc: tuple[str | int, ...], body: Any, missing: bool) -> str | None:
    """The path to what is wrong; names of alternatives of a union are no part of it."""
    place, value = "", body
    for depth, part in enumerate(loc[1:]):
        last = missing and depth == len(loc) - 2
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            place, value = f"{place}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or last):
            place, value = f"{place}.{part}", value.get(str(part))
    return place.lstrip(".") or None
