"""The engine's process: messages in, turns, messages out."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field

import msgspec
import zmq

from redknot.engine.config import EngineConfig
from redknot.engine.engine import Engine
from redknot.engine.messages import (
    Cancel,
    Failed,
    FromEngine,
    Heartbeat,
    SegmentAdd,
    SegmentDelete,
    SegmentQuery,
    Shutdown,
    Submit,
    ToEngine,
)
from redknot.engine.setup import prepare
from redknot.engine.vitals import heartbeat
from redknot.errors import InputError

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.4
IDLE_MILLISECONDS = 200


@dataclass(eq=False)
class Loop:
    """One engine and its socket."""

    engine: Engine
    socket: "zmq.Socket[bytes]"
    stop_at: float | None = None
    "When a shutdown no longer waits for requests."
    _beat: float = 0.0
    _encoder: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)
    _decoder: msgspec.msgpack.Decoder[ToEngine] = field(
        default_factory=lambda: msgspec.msgpack.Decoder(ToEngine)
    )

    def run(self) -> None:
        """Until the server says so."""
        self.engine.alive = self.beat
        while not self._is_over():
            self.once()

    def once(self) -> None:
        """Take in what has come, one turn, and send what it gave."""
        self._receive()
        output = self.engine.turn()
        if output is not None:
            self.send(output)
        mail, self.engine.background.mail = self.engine.background.mail, []
        for message in mail:
            self.send(message)
        self.beat()

    def beat(self) -> None:
        """A sign of life, unless the last was a moment ago."""
        now = time.monotonic()
        if now - self._beat > BEAT_SECONDS:
            self._beat = now
            self.send(heartbeat(self.engine))

    def send(self, message: FromEngine) -> None:
        """To the server."""
        self.socket.send(self._encoder.encode(message))

    def _receive(self) -> None:
        """All that has come; waits a moment where nothing else is to do."""
        wait = IDLE_MILLISECONDS if self.engine.is_idle else 0
        while self.socket.poll(wait):
            wait = 0
            try:
                message = self._decoder.decode(self.socket.recv())
            except msgspec.MsgspecError as error:
                log.warning("a message that cannot be read is dropped: %s", error)
            else:
                self._handle(message)

    def _handle(self, message: ToEngine) -> None:
        engine = self.engine
        if isinstance(message, Submit):
            refusal = engine.submit(message)
            if refusal is not None:
                self.send(refusal)
        elif isinstance(message, Cancel):
            engine.cancel(message)
        elif isinstance(message, SegmentAdd | SegmentQuery | SegmentDelete):
            engine.background.ask(message)
        elif isinstance(message, Shutdown):
            engine.draining = True
            self.stop_at = time.monotonic() + message.drain_seconds

    def _is_over(self) -> bool:
        if self.stop_at is None:
            return False
        return not self.engine.requests or time.monotonic() > self.stop_at


def main(address: str) -> int:
    """Read the configuration from stdin, say whether it works, and run.

    The server alone ends this process: by a message, or with itself.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a group or a service as a whole
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    line = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_server, daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    encode = msgspec.msgpack.encode
    socket.send(encode(Heartbeat(time=time.time())))
    try:
        config = msgspec.json.decode(line, type=EngineConfig)
        with _without_progress():
            prepared = prepare(config)
    except (InputError, msgspec.ValidationError) as error:
        socket.send(encode(Failed(message=" ".join(str(error).split()))))
        socket.close()
        return 2
    socket.send(encode(prepared.ready))
    Loop(prepared.engine, socket).run()
    socket.close()
    return 0


def _end_with_server() -> None:
    """Wait until stdin closes, which it does when the server has died, whatever killed it."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


@contextmanager
def _without_progress() -> Iterator[None]:
    """Keep progress bars of libraries out of a log; loggers have their own hold of stderr."""
    if sys.stderr.isatty():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
