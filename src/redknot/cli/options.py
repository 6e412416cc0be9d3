"""Options that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from redknot.errors import InputError
from redknot.execution import ExecutionSettings
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.heads.shipped import shipped_map
from redknot.models import load_model
from redknot.models.loading import LoadOptions
from redknot.segments import Document

Flat = Parameter(name="*")
Paths = Annotated[list[Path], Parameter(consume_multiple=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class MapOption:
    """Which head map applies."""

    head_map: str = "auto"
    "A file, auto (the map that ships for these weights) or none."


def open_session(model: str, load: LoadOptions) -> Session:
    """A session over ``model`` with its default store."""
    return Session(load_model(model, load), settings=ExecutionSettings())


def open_map(option: MapOption, session: Session) -> HeadMap | None:
    """The head map of ``option``, checked against the model."""
    if option.head_map == "none":
        return None
    if option.head_map == "auto":
        found = shipped_map(session.weights)
    else:
        found = HeadMap.load(option.head_map)
    return None if found is None else found.fit(session.model.adapter, session.weights)


def read_documents(paths: list[Path]) -> list[Document]:
    """A document for each file, and for each text file of a folder, by name."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
            if not found:
                raise InputError(f"{path}: the folder holds no files")
            files += found
        else:
            files.append(path)
    return [_document(path) for path in files]


def _document(path: Path) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    if not text.strip():
        raise InputError(f"{path}: the document is empty")
    return Document(text, path.stem)
