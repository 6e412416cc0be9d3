"""Structured log lines; never a word of a prompt or an answer."""

import json
import logging
import re
import time
import traceback
from dataclasses import dataclass, field
from typing import Any, Literal

LogFormat = Literal["json", "text"]
logger = logging.getLogger("redknot.server")
MAX_FRAMES = 40
PLAIN = re.compile(r"[A-Za-z0-9_.,:=/+-]+")
"What needs no quotes in a line for people."


@dataclass(slots=True)
class Trace:
    """What is noted about one HTTP request on its way, for its log line."""

    request_id: str
    method: str
    path: str
    tenant: str = "-"
    started: float = field(default_factory=time.monotonic)
    arrived: float = field(default_factory=time.time)
    status: int = 0
    policy: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft: float | None = None

    def write(self) -> None:
        """One line, at the end of the request."""
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(time.monotonic() - self.started, 4),
        }
        if self.prompt_tokens:
            fields |= {
                "policy": self.policy,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": self.completion_tokens,
                "ttft": None if self.ttft is None else round(self.ttft, 4),
            }
        logger.info("request", extra={"fields": fields})


def stack_of(error: BaseException) -> list[str]:
    """The type of ``error`` and where it was raised. Its message may hold a client's words."""
    frames = list(traceback.walk_tb(error.__traceback__))[-MAX_FRAMES:]
    places = [
        f"{frame.f_code.co_filename}:{line} {frame.f_code.co_qualname}" for frame, line in frames
    ]
    return [type(error).__qualname__, *places]


class _Formatter(logging.Formatter):
    """Tells no exception's message, whoever logs it."""

    def formatException(self, ei: Any) -> str:
        """Type and places alone."""
        return "\n  ".join(stack_of(ei[1]))


class JsonFormatter(_Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message and the fields of the record."""
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(_Formatter):
    """The same for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message, then the fields; no text among them can begin a line of its own."""
        fields = getattr(record, "fields", {})
        told = "".join(f" {name}={_escaped(value)}" for name, value in fields.items())
        return super().formatMessage(record) + told


def _escaped(value: Any) -> str:
    is_plain = isinstance(value, str) and PLAIN.fullmatch(value)
    return str(value) if is_plain else json.dumps(value, default=str)


def set_up(kind: LogFormat) -> None:
    """Send this process's log lines to stderr in this form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logger.setLevel(logging.INFO)
