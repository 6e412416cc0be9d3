"""What an engine process is told at its start."""

from typing import Literal

import msgspec


class GateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the policy must reach beside dense before the engine answers with it."""

    agreement: float = 0.85
    "Least mean agreement of top tokens along dense's greedy answer."
    prompts: int = 4
    "How many prompts are measured."
    data: str = ""
    "Rows as `redknot eval --data` takes them; empty is the text that ships."
    allow_unverified: bool = False
    "Start although the gate failed; it is reported all the same."
    skip: bool = False
    "Do not run it at all (needs allow_unverified)."


class ShadowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A share of requests runs through dense as well."""

    share: float = 0.0
    "Of requests, 0 to 1."
    threshold: float = 0.85
    "Least mean agreement of the last runs; below it the engine answers dense."
    window: int = 32
    "Runs that count."
    least: int = 4
    "Runs before anything is decided."


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine."""

    model: str = "embedded"
    "`embedded`, a folder, a GGUF file or a hub name."
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    delta: str | None = None
    layers: int | None = None
    head_map: str = "auto"
    "A file, auto (the map that ships for these weights) or none."
    policy: str = "question_drop"
    "What requests run under that name none."
    planned: bool = True
    "Run dense where the policy is predicted to be slower."
    pool_bytes: int | None = None
    "Memory of pages; None is what the device has left, at most half of the host's."
    store_bytes: int = 4 << 30
    "Memory of segment state."
    max_requests: int = 32
    "Requests that decode together."
    max_waiting: int = 256
    "Requests that wait; one more is refused with 429."
    step_ms: float = 60.0
    "Predicted time of prefill work between two tokens of those that decode."
    build_idle: bool = True
    "Build the state of new segments while nothing else is to do."
    max_builds: int = 512
    "Segments that wait to be built; the oldest are forgotten."
    prefix_share: float = 0.5
    "Most of the pool that beginnings of earlier prompts may keep."
    gate: GateConfig = GateConfig()
    shadow: ShadowConfig = ShadowConfig()
