"""What every request passes first: its id, its tenant, a bound on how many there are, its log."""

import re

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redknot.engine.client import new_request_id
from redknot.server.auth import Keyring, Tenant
from redknot.server.errors import ApiError, owned
from redknot.server.logs import Trace

OPEN_PATHS = ("/", "/health")
CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, *, keyring: Keyring, max_concurrent: int) -> None:
        self._app, self._keyring = app, keyring
        self._most, self._in_work = max_concurrent, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        trace = Trace(new_request_id(), scope["method"], scope["path"])
        send = _marked(send, trace, _echoed(request) or trace.request_id)
        tenant = self._tenant(request)
        scope.setdefault("state", {})
        scope["state"].update(trace=trace, tenant=tenant)
        trace.tenant = "-" if tenant is None else tenant.digest
        try:
            await self._answer(tenant, scope, receive, send)
        except Exception as error:  # noqa: BLE001 - beyond here nobody names the request
            found = owned(error, trace)
            if not trace.status:  # else the answer is cut off: uvicorn closes its connection
                await found.response()(scope, receive, send)
        finally:
            if scope["path"] not in ("/live", "/health", "/metrics"):  # polled
                trace.write()

    async def _answer(
        self, tenant: Tenant | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if tenant is None:
            await self._refuse(ApiError(401, "no valid API key given"), scope, receive, send)
        elif not _is_work(scope):
            await self._app(scope, receive, send)
        elif self._in_work >= self._most:
            full = ApiError(429, f"{self._most} requests are in work; try again later")
            await self._refuse(full, scope, receive, send)
        else:
            await self._work(scope, receive, send)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._in_work += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_work -= 1

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        await error.response()(scope, receive, send)

    def _tenant(self, request: Request) -> Tenant | None:
        tenant = self._keyring.tenant(request.headers.get("authorization", ""))
        if tenant is None and request.scope["path"] in OPEN_PATHS:  # the URL is the client's word
            return Tenant()
        return tenant


def _is_work(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"].startswith("/v1/")


def _echoed(request: Request) -> str | None:
    """The client's own id, if it is harmless."""
    given = request.headers.get("x-request-id", "")
    return given if CLIENT_ID.fullmatch(given) else None


def _marked(send: Send, trace: Trace, request_id: str) -> Send:
    """``send`` that notes the status and names the request."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            trace.status = message["status"]
            headers = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            message = {**message, "headers": headers}
        await send(message)

    return marked
