"""The server's end of the engine: starts its process, sends requests, hands out what comes back."""

import asyncio
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from redknot.engine.config import EngineConfig
from redknot.engine.messages import (
    Cancel,
    Ended,
    Failed,
    FromEngine,
    Heartbeat,
    Output,
    Prefilled,
    Produced,
    Ready,
    Refused,
    SegmentAdd,
    SegmentDelete,
    SegmentQuery,
    Segments,
    Shutdown,
    Submit,
    ToEngine,
)

Event = Prefilled | Produced | Ended
STUCK_SECONDS = 8.0
"Without a sign of life for so long an engine counts as stuck."


class RequestRefused(Exception):
    """The engine did not take a request; `refusal` says why and with which status."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class EngineGone(Exception):
    """The engine's process has ended, or could not start."""


@dataclass(eq=False)
class EngineClient:
    """One engine process. Use it from one event loop."""

    ready: Ready
    _process: subprocess.Popen[bytes]
    _socket: zmq.asyncio.Socket
    _folder: tempfile.TemporaryDirectory[str]
    latest: Heartbeat = field(default_factory=lambda: Heartbeat(time=0.0))
    "The last sign of life."
    _seen: float = field(default_factory=time.monotonic)
    _waiting: dict[str, asyncio.Queue[Event | Refused | Segments | None]] = field(
        default_factory=dict
    )
    _reader: asyncio.Task[None] | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    "Set once the process has ended; everything that waited has been told."

    @classmethod
    async def start(cls, config: EngineConfig) -> "EngineClient":
        """Start the process and wait until it takes requests; `EngineGone` says why it does not.

        Cancelled while it waits, it leaves no process behind.
        """
        folder = tempfile.TemporaryDirectory(prefix="redknot-")  # readable by its owner alone
        address = f"ipc://{Path(folder.name) / 'engine'}"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.linger = 0
        socket.set_hwm(0)
        socket.bind(address)
        process = subprocess.Popen(
            [sys.executable, "-m", "redknot.engine.process", address],
            stdin=subprocess.PIPE,
            process_group=0,  # a terminal's SIGINT is for the server, which lets requests end
        )
        client: EngineClient | None = None
        try:
            first = await _first_word(config, process, socket)
            if not isinstance(first, Ready):
                raise EngineGone(first.message if isinstance(first, Failed) else repr(first))
            client = cls(first, process, socket, folder)
        finally:
            if client is None:
                process.kill()
                _let_go(process, socket, folder)
        client._reader = asyncio.create_task(client._read())
        return client

    @property
    def process_id(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs and has lately made a sign of life."""
        return not self.gone.is_set() and time.monotonic() - self._seen < STUCK_SECONDS

    async def submit(self, request: Submit) -> AsyncGenerator[Event, None]:
        """Everything that happens to ``request``; the last `Ended` is the last event.

        `RequestRefused` comes before the first event or not at all. Leaving the iterator early
        cancels the request.
        """
        left, queue = request.sampling.n, self._expect(request.request_id)
        try:
            await self._send(request)
            while left:
                event = await self._next(queue)
                if isinstance(event, Refused):
                    left = 0
                    raise RequestRefused(event)
                if isinstance(event, Segments):
                    raise TypeError("an answer about segments to a request")
                left -= isinstance(event, Ended)
                yield event
        finally:
            del self._waiting[request.request_id]
            if left and not self.gone.is_set():
                await self._send(Cancel(request_id=request.request_id))

    async def stop(self, request_id: str, choice: int) -> None:
        """End a choice that is whole, whatever the engine thinks; its `Ended` still comes."""
        await self._send(Cancel(request_id=request_id, choice=choice, reason="stop"))

    async def segments(self, asked: SegmentAdd | SegmentQuery | SegmentDelete) -> Segments:
        """Ask about segments; `RequestRefused` where the answer is no."""
        queue = self._expect(asked.request_id)
        try:
            await self._send(asked)
            answer = await self._next(queue)
        finally:
            del self._waiting[asked.request_id]
        if isinstance(answer, Refused):
            raise RequestRefused(answer)
        if not isinstance(answer, Segments):
            raise TypeError(f"{type(answer).__name__} to a question about segments")
        return answer

    async def close(self, drain_seconds: float = 30.0) -> None:
        """Let running requests end for so long, then stop the process whatever it does."""
        if not self.gone.is_set():
            await self._send(Shutdown(drain_seconds=drain_seconds))
            try:
                await asyncio.wait_for(self.gone.wait(), drain_seconds + STUCK_SECONDS)
            except TimeoutError:
                self.kill()
        if self._reader is not None:
            await self._reader
        _let_go(self._process, self._socket, self._folder)

    def kill(self) -> None:
        """End the process at once; `gone` is set soon after."""
        self._process.kill()

    async def _send(self, message: ToEngine) -> None:
        await self._socket.send(_encoder.encode(message))

    def _expect(self, request_id: str) -> asyncio.Queue[Event | Refused | Segments | None]:
        queue: asyncio.Queue[Event | Refused | Segments | None] = asyncio.Queue()
        if self.gone.is_set():
            raise EngineGone("the engine process has ended")
        self._waiting[request_id] = queue
        return queue

    async def _next(
        self, queue: asyncio.Queue[Event | Refused | Segments | None]
    ) -> Event | Refused | Segments:
        event = await queue.get()
        if event is None:
            raise EngineGone("the engine process has ended")
        return event

    async def _read(self) -> None:
        """Hand out messages until the process ends, then tell everybody."""
        try:
            while True:
                ended = self._process.poll() is not None  # asked first: its last words come before
                if await self._socket.poll(200):
                    self._hand_out(_decoder.decode(await self._socket.recv()))
                elif ended:
                    break
        finally:  # also where it cannot be understood
            self.gone.set()
            for queue in self._waiting.values():
                queue.put_nowait(None)

    def _hand_out(self, message: FromEngine) -> None:
        self._seen = time.monotonic()
        if isinstance(message, Heartbeat):
            self.latest = message
        elif isinstance(message, Output):
            events: list[Event] = [*message.prefilled, *message.produced, *message.ended]
            for event in events:
                self._put(event.request_id, event)
        elif isinstance(message, Refused | Segments):
            self._put(message.request_id, message)

    def _put(self, request_id: str, event: Event | Refused | Segments) -> None:
        queue = self._waiting.get(request_id)  # its client may have left
        if queue is not None:
            queue.put_nowait(event)


async def _first_word(
    config: EngineConfig, process: "subprocess.Popen[bytes]", socket: zmq.asyncio.Socket
) -> FromEngine:
    """Tell the process what to be; what it says about that."""
    if process.stdin is not None:  # stays open: the process ends when it closes
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    while True:
        ended = process.poll()
        if await socket.poll(200):
            word: FromEngine = _decoder.decode(await socket.recv())
            if not isinstance(word, Heartbeat):
                return word
        elif ended is not None:
            return Failed(message=f"the engine process ended with {ended}")


def _let_go(
    process: "subprocess.Popen[bytes]",
    socket: zmq.asyncio.Socket,
    folder: "tempfile.TemporaryDirectory[str]",
) -> None:
    """Of a process that has ended, or is about to."""
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    socket.close()
    folder.cleanup()


def new_request_id() -> str:
    """An id that no client can guess or choose."""
    return uuid.uuid4().hex


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromEngine)
