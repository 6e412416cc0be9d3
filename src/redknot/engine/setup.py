"""From a configuration to an engine that is ready, with its gate passed."""

from dataclasses import dataclass
from pathlib import Path

import torch

from redknot.engine.background import Background
from redknot.engine.company import Company
from redknot.engine.config import EngineConfig
from redknot.engine.counters import Counters
from redknot.engine.engine import Engine
from redknot.engine.footprint import tokens_that_fit
from redknot.engine.intake import Intake
from redknot.engine.messages import GateReport, Ready
from redknot.engine.opening import Opening
from redknot.engine.sampling import Grammars
from redknot.engine.scheduler import Limits, Scheduler
from redknot.engine.shadow import ShadowMonitor
from redknot.engine.tasks import IdleBuilder
from redknot.errors import InputError
from redknot.evaluation.gate import default_cache_folder, run_gate
from redknot.evaluation.gate_rows import rows_for_gate
from redknot.execution import ExecutionSettings
from redknot.execution.cache import page_storage
from redknot.execution.planner import Planner
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.heads.shipped import shipped_map
from redknot.models import Adapter, LoadedModel, load_model
from redknot.models.loading import LoadOptions
from redknot.recovery import Policy
from redknot.recovery.policies import Prefix, parse_policy
from redknot.segments import MemoryStore
from redknot.segments.question import MAX_PROBE_TOKENS

CHUNK_TOKENS = {"cpu": 2048, "cuda": 16384}
"Positions of one chunk of a static plan: longer ones would hold up those who decode."
HOST_POOL_BYTES = 2 << 30
"Of pages on a CPU, where nobody says."
DEVICE_SHARE = 0.85
"Of what a GPU has left behind weights and segments, where nobody says."


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """An engine, and what it tells the server about itself."""

    engine: Engine
    ready: Ready


def prepare(config: EngineConfig) -> Prepared:
    """Load, measure and check; `InputError` where the gate fails or something cannot be."""
    policy = _policy(config)
    model = load_model(config.model, _load_options(config))
    session = _session(config, model)
    head_map = _head_map(config, session)
    if policy.needs_head_map and head_map is None:
        raise InputError(f"policy {policy.name} needs a head map")
    gate = _gate(config, session, policy, head_map)
    engine = build_engine(config, session, policy, head_map)
    storage = session.executor.storage
    ready = Ready(
        model=model.name,
        context_length=engine.intake.context_length,
        max_requests=config.max_requests,
        num_pages=storage.pool.num_pages,
        page_bytes=storage.page_bytes,
        pool_tokens=tokens_that_fit(session.executor, MAX_PROBE_TOKENS),
        policy=policy.describe(),
        head_map="" if head_map is None else head_map.digest(),
        end_token_ids=tuple(sorted(model.end_token_ids)),
        gate=gate,
    )
    return Prepared(engine, ready)


def build_engine(
    config: EngineConfig, session: Session, policy: Policy, head_map: HeadMap | None
) -> Engine:
    """The parts of an engine over ``session``, whose pool must be of fixed size."""
    executor, model = session.executor, session.model
    planner = Planner(executor, instead=Prefix())
    planner.calibrate()
    vocabulary = model.hf.config.vocab_size
    context = min(model.adapter.context_length, tokens_that_fit(executor, MAX_PROBE_TOKENS))
    intake = Intake(
        session, planner, policy, head_map, context,
        Grammars(model.tokenizer, vocabulary, model.end_token_ids),
    )  # fmt: skip
    scheduler = Scheduler(
        Limits(
            num_pages=executor.storage.pool.num_pages - 1,
            max_requests=config.max_requests,
            max_waiting=config.max_waiting,
            step_ms=config.step_ms,
        )
    )
    counters = Counters()
    background = Background(
        session,
        intake,
        scheduler,
        counters,
        IdleBuilder(session, counters, config.max_builds),
        ShadowMonitor(config.shadow),
        head_map,
        config.build_idle,
    )
    digest = "" if head_map is None else head_map.digest()
    return Engine(
        session,
        intake,
        Opening(session, planner, head_map, digest, config.planned),
        scheduler,
        Company(executor, config.max_requests, context),
        background,
        counters,
    )


def _policy(config: EngineConfig) -> Policy:
    try:
        return parse_policy(config.policy)
    except ValueError as error:
        raise InputError(f"policy: {error}") from error


def _load_options(config: EngineConfig) -> LoadOptions:
    return LoadOptions(
        load_format=config.load_format,
        layers=config.layers,
        dtype=config.dtype,
        device=config.device,
        delta=None if config.delta is None else Path(config.delta),
    )


def _session(config: EngineConfig, model: LoadedModel) -> Session:
    """With a pool of fixed size."""
    adapter = model.adapter
    pool_bytes = config.pool_bytes or _free_bytes(adapter, config.store_bytes)
    num_pages = pool_bytes // page_storage(adapter).page_bytes
    settings = ExecutionSettings(
        num_pages=num_pages, chunk_tokens=CHUNK_TOKENS[adapter.device.type]
    )
    store = MemoryStore(config.store_bytes)
    kept = int(pool_bytes * config.prefix_share)
    session = Session(model, store=store, settings=settings, beginnings_bytes=kept)
    if tokens_that_fit(session.executor, MAX_PROBE_TOKENS) < 1:
        raise InputError(
            f"a pool of {pool_bytes} bytes has {num_pages} pages: too few for a single prompt"
        )
    return session


def _free_bytes(adapter: Adapter, store_bytes: int) -> int:
    if adapter.device.type != "cuda":
        return HOST_POOL_BYTES
    free, _ = torch.cuda.mem_get_info(adapter.device)
    return int((free - store_bytes) * DEVICE_SHARE)


def _head_map(config: EngineConfig, session: Session) -> HeadMap | None:
    if config.head_map == "none":
        return None
    if config.head_map == "auto":
        found = shipped_map(session.weights)
    else:
        found = HeadMap.load(config.head_map)
    return None if found is None else found.fit(session.model.adapter, session.weights)


def _gate(
    config: EngineConfig, session: Session, policy: Policy, head_map: HeadMap | None
) -> GateReport | None:
    """What the gate says; `InputError` if it fails and nobody has allowed that."""
    gate = config.gate
    if gate.skip:
        if not gate.allow_unverified:
            raise InputError("the gate can only be left out with --allow-unverified")
        return None
    rows = rows_for_gate(gate.data)
    result = run_gate(session, policy, head_map, rows, gate, cache_folder=default_cache_folder())
    if not result.passed and not gate.allow_unverified:
        raise InputError(
            f"the gate refuses {policy.describe()} on this model: {result.summary};"
            " choose another policy or map, or start with --allow-unverified"
        )
    return GateReport(passed=result.passed, summary=result.summary, cached=result.cached)
