"""Metrics, the live page, and log lines."""

import json
import logging
import re
import shlex
import sys
from urllib.parse import quote

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.asked import CHAT, COMPLETIONS, ENDPOINTS, answer, body, chunks, error_of
from tests.server.conftest import Opened
from tests.server.scripted import COUNTERS, ScriptedEngine

from redknot.server.logs import JsonFormatter, TextFormatter

pytestmark = pytest.mark.anyio
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def samples(client: httpx.AsyncClient) -> Samples:
    """All samples but the model's name; the text must be what Prometheus reads."""
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    types = [line.split()[2] for line in response.text.splitlines() if line.startswith("# TYPE")]
    assert len(set(types)) == len(types)
    found: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            key = (sample.name, tuple(sorted(labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


async def test_names_that_vllm_has(client: httpx.AsyncClient) -> None:
    await answer(client, CHAT)
    await chunks(client, COMPLETIONS, max_tokens=4)
    found = {(name, labels): value for (name, labels), value in (await samples(client)).items()}
    expected = {
        "vllm:num_requests_running": 1,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 100,
        "vllm:generation_tokens_total": 20,
        "vllm:prefix_cache_queries_total": 90,
        "vllm:prefix_cache_hits_total": 45,
        "vllm:num_preemptions_total": 2,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_queue_time_seconds_count": 2,
    }
    assert {name: found[name, ()] for name in expected} == expected
    assert found["vllm:request_success_total", (("finished_reason", "stop"),)] == 1
    assert found["vllm:request_success_total", (("finished_reason", "length"),)] == 1
    assert found["vllm:inter_token_latency_seconds_count", ()] >= 60


async def test_whatever_the_engine_counts_is_told(client: httpx.AsyncClient) -> None:
    found = await samples(client)
    expected = {
        ("redknot:hit_tokens_total", (("tier", "device"),)): 25,
        ("redknot:hit_tokens_total", (("tier", "host"),)): 15,
        ("redknot:missed_tokens_total", ()): 60,
        ("redknot:requests_total", (("reason", "cancelled"),)): 1,
        ("redknot:stage_seconds_total", (("stage", "probe"),)): 0.5,
        ("redknot:store_bytes", ()): 4096,
        ("redknot:something_total", (("kind", "new"),)): 7,
        ("redknot:other_thing_total", ()): 8,
        ("redknot:pool_pages", (("state", "prefixes"),)): 8,
        ("redknot:pool_class_pages", (("head_class", "local"),)): 4,
        ("redknot:fallback", ()): 0,
    }
    assert {key: found[key] for key in expected} == expected
    told = sum(value in found.values() for value in COUNTERS.values())
    assert told == len(COUNTERS)


async def test_a_name_with_and_without_kinds_stays_readable(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    counters = {"builds": 3.0, "builds.idle": 2.0, "gauge.builds": 1.0}
    engine.latest = type(engine.latest)(time=1.0, counters=counters)
    found = await samples(client)
    assert {value for (name, _), value in found.items() if "builds" in name} == {1.0, 2.0, 3.0}


async def test_the_page_needs_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"""(src|href)\s*=|https?:|@import|url\(|innerHTML""", page.text)
    read = set(re.findall(r"\bd\.([a-z_]+)", page.text))
    assert read <= set((await client.get("/live")).json())
    assert len(read) > 12


async def test_live_tells_what_happened(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    before = (await client.get("/live")).json()
    assert before["ttft"] == {"count": 0, "p50": None, "p90": None, "p99": None}
    for _ in range(3):
        await answer(client, CHAT, max_tokens=2)
    live = (await client.get("/live")).json()
    assert live["hit_tokens"] == {"device": 25, "host": 15, "missed": 60}
    assert live["pool"]["by_class"] == {"global": 12, "local": 4}
    assert (live["running"], live["waiting"], live["finished"]) == (1, 2, 3)
    assert live["ttft"]["count"] == 3
    assert 0 < live["ttft"]["p50"] <= live["ttft"]["p90"] <= live["ttft"]["p99"] < 5


SECRET = "a secret of the user"


async def test_log_lines_tell_figures_and_no_words(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    key = "key-of-a-tenant"
    client = opened(key, api_key=(key,))
    with caplog.at_level(logging.INFO, "redknot.server"):
        await client.post(CHAT, json=body(CHAT, text=SECRET, redknot={"policy": "epic"}))
        await client.post(CHAT, json=body(CHAT, text=SECRET, **{SECRET: SECRET}))
        await client.post("/v1/segments", json={"text": SECRET * 5, "title": SECRET})
    lines = [JsonFormatter().format(record) for record in caplog.records]
    texts = [TextFormatter().format(record) for record in caplog.records]
    assert len(lines) == 3
    assert not any(word in line for line in lines + texts for word in (SECRET, key, "bridge"))
    first, second, _ = (json.loads(line) for line in lines)
    assert first["path"] == CHAT
    assert (first["status"], second["status"]) == (200, 400)
    assert re.fullmatch("[0-9a-f]{8}", first["tenant"])
    assert (first["policy"], first["cached_tokens"]) == ("epic", 0)
    assert first["prompt_tokens"] > len(SECRET)
    assert first["completion_tokens"] == 66
    assert 0 < first["ttft"] <= first["seconds"]
    assert first["request_id"] != second["request_id"]
    assert "policy=epic" in texts[0]


FAULTS = [RuntimeError, KeyError, ValueError, TypeError, RecursionError, MemoryError, OSError]


@pytest.mark.parametrize("url", ENDPOINTS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failure_of_ours_is_told_as_500_and_logged_by_its_place(
    opened: Opened,
    engine: ScriptedEngine,
    caplog: pytest.LogCaptureFixture,
    url: str,
    stream: bool,
    fault: type[Exception],
) -> None:
    """Its message is nobody's business: it may hold what a client said."""

    def fail(request: object) -> None:
        raise fault(SECRET)

    engine.submit = fail
    with caplog.at_level(logging.INFO, "redknot.server"):
        response = await opened().post(
            url, json=body(url, stream=stream), headers={"X-Request-Id": "mine"}
        )
    assert error_of(response, 500)["code"] == "internal_error"
    assert response.headers.get_list("x-request-id") == ["mine"]
    told, request = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert (told["message"], told["path"]) == ("internal error", url)
    assert told["error"][0] == fault.__name__
    assert re.search(r"test_metrics\.py:\d+ .*fail$", told["error"][-1])
    assert (request["message"], request["status"]) == ("request", 500)
    assert request["request_id"] == told["request_id"]
    lines = [TextFormatter().format(record) for record in caplog.records]
    assert SECRET not in "".join([response.text, caplog.text, *lines])


def test_no_logged_exception_tells_its_message() -> None:
    """Whoever logs it: uvicorn does as well."""
    try:
        raise KeyError(SECRET)
    except KeyError:
        found = sys.exc_info()
    for formatter in (JsonFormatter(), TextFormatter()):
        record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "failed", (), found)
        line = formatter.format(record)
        assert "KeyError" in line
        assert "test_metrics.py:" in line
        assert SECRET not in line


@pytest.mark.parametrize(
    "char", ["\n", "\r", "\r\n", "\x1b[2J", "\u2028", "\x85", "\x00", '"', " "]
)
async def test_no_path_begins_a_line_or_a_field_of_its_own(
    opened: Opened, caplog: pytest.LogCaptureFixture, char: str
) -> None:
    client = opened(api_key=("key-of-a-tenant",))
    with caplog.at_level(logging.INFO, "redknot.server"):
        await client.get("/" + quote(f"a{char}status=200"))
    (record,) = caplog.records
    line = TextFormatter().format(record)
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    assert [word[:7] for word in shlex.split(line)].count("status=") == 1
    assert json.loads(JsonFormatter().format(record))["path"] == f"/a{char}status=200"
