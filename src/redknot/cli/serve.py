"""`redknot serve`: an OpenAI-compatible server over one model."""

import asyncio
from dataclasses import dataclass
from typing import Annotated

from redknot.cli.console import console, errors
from redknot.cli.options import Flat, MapOption
from redknot.engine.client import EngineGone
from redknot.engine.config import EngineConfig, GateConfig, ShadowConfig
from redknot.errors import InputError
from redknot.heads import HeadMap
from redknot.models.loading import LoadOptions, load_tokenizer
from redknot.recovery.policies import parse_policy
from redknot.server.logs import LogFormat, set_up
from redknot.server.process import serve as run
from redknot.server.service import Service
from redknot.server.settings import ServerSettings

ENGINE = EngineConfig()


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InputError(f"--{name} is outside 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How the engine works."""

    policy: str = ENGINE.policy
    "NAME or NAME:OPTION=VALUE:... for requests that name none."
    planned: bool = ENGINE.planned
    "Run dense where the policy is predicted to be slower."
    pool_bytes: int | None = ENGINE.pool_bytes
    "Memory of pages; by default what the device has left, at most half of the host's."
    store_bytes: int = ENGINE.store_bytes
    "Memory of segment state."
    max_requests: int = ENGINE.max_requests
    "Requests that decode together."
    max_waiting: int = ENGINE.max_waiting
    "Requests that wait; one more is refused with 429."
    step_ms: float = ENGINE.step_ms
    "Predicted time of prefill work between two tokens of those that decode."
    build_idle: bool = ENGINE.build_idle
    "Build the state of new segments while nothing else is to do."
    max_builds: int = ENGINE.max_builds
    "Segments that wait to be built; the oldest are forgotten."
    prefix_share: float = ENGINE.prefix_share
    "Most of the pool that beginnings of earlier prompts may keep."

    def __post_init__(self) -> None:
        parse_policy(self.policy)
        for name in ("pool_bytes", "store_bytes", "max_requests", "step_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InputError(f"--{name.replace('_', '-')} must be positive")
        for name in ("max_waiting", "max_builds"):
            if getattr(self, name) < 0:
                raise InputError(f"--{name.replace('_', '-')} must not be negative")
        _check_share("prefix-share", self.prefix_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class GateOptions:
    """What the policy must reach beside dense before the server starts."""

    gate_agreement: float = ENGINE.gate.agreement
    "Least mean agreement of top tokens along dense's greedy answer."
    gate_prompts: int = ENGINE.gate.prompts
    "How many prompts are measured."
    gate_data: str = ENGINE.gate.data
    "Rows as `redknot eval --data` takes them; by default the text that ships."
    gate_skip: bool = ENGINE.gate.skip
    "Do not run it at all (needs --allow-unverified)."
    allow_unverified: bool = ENGINE.gate.allow_unverified
    "Start although the gate failed; it is reported all the same."

    def __post_init__(self) -> None:
        _check_share("gate-agreement", self.gate_agreement)
        if self.gate_prompts < 1:
            raise InputError("--gate-prompts must be positive")
        if self.gate_skip and not self.allow_unverified:
            raise InputError("--gate-skip needs --allow-unverified")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowOptions:
    """A share of requests runs through dense as well."""

    shadow_share: float = ENGINE.shadow.share
    "Of requests, 0 to 1."
    shadow_threshold: float = ENGINE.shadow.threshold
    "Least mean agreement of the last runs; below it the engine answers dense."
    shadow_window: int = ENGINE.shadow.window
    "Runs that count."
    shadow_least: int = ENGINE.shadow.least
    "Runs before anything is decided."

    def __post_init__(self) -> None:
        _check_share("shadow-share", self.shadow_share)
        _check_share("shadow-threshold", self.shadow_threshold)
        if not 1 <= self.shadow_least <= self.shadow_window:
            raise InputError("--shadow-least must be between 1 and --shadow-window")


def serve(
    model: str = "embedded",
    *,
    server: Annotated[ServerSettings, Flat] = ServerSettings(),
    engine: Annotated[EngineOptions, Flat] = EngineOptions(),
    gate: Annotated[GateOptions, Flat] = GateOptions(),
    shadow: Annotated[ShadowOptions, Flat] = ShadowOptions(),
    head_map: Annotated[MapOption, Flat] = MapOption(),
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    log_format: LogFormat = "json",
) -> int:
    """Serve a model over HTTP as OpenAI's API does: /v1/chat/completions, /v1/completions.

    Beside it: /v1/segments (build the state of documents ahead), /metrics, /health, /docs, and a
    live page at /. Keys are better set as REDKNOT_SERVE_API_KEY, with commas between them, than
    on the command line, which other users of the machine can read.

    Parameters
    ----------
    model
        `embedded`, a folder, a GGUF file or a hub name.
    log_format
        json or text, on stderr.
    """
    if head_map.head_map not in ("auto", "none"):
        HeadMap.load(head_map.head_map)
    config = engine_config(model, load, head_map, engine, gate, shadow)
    tokenizer = load_tokenizer(model, load)
    set_up(log_format)
    try:
        ended_well = asyncio.run(run(config, server, tokenizer, announce))
    except EngineGone as error:
        errors.print(f"redknot: {' '.join(str(error).split())}", markup=False)
        return 1
    return 0 if ended_well else 1


def engine_config(
    model: str,
    load: LoadOptions,
    head_map: MapOption,
    engine: EngineOptions,
    gate: GateOptions,
    shadow: ShadowOptions,
) -> EngineConfig:
    """The options as the engine's process takes them."""
    return EngineConfig(
        model=model,
        load_format=load.load_format,
        dtype=load.dtype,
        device=load.device,
        delta=None if load.delta is None else str(load.delta),
        layers=load.layers,
        head_map=head_map.head_map,
        **{name: getattr(engine, name) for name in EngineOptions.__slots__},
        gate=GateConfig(
            agreement=gate.gate_agreement,
            prompts=gate.gate_prompts,
            data=gate.gate_data,
            allow_unverified=gate.allow_unverified,
            skip=gate.gate_skip,
        ),
        shadow=ShadowConfig(
            share=shadow.shadow_share,
            threshold=shadow.shadow_threshold,
            window=shadow.shadow_window,
            least=shadow.shadow_least,
        ),
    )


def announce(service: Service, address: str) -> None:
    """One line, once requests are taken."""
    ready = service.client.ready
    console.print(
        f"{address} serves {service.model} with {ready.policy}: context {ready.context_length}"
        f" tokens, smallest unmarked segment {service.renderer.smallest} tokens",
        markup=False,
        soft_wrap=True,
    )
