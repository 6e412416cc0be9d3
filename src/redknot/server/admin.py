"""Models, health, metrics, and the live page."""

import time
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from openai.types import Model

from redknot.server.errors import ApiError
from redknot.server.service import Service

router = APIRouter()
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; " + (
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/v1/models", response_model=None, tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_model(request.app.state.service)]})


@router.get("/v1/models/{model:path}", response_model=None, tags=["OpenAI"])
async def get_model(request: Request, model: str) -> Response:
    """The model, by its name."""
    service: Service = request.app.state.service
    service.check_model(model)
    return JSONResponse(_model(service))


@router.get("/health", response_model=None, tags=["operation"])
async def health(request: Request) -> Response:
    """200 while the engine shows life."""
    service: Service = request.app.state.service
    if not service.client.is_alive:
        raise ApiError(503, "the engine shows no sign of life", code="engine_stuck")
    reason = service.client.latest.fallback
    if reason:
        return JSONResponse({"status": "degraded", "reason": reason})
    return JSONResponse({"status": "ok"})


@router.get("/metrics", response_model=None, tags=["operation"])
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    service: Service = request.app.state.service
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return Response(service.metrics.text(), media_type=kind)


@router.get("/live", response_model=None, tags=["operation"])
async def live(request: Request) -> Response:
    """What the live page shows."""
    return JSONResponse(_live(request.app.state.service))


@router.get("/", response_model=None, include_in_schema=False)
async def page() -> Response:
    """The live page; it holds no data."""
    html = (files("redknot.server") / "page.html").read_text(encoding="utf-8")
    return HTMLResponse(html, headers={"Content-Security-Policy": PAGE_POLICY})


def _model(service: Service) -> dict[str, Any]:
    ready = service.client.ready
    made = Model(
        id=service.model,
        object="model",
        created=service.started,
        owned_by="redknot",
        max_model_len=ready.context_length,  # type: ignore[call-arg]  # as vLLM has it
    )
    return made.model_dump(mode="json", exclude_unset=True)


def _live(service: Service) -> dict[str, Any]:
    ready, beat, metrics = service.client.ready, service.client.latest, service.metrics
    counters = beat.counters
    tiers = {
        name.removeprefix("hit_tokens."): value
        for name, value in counters.items()
        if name.startswith("hit_tokens.")
    }
    return {
        "model": service.model,
        "policy": ready.policy,
        "gate": None if ready.gate is None else ready.gate.summary,
        "alive": service.client.is_alive,
        "uptime": int(time.time()) - service.started,
        "running": beat.running,
        "waiting": beat.waiting,
        "hit_tokens": {**tiers, "missed": counters.get("missed_tokens", 0)},
        "prompt_tokens": counters.get("prompt_tokens", 0),
        "cached_tokens": counters.get("cached_tokens", 0),
        "generation_tokens": counters.get("generation_tokens", 0),
        "pool": msgspec.to_builtins(beat.pool),
        "store": {
            name: counters.get(f"gauge.store_{name}")
            for name in ("entries", "bytes", "capacity_bytes")
        },
        "builds_pending": counters.get("gauge.builds_pending"),
        "break_even_uses": counters.get("gauge.break_even_uses"),
        "ttft": {
            "count": len(metrics.recent_ttft),
            "p50": metrics.quantile(0.5),
            "p90": metrics.quantile(0.9),
            "p99": metrics.quantile(0.99),
        },
        "finished": metrics.num_finished,
        "agreement": beat.agreement,
        "shadow_runs": counters.get("shadow_runs"),
        "fallback": beat.fallback,
    }
