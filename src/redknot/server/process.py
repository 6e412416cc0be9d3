"""The server's process: bind, start the engine, serve, drain, end."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

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


class Stop:
    """What signals ask for: the first that requests end and nothing new is taken, the next that
    all ends at once."""

    def __init__(self) -> None:
        self.wanted, self.at_once = asyncio.Event(), asyncio.Event()

    def signal(self) -> None:
        """One more signal."""
        (self.at_once if self.wanted.is_set() else self.wanted).set()


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
    stop, loop = Stop(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.signal)
    with closing(_bind(settings.host, settings.port)) as listener:
        client = await _started(config, stop)
        if client is None:
            return True
        service = Service(client, Renderer(tokenizer), tokenizer, settings)
        server = _Server(service, lambda: announce(service, _address(listener)))
        watch = asyncio.create_task(server.stop_when_told(stop))
        try:
            await server.serve(sockets=[listener])
        finally:
            service.close()
            ended = client.gone.is_set() and not stop.wanted.is_set()
            await client.close(settings.drain_seconds)
            watch.cancel()
    if ended:
        logger.error("the engine has ended by itself")
    return not ended


async def _started(config: EngineConfig, stop: Stop) -> EngineClient | None:
    """The engine, unless the server is told to stop before it is there."""
    starting = asyncio.create_task(EngineClient.start(config))
    stopping = asyncio.create_task(stop.wanted.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.wait({starting})  # its process ends with it
    return None


class _Server(uvicorn.Server):
    """Says when it is ready, and stops with its engine or when told to."""

    def __init__(self, service: Service, announce: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(service),
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=max(1, round(service.settings.drain_seconds)),
            )
        )
        self._service, self._announce = service, announce

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: the process has handlers of its own, from before the start to the very end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, then say so."""
        await super().startup(sockets)
        self._announce()

    async def stop_when_told(self, stop: Stop) -> None:
        """Without an engine there is nothing to serve."""
        reasons = [
            asyncio.create_task(one.wait()) for one in (self._service.client.gone, stop.wanted)
        ]
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        for reason in reasons:
            reason.cancel()
        self.should_exit = True
        await stop.at_once.wait()
        self.force_exit = True
        self._service.client.kill()


def _bind(host: str, port: int) -> socket.socket:
    """Take the address before anything slow is done; it does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:  # a name that is no host name is the latter
        why = getattr(error, "strerror", None) or error
        raise InputError(f"cannot listen on {host}:{port}: {why}") from error
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
