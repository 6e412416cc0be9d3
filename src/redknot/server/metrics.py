"""Prometheus metrics: vLLM's names where they mean the same, `redknot:` for the rest."""

import math
import re
import time
from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from redknot.engine.client import EngineClient
from redknot.engine.messages import Report

SHARED_NAMES = {
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens."),
    "generation_tokens": ("vllm:generation_tokens", "Generated tokens."),
    "prefix_queries": ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_hits": ("vllm:prefix_cache_hits", "Tokens found in the prefix cache."),
    "preemptions": ("vllm:num_preemptions", "Requests that gave their pages back."),
}
LABELS = {"hit_tokens": "tier", "requests": "reason", "stage_seconds": "stage"}
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
RECENT = 256
"Answers whose times are kept for the live page."


class ServerMetrics:
    """Counted here; what the engine counts is read from its last heartbeat."""

    def __init__(self, model: str, client: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self.recent_ttft: deque[float] = deque(maxlen=RECENT)
        self.num_finished = 0
        self._model = model
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.")
        self._gap = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens.")
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to the end, of each choice."
        )
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Arrival to first work.")
        self._success = Counter(
            "vllm:request_success",
            "Choices that came to their end; a request with n has as many.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self.registry.register(EngineCollector(model, client))

    def prefilled(self, report: Report) -> None:
        """A prompt is in place."""
        if "queue" in report.seconds:
            self._queue.labels(self._model).observe(report.seconds["queue"])

    def first_token(self, seconds: float) -> None:
        """A request has its first token."""
        self.recent_ttft.append(seconds)
        self._ttft.labels(self._model).observe(seconds)

    def tokens(self, gap: float, count: int) -> None:
        """``count`` tokens have come, ``gap`` seconds each."""
        series = self._gap.labels(self._model)
        for _ in range(count):
            series.observe(gap)

    def finished(self, reason: str, seconds: float) -> None:
        """A choice is complete."""
        self.num_finished += 1
        self._success.labels(self._model, reason).inc()
        self._whole.labels(self._model).observe(seconds)

    def quantile(self, share: float) -> float | None:
        """Of the time to the first token of recent requests."""
        times = sorted(self.recent_ttft)
        return times[math.ceil(share * len(times)) - 1] if times else None

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, words: str) -> Histogram:
        return Histogram(name, words, ("model_name",), buckets=SECONDS, registry=self.registry)


class EngineCollector(Collector):
    """Turns the last heartbeat into metrics."""

    def __init__(self, model: str, client: EngineClient) -> None:
        self._model, self._client = model, client

    def describe(self) -> list[Metric]:
        """Nothing before the engine has said something."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Gauges of the moment, then all counters, known here or not."""
        beat = self._client.latest
        yield self._gauge("vllm:num_requests_running", "Prefilling or decoding.", beat.running)
        yield self._gauge("vllm:num_requests_waiting", "Waiting for admission.", beat.waiting)
        yield self._gauge("redknot:engine_alive", "1 while it shows life.", self._client.is_alive)
        yield self._gauge("redknot:fallback", "1 while only dense answers.", bool(beat.fallback))
        yield self._gauge(
            "redknot:heartbeat_age_seconds", "Since the last.", max(0.0, time.time() - beat.time)
        )
        if beat.agreement is not None:
            yield self._gauge("redknot:agreement", "Of recent shadow runs.", beat.agreement)
        if beat.pool is not None:
            pool = beat.pool
            used = pool.requests / pool.total if pool.total else 0.0
            yield self._gauge("vllm:kv_cache_usage_perc", "Share held by requests.", used)
            pages = {"total": pool.total, "free": pool.free, "requests": pool.requests}
            pages["prefixes"] = pool.prefixes
            yield self._labelled("redknot:pool_pages", "Pages.", "state", pages)
            yield self._labelled(
                "redknot:pool_class_pages", "Held by requests.", "head_class", pool.by_class
            )
        yield from self._counters(beat.counters)

    def _counters(self, counters: dict[str, float]) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, value in sorted(counters.items()):
            if name.startswith("gauge."):
                plain = f"redknot:{_safe(name.removeprefix('gauge.'))}"
                families[plain] = self._gauge(plain, "Of the engine.", value)
                continue
            stem, _, kind = name.partition(".")
            shared, words = SHARED_NAMES.get(name, (f"redknot:{_safe(stem)}", "Of the engine."))
            labels = ["model_name"] + ([LABELS.get(stem, "kind")] if kind else [])
            key = f"{shared}/{bool(kind)}"
            if key not in families:
                whole = shared if not kind or stem not in counters else f"{shared}_by_kind"
                families[key] = CounterMetricFamily(whole, words, labels=labels)
            values = [self._model, kind] if kind else [self._model]
            families[key].add_metric(values, value)  # type: ignore[attr-defined]
        yield from families.values()

    def _gauge(self, name: str, words: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, words, labels=["model_name"])
        family.add_metric([self._model], float(value))
        return family

    def _labelled(self, name: str, words: str, label: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(name, words, labels=["model_name", label])
        for kind, value in values.items():
            family.add_metric([self._model, kind], float(value))
        return family


def _safe(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
