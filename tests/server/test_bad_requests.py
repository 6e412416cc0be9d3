"""What clients get wrong: a clear 400 in OpenAI's shape, and the server goes on."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.asked import CHAT, COMPLETIONS, ENDPOINTS, answer, body, error_of, text_of
from tests.server.conftest import service_over
from tests.server.scripted import ScriptedEngine
from tests.server.templates import bytes_with

from redknot.server import errors
from redknot.server.app import build_app
from redknot.server.schema.chat import ChatRequest
from redknot.server.schema.common import MAX_ITEMS
from redknot.server.schema.completion import CompletionRequest
from redknot.server.schema.segments import SegmentRequest

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("url", ENDPOINTS)
JSON = {"Content-Type": "application/json"}
HUGE = 10**9


@both
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, HUGE, 10**40, [5], {}])
async def test_a_bad_limit_is_refused_by_name(
    http: httpx.AsyncClient, url: str, value: Any, stream: bool
) -> None:
    """SV-06."""
    names = ("max_tokens", "max_completion_tokens") if url == CHAT else ("max_tokens",)
    for name in names:
        response = await http.post(url, json=body(url, stream=stream, **{name: value}))
        error = error_of(response, 400)
        if value in (HUGE, 10**40):
            assert error["code"] == "context_length_exceeded"
        else:
            assert error["param"] == name
    assert (await http.get("/health")).status_code == 200


@both
async def test_without_a_limit_the_context_is_one(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str
) -> None:
    for value in (None, 7):
        await answer(client, url, max_tokens=value)
    free, limited = engine.submitted
    assert free.sampling.max_tokens == engine.ready.context_length - len(free.token_ids)
    assert limited.sampling.max_tokens == 7


@both
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("over", "asked"), [(0, None), (1, None), (-9, 10), (0, 1)])
async def test_what_exceeds_the_context_is_told_in_numbers(
    http: httpx.AsyncClient, url: str, over: int, asked: int | None, stream: bool
) -> None:
    """SV-08: prompt = max, max + 1, and prompt + max_tokens = max + 1."""
    limit = (await http.get("/v1/models")).json()["data"][0]["max_model_len"]
    around = (await answer(http, url, text="a", max_tokens=1))["usage"]["prompt_tokens"] - 1
    size = limit + over
    request = body(url, text="a" * (size - around), max_tokens=asked, stream=stream)
    error = error_of(await http.post(url, json=request), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if url == CHAT else "prompt")
    assert f"maximum context length is {limit} tokens" in error["message"]
    assert f"{size + (asked or 1)} tokens ({size} in" in error["message"]
    fits = body(url, text="a" * (limit - around - 1), max_tokens=1)
    assert (await http.post(url, json=fits)).status_code == 200


BROKEN = {
    "nothing": b"",
    "half": b'{"messages": [',
    "no object": b"[]",
    "null": b"null",
    "a word": b"hello",
    "not UTF-8": b'{"user": "\xff"}',
    "NaN": b'{"temperature": NaN}',
    "endless": b'{"temperature": 1e999}',
    "a key twice": b'{"user": "a", "user": "b"}',
    "half a pair": b'{"user": "\\ud83d"}',
    "half a pair as key": b'{"\\ud83d": 1}',
    "deep": b'{"user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "rather deep": b'{"user": ' + b"[" * 80 + b"]" * 80 + b"}",
    "long number": b'{"seed": ' + b"9" * 6000 + b"}",
    "two values": b"{} {}",
}


@both
@pytest.mark.parametrize("kind", BROKEN)
async def test_a_broken_body_is_400(http: httpx.AsyncClient, url: str, kind: str) -> None:
    """SV-07."""
    error = error_of(await http.post(url, content=BROKEN[kind], headers=JSON), 400)
    assert error["code"] == "invalid_json"


CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "elf", "content": "a"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0]",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"documents": [{"title": "a"}]}, "documents[0].text"),
    ({"documents": [{"text": "a", "content": "b"}]}, "documents[0].text"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
]
COMPLETION_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [100_000]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"suffix": "a"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"logprobs": True}, "logprobs"),
]
COMMON_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"seed": 1 << 63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [100_000]}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": False}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"salt": "mine"}, "salt"),
    ({"cache_salt": "mine"}, "cache_salt"),
    ({"redknot": {"policy": "magic"}}, "redknot.policy"),
    ({"redknot": {"policy": "question_drop:first=7"}}, "redknot.policy"),
    ({"redknot": {"salt": "mine"}}, "redknot.salt"),
    ({"redknot": {"question": "middle"}}, "redknot.question"),
    ({"redknot": {"exact": 1}}, "redknot.exact"),
]
FAULTS = [
    *((CHAT, *fault) for fault in CHAT_FAULTS),
    *((COMPLETIONS, *fault) for fault in COMPLETION_FAULTS),
    *((url, *fault) for url in ENDPOINTS for fault in COMMON_FAULTS),
]


@pytest.mark.parametrize(("url", "fields", "param"), FAULTS)
async def test_a_fault_is_named(
    http: httpx.AsyncClient, url: str, fields: dict[str, Any], param: str
) -> None:
    error = error_of(await http.post(url, json=body(url) | fields), 400)
    assert error["param"] == param


MANY = 20_000
SAID = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}
KEYS = {f"k{index}": 1 for index in range(MANY)}
NESTED = [["a"] * MANY] * 3
HEAVY: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{}] * MANY}, "messages[0]"),
    (CHAT, {"messages": [SAID, *[{"role": "elf"}] * MANY]}, "messages[1]"),
    (CHAT, {"messages": [SAID] * MANY}, "messages"),
    (CHAT, {"messages": [{**SAID, "content": [PART] * MANY}]}, "messages[0].content"),
    (CHAT, {"messages": [{**SAID, "content": [PART, *[5] * MANY]}]}, "messages[0].content[1]"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}] * MANY}]},
        "messages[0].tool_calls[0].function",
    ),
    (CHAT, {"messages": [{**SAID, **KEYS}]}, "messages[0].k0"),
    (CHAT, {"tools": [{"type": "function"}] * MANY}, "tools[0].function"),
    (CHAT, {"documents": [{"text": "a"}, *[{"text": 1}] * MANY]}, "documents[1].text"),
    (CHAT, {"documents": [{"text": "a"}] * MANY}, "documents"),
    (CHAT, {"metadata": KEYS}, "metadata"),
    (CHAT, {"response_format": {"type": "text", **KEYS}}, "response_format.k0"),
    (COMPLETIONS, {"prompt": ["a"] * MANY}, "prompt"),
    (COMPLETIONS, {"prompt": [5, *["a"] * MANY]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [-1] * MANY}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [{}] * MANY}, "prompt[0]"),
    (COMPLETIONS, {"prompt": NESTED}, "prompt[0][0]"),
    (COMPLETIONS, KEYS, "k0"),
    (COMPLETIONS, {"stop": [""] * MANY}, "stop[0]"),
    (COMPLETIONS, {"stop_token_ids": [-1] * MANY}, "stop_token_ids[0]"),
    ("/v1/segments", {"prompt": None, "documents": [{"text": ""}] * MANY}, "documents[0].text"),
]


@pytest.mark.parametrize(("url", "fields", "param"), HEAVY)
async def test_many_faults_are_one(
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    fields: dict[str, Any],
    param: str,
) -> None:
    """A complaint for each would take seconds, and hundreds of megabytes."""
    counts: list[int] = []
    original = errors._invalid

    def counted(found: Any, sent: Any) -> errors.ApiError:
        counts.append(len(found))
        return original(found, sent)

    monkeypatch.setattr(errors, "_invalid", counted)
    sent = {key: value for key, value in (body(url) | fields).items() if value is not None}
    assert error_of(await client.post(url, json=sent), 400)["param"] == param
    assert counts[0] < 10


@pytest.mark.parametrize("shape", [ChatRequest, CompletionRequest, SegmentRequest])
def test_every_list_of_a_body_ends_at_its_first_fault(shape: Any) -> None:
    found, left = [], [shape.__pydantic_core_schema__]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            found += [node] if node.get("type") == "list" else []
            left += node.values()
        elif isinstance(node, list | tuple):
            left += node
    assert found
    assert all(node.get("fail_fast") for node in found)


async def test_as_many_messages_as_are_allowed_are_read(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(CHAT, json={"messages": [SAID] * MAX_ITEMS}), 400)
    assert error["code"] == "context_length_exceeded"


RAISES = {
    "ZeroDivisionError": "{{ 1 // 0 }}",
    "IndexError": "{{ '{}'.format() }}",
    "AttributeError": "{{ 5 | dictsort }}",
    "OverflowError": "{{ 2.0 ** 99999 }}",
    "LookupError": "{{ 'a'.encode('nothing') }}",
    "RecursionError": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "TypeError": "{{ 1 + 'a' }}",
    "KeyError": "{{ '{a}'.format() }}",
    "TemplateError": "{{ raise_exception('no') }}",
}


def failing(fault: str) -> Any:
    """A tokenizer whose template fails where a text says so."""
    condition = "{% if 'boom' in messages[-1].content %}" + fault + "{% endif %}"
    return bytes_with(condition + "{% for one in messages %}{{ one.content }}{% endfor %}")


@pytest.mark.parametrize("kind", RAISES)
async def test_whatever_a_template_raises_is_the_requests_fault(opened: Any, kind: str) -> None:
    client = opened(tokenizer=failing(RAISES[kind]))
    error = error_of(await client.post(CHAT, json=body(CHAT, text="boom")), 400)
    assert "template" in error["message"]
    assert (await client.post(CHAT, json=body(CHAT, text="quiet"))).status_code == 200


async def test_too_little_memory_is_not_the_requests_fault(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = failing("")
    client = opened(tokenizer=tokenizer)

    def fail(*_: Any, **__: Any) -> str:
        raise MemoryError

    monkeypatch.setattr(tokenizer, "apply_chat_template", fail)
    error_of(await client.post(CHAT, json=body(CHAT)), 500)


NEUTRAL = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "user": "somebody",
    "n": 1,
    "seed": None,
    "stop": [],
    "stream": False,
    "stream_options": None,
    "temperature": None,
    "top_p": 1,
    "redknot": {},
}
CHAT_NEUTRAL = {
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "a",
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "parallel_tool_calls": True,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "logprobs": False,
    "top_logprobs": 0,
    "documents": [],
}


@both
async def test_neutral_values_change_nothing(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str
) -> None:
    fields = NEUTRAL | (CHAT_NEUTRAL if url == CHAT else {"best_of": 1, "suffix": None})
    first, second = await answer(client, url), await answer(client, url, **fields)
    assert text_of(first["choices"][0]) == text_of(second["choices"][0])
    plain, full = engine.submitted
    assert plain.sampling == full.sampling
    assert (plain.token_ids, plain.policy) == (full.token_ids, full.policy)
    assert plain.sampling.temperature == 1.0  # as OpenAI has it


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/segments/..%2f..%2fetc%2fpasswd", 404),
        ("DELETE", "/v1/segments/seg-0", 404),
    ],
)
async def test_wrong_addresses_are_told_in_the_same_shape(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    error_of(await http.request(method, path), status)


@both
async def test_another_model_is_not_found(http: httpx.AsyncClient, url: str) -> None:
    error = error_of(await http.post(url, json=body(url, model="other")), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@both
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_only_json_is_read(http: httpx.AsyncClient, url: str, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    content = json.dumps(body(url)).encode()
    error_of(await http.post(url, content=content, headers=headers), 415)


@both
@pytest.mark.parametrize("declared", [True, False])
async def test_a_large_body_is_refused_before_it_is_read(
    opened: Any, url: str, declared: bool
) -> None:
    client, taken = opened(max_body_bytes=1000), []

    async def parts() -> Any:
        for _ in range(50):
            taken.append(100)
            yield b" " * 100

    content = b" " * 5000 if declared else parts()
    error_of(await client.post(url, content=content, headers=JSON), 413)
    assert sum(taken) <= 1200
    fits = json.dumps(body(url)).encode().ljust(1000)
    assert (await client.post(url, content=fits, headers=JSON)).status_code == 200


NAMES = """
    messages prompt role content type text model max_tokens n stop stream stream_options temperature
    top_p tools tool_choice response_format json_schema schema documents redknot policy logprobs
    echo stop_token_ids id title seed logit_bias
"""
names = st.sampled_from(NAMES.split())
words = st.sampled_from(["user", "assistant", "tool", "text", "segment", "json_schema", "auto"])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | words
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | st.text(), inner),
    max_leaves=12,
)


@pytest.mark.parametrize("url", [*ENDPOINTS, "/v1/segments"])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=st.dictionaries(names, values, max_size=4), other=values)
async def test_no_json_is_answered_with_5xx(url: str, fields: dict[str, Any], other: Any) -> None:
    service = service_over(ScriptedEngine())
    transport = httpx.ASGITransport(build_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://redknot") as client:
        for sent in (body(url) | {"max_tokens": 3} | fields, fields, other):
            content = json.dumps(sent).encode()
            response = await client.post(url, content=content, headers=JSON)
            assert response.status_code < 500, (sent, response.text)
            if response.status_code != 200:
                error_of(response, response.status_code)
    service.close()


@given(data=st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
async def test_no_bytes_are_answered_with_5xx(data: bytes) -> None:
    service = service_over(ScriptedEngine())
    transport = httpx.ASGITransport(build_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://redknot") as client:
        for url, kind in (
            (CHAT, JSON),
            ("/v1/segments/batch", {"Content-Type": "application/jsonl"}),
        ):
            response = await client.post(url, content=data, headers=kind)
            assert response.status_code < 500, response.text
    service.close()
