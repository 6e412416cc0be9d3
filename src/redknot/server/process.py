"""The server's process: bind, start the engine, serve, drain, end."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable

import uvicorn
from transformers import PreTrainedTokenizerBase

from redknot.engine.client import EngineClient
from redknot.engine.config import EngineConfig
from redknot.errors import InputError
from redknot.server.app import build_app
from redknot.server.rendering import Renderer
from redknot.server.service import Service
from redknot.server.settings import ServerSettings

logger = logging.getLogger("redknot.server")


async def serve(
    config: EngineConfig,
    settings: ServerSettings,
    tokenizer: PreTrainedTokenizerBase,
    announce: Callable[[Service, str], None],
) -> bool:
    """Serve until told to stop; False if the engine ended by itself.

    ``announce`` is called with the address once requests are taken. `InputError` if the address
    is not free, `EngineGone` if the engine does not start.
    """
    listener = _bind(settings.host, settings.port)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn hands its own back to these
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.create_task(EngineClient.start(config))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        listener.close()
        return True
    stopping.cancel()
    client = starting.result()
    service = Service(client, Renderer(tokenizer), tokenizer, settings)
    server = _Server(service, settings, lambda: announce(service, _address(listener)))
    watch = asyncio.create_task(server.stop_when_gone())
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        service.close()
        ended = client.gone.is_set()
        await client.close(settings.drain_seconds)
    if ended:
        logger.error("the engine has ended by itself")
    return not ended


class _Server(uvicorn.Server):
    """Says when it is ready, and stops with its engine."""

    def __init__(
        self, service: Service, settings: ServerSettings, announce: Callable[[], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(service),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
            )
        )
        self._service, self._announce = service, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, then say so."""
        await super().startup(sockets)
        self._announce()

    async def stop_when_gone(self) -> None:
        """Without an engine there is nothing to serve."""
        await self._service.client.gone.wait()
        self.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """Take the address before anything slow is done; it does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
