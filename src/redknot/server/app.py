"""The app: routes, errors and the guard around one service."""

from fastapi import FastAPI

from redknot.server import admin, chat, completions, docs, errors, segments
from redknot.server.auth import Keyring
from redknot.server.guard import Guard
from redknot.server.service import Service
from redknot.version import __version__


def build_app(service: Service) -> FastAPI:
    """An ASGI app over ``service``; who builds it closes both."""
    app = FastAPI(
        title="RedKnot",
        version=__version__,
        description="OpenAI-compatible answers over documents whose state is reused.",
        redirect_slashes=False,
        docs_url=None,  # FastAPI's page takes its viewer from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    for router in (admin, docs, chat, completions, segments):
        app.include_router(router.router)
    app.include_router(segments.strict)
    errors.install(app)
    app.add_middleware(
        Guard,
        keyring=Keyring(service.settings.api_key),
        max_concurrent=service.settings.max_concurrent,
    )
    return app
