"""Printing for people and JSON files for programs."""

import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from redknot.errors import InputError

console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
PICTURES = (".png", ".svg", ".pdf")

errors = Console(stderr=True, soft_wrap=True, highlight=False)


def write_json(path: Path | None, value: Any) -> None:
    """Write ``value`` to ``path`` whole or not at all; nothing without a path."""
    if path is None:
        return
    encoded = msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain), indent=2)
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(encoded)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"{path}: {error.strerror or error}") from error


def check_writable(*paths: Path | None) -> None:
    """`InputError` if a result could not be written, before any long work is done."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{path}: the folder does not exist")
        if path is not None and path.is_dir():
            raise InputError(f"{path}: a folder, not a file")


def check_picture(path: Path | None) -> None:
    """As `check_writable`, and `InputError` for a kind of picture that cannot be drawn."""
    check_writable(path)
    if path is not None and path.suffix not in PICTURES:
        raise InputError(f"{path}: a picture must be one of {', '.join(PICTURES)}")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")
