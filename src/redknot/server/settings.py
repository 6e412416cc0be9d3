"""How the HTTP server behaves."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from redknot.errors import InputError


def split_keys(hint: Any, value: str, *, delimiter: str | None = None) -> list[str]:
    """Keys of one text, in cyclopts' manner: blanks are part of a key, commas and lines are not.

    A text without any key is one empty key, which is refused: it was meant to close the server.
    """
    keys = [key.strip() for key in re.split(delimiter or r"[,\r\n]", value)]
    return [key for key in keys if key] or [""]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The HTTP side of `redknot serve`."""

    host: str = "127.0.0.1"
    "Address to listen on; loopback unless told otherwise."
    port: int = 8000
    "0 takes a free one."
    api_key: Annotated[tuple[str, ...], Parameter(env_var_split=split_keys)] = ()
    """Keys that clients must show, each a tenant of its own; without any, everybody is let in.
    REDKNOT_SERVE_API_KEY holds several with commas or line ends between them."""
    served_model_name: str | None = None
    "Name of the model towards clients; the model's own by default."
    max_body_bytes: int = 16 << 20
    "Largest request body; a larger one is refused with 413."
    max_concurrent: int = 512
    "API requests in work or waiting; one more is refused with 429."
    max_registered_bytes: int = 256 << 20
    "Text of registered segments and 1 KiB for each, of all tenants; the oldest give way."
    drain_seconds: float = 30.0
    "How long running requests may go on after SIGTERM."
    body_seconds: float = 60.0
    "How long a client may take to send a body."

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"--port {self.port} is outside 0 to 65535")
        if not all(key.strip() for key in self.api_key):
            raise InputError("--api-key (REDKNOT_SERVE_API_KEY) is set but holds no key")
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() for key in self.api_key):
            raise InputError("--api-key: a key has at least 8 printable ASCII characters")
        for name in ("max_body_bytes", "max_concurrent", "max_registered_bytes", "body_seconds"):
            if getattr(self, name) <= 0:
                raise InputError(f"--{name.replace('_', '-')} must be positive")
        if self.drain_seconds < 0:
            raise InputError("--drain-seconds must not be negative")
