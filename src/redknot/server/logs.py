"""Structured log lines; never a word of a prompt or an answer."""

import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Literal

LogFormat = Literal["json", "text"]
logger = logging.getLogger("redknot.server")


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


class JsonFormatter(logging.Formatter):
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


class TextFormatter(logging.Formatter):
    """The same for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message, then the fields."""
        fields = getattr(record, "fields", {})
        told = "".join(f" {name}={value}" for name, value in fields.items())
        return super().formatMessage(record) + told


def set_up(kind: LogFormat) -> None:
    """Send this process's log lines to stderr in this form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logger.setLevel(logging.INFO)
