"""What the engine says about itself twice a second."""

import time

from redknot.engine.counters import break_even_uses
from redknot.engine.engine import Engine
from redknot.engine.messages import Heartbeat, PoolUse
from redknot.engine.scheduler import Phase


def heartbeat(engine: Engine) -> Heartbeat:
    """Counters, pages and queues as they are now."""
    counts, monitor = engine.scheduler.counts(), engine.background.monitor
    return Heartbeat(
        time=time.time(),
        waiting=counts[Phase.WAITING],
        running=counts[Phase.PREFILL] + counts[Phase.DECODE],
        pool=_pool(engine),
        fallback=monitor.fallback,
        agreement=monitor.agreement,
        counters={**engine.counters.snapshot(), **_gauges(engine)},
    )


def _pool(engine: Engine) -> PoolUse:
    storage = engine.session.executor.storage
    by_class = {"global": 0, "local": 0}
    for prefilled in engine.company.prefilled():
        reaches = [reach for layer in prefilled.sight.decode for reach in layer]
        for reach, pages in zip(reaches, prefilled.cache.pages_by_row().tolist(), strict=True):
            by_class["global" if reach.span is None else "local"] += pages
    beginnings = engine.session.beginnings.reclaimable()
    pool = storage.pool
    return PoolUse(
        total=pool.num_pages,
        free=pool.num_free,
        requests=max(0, pool.num_used - beginnings - 1),  # 1: the page of idle slots
        prefixes=beginnings,
        by_class=by_class,
    )


def _gauges(engine: Engine) -> dict[str, float]:
    usage, counted = engine.session.store.usage(), engine.counters.snapshot()
    hits = counted["hit_tokens.device"] + counted["hit_tokens.host"] + counted["hit_tokens.disk"]
    tokens = counted["build_tokens"] / counted["builds"] if counted["builds"] else 0.0
    uses = break_even_uses(
        counted["builds"],
        counted["build_seconds"],
        hits / tokens if tokens else 0.0,
        counted["saved_seconds"],
    )
    return {
        "store_evictions": usage.evictions,
        "store_damaged": usage.damaged,
        "gauge.builds_pending": len(engine.background.builder),
        "gauge.store_entries": usage.num_entries,
        "gauge.store_bytes": usage.num_bytes,
        "gauge.store_capacity_bytes": usage.capacity_bytes,
        "gauge.break_even_uses": uses,
    }
