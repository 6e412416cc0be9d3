"""Messages of every form become the prompt that was meant."""

from typing import Any

import httpx
import pytest
from tests.server.asked import CHAT, COMPLETIONS, answer, chunks, error_of
from tests.server.scripted import TOKENIZER, ScriptedEngine

from redknot.server.service import ROUNDING

pytestmark = pytest.mark.anyio
DOCUMENT = "The bridge was built in 1904 of red stone. " * 6
TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A bridge."},
    {"role": "user", "content": "Since when?"},
]


def listed(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": [{"type": "text", "text": message["content"]}]}


async def asked(
    client: httpx.AsyncClient, engine: ScriptedEngine, messages: Any, **fields: Any
) -> str:
    """The prompt that the engine got, as text."""
    response = await client.post(CHAT, json={"messages": messages, "max_tokens": 4, **fields})
    assert response.status_code == 200, response.text
    return str(TOKENIZER.decode(engine.submitted[-1].token_ids))


async def test_lists_of_texts_are_as_strings(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """SV-18: over three turns, twice."""
    plain = await asked(client, engine, TURNS)
    for _ in range(2):
        assert await asked(client, engine, [listed(turn) for turn in TURNS]) == plain
    expected = TOKENIZER.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert plain == expected


@pytest.mark.parametrize("content", ["", None, []])
async def test_an_empty_answer_is_a_turn(
    client: httpx.AsyncClient, engine: ScriptedEngine, content: Any
) -> None:
    """SV-19."""
    turns = [TURNS[1], {"role": "assistant", "content": content}, TURNS[3]]
    assert "<|assistant|><|end|><|user|>Who" in await asked(client, engine, turns)


async def test_what_a_client_got_it_may_send_back(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    message = (await answer(client, CHAT))["choices"][0]["message"]
    full = message | {"annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    turns = [TURNS[1], full, TURNS[3]]
    assert message["content"] in await asked(client, engine, turns)


async def test_a_developer_is_the_system(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    turns = [TURNS[0] | {"role": "developer"}, *TURNS[1:]]
    assert await asked(client, engine, turns) == await asked(client, engine, TURNS)


def text_of_spans(engine: ScriptedEngine) -> list[str]:
    request = engine.submitted[-1]
    return [TOKENIZER.decode(request.token_ids[one.start : one.stop]) for one in request.spans]


PARTS = [
    {"type": "document", "text": DOCUMENT, "title": "bridge"},
    {"type": "text", "text": DOCUMENT, "cache_control": {"type": "ephemeral"}},
]


@pytest.mark.parametrize("part", PARTS)
async def test_marked_parts_are_segments(
    client: httpx.AsyncClient, engine: ScriptedEngine, part: dict[str, Any]
) -> None:
    content = [part, {"type": "text", "text": "When?"}]
    await asked(client, engine, [{"role": "user", "content": content}])
    (text,) = text_of_spans(engine)
    assert DOCUMENT.strip() in text
    assert "When?" not in text
    (span,) = engine.submitted[-1].spans
    assert span.title == part.get("title", "")


@pytest.mark.parametrize("name", ["text", "content"])
async def test_documents_are_segments(
    client: httpx.AsyncClient, engine: ScriptedEngine, name: str
) -> None:
    documents = [{"title": "a", name: DOCUMENT}, {name: DOCUMENT.upper()}]
    await asked(client, engine, [{"role": "user", "content": "When?"}], documents=documents)
    first, second = text_of_spans(engine)
    assert DOCUMENT.strip() in first
    assert DOCUMENT.upper().strip() in second
    start, stop = engine.submitted[-1].probe
    assert "When?" in TOKENIZER.decode(engine.submitted[-1].token_ids[start:stop])


async def test_a_registered_text_is_a_part(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    made = (await client.post("/v1/segments", json={"text": DOCUMENT, "title": "b"})).json()
    parts = [{"type": "segment", "id": made["id"]}, {"type": "text", "text": "When?"}]
    await asked(client, engine, [{"role": "user", "content": parts}])
    (text,) = text_of_spans(engine)
    assert DOCUMENT.strip() in text
    unknown = [{"type": "segment", "id": "seg-0"}]
    request = {"messages": [{"role": "user", "content": unknown}]}
    error = error_of(await client.post(CHAT, json=request), 404)
    assert error["param"] == "messages[0].content[0].id"


@pytest.mark.parametrize(
    ("wanted", "kind", "schema"),
    [
        ({"type": "json_object"}, "json_object", ""),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}},
            "json_schema",
            '{"type": "array"}',
        ),
    ],
)
async def test_formats_become_grammars(
    client: httpx.AsyncClient, engine: ScriptedEngine, wanted: Any, kind: str, schema: str
) -> None:
    await answer(client, CHAT, response_format=wanted)
    grammar = engine.submitted[-1].sampling.grammar
    assert (grammar.kind, grammar.schema) == (kind, schema)


async def test_log_probabilities_spell_the_answer(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    plain = (await answer(client, CHAT, logprobs=True, top_logprobs=2))["choices"][0]
    told = plain["logprobs"]["content"]
    spelled = bytes(byte for token in told for byte in token["bytes"])
    assert spelled.decode() == plain["message"]["content"] == engine.text
    assert {len(token["top_logprobs"]) for token in told} == {2}
    assert "\ufffd" not in "".join(token["token"] for token in told)
    found = await chunks(client, CHAT, logprobs=True, top_logprobs=2)
    parts = [chunk["choices"][0]["logprobs"] for chunk in found]
    assert [token for part in parts if part for token in part["content"]] == told


async def test_log_probabilities_end_before_a_stop_string(client: httpx.AsyncClient) -> None:
    plain = (await answer(client, CHAT, logprobs=True, stop="built"))["choices"][0]
    told = plain["logprobs"]["content"]
    assert "".join(token["token"] for token in told) == plain["message"]["content"]


async def test_log_probabilities_of_completions(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    plain = (await answer(client, COMPLETIONS, logprobs=1, max_tokens=9))["choices"][0]
    told = plain["logprobs"]
    assert "".join(told["tokens"]) == plain["text"] == engine.text[:9]
    assert told["text_offset"] == list(range(9))
    assert told["token_logprobs"] == [-0.5] * 9
    assert [len(top) for top in told["top_logprobs"]] == [1] * 9


async def test_many_prompts_and_their_choices(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    for prompts in (["ab", "cd", "ef"], [[65, 66], [67], [68]]):
        request = {"prompt": prompts, "n": 2, "max_tokens": 5, "echo": True}
        found = (await client.post(COMPLETIONS, json=request)).json()
        texts = [one if isinstance(one, str) else TOKENIZER.decode(one) for one in prompts]
        assert [choice["index"] for choice in found["choices"]] == list(range(6))
        expected = [text + engine.text[:5] for text in texts for _ in range(2)]
        assert [choice["text"] for choice in found["choices"]] == expected
        assert found["usage"]["completion_tokens"] == 30
        sent = [len(one.token_ids) for one in engine.submitted[-3:]]
        assert found["usage"]["prompt_tokens"] == sum(sent)


async def test_options_reach_the_engine(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    options = {"policy": "epic", "exact": True}
    sampling = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "n": 2, "max_tokens": 3}
    await answer(client, CHAT, redknot=options, **sampling)
    (request,) = engine.submitted
    assert (request.policy, request.exact, request.salt) == ("epic", True, "")
    assert {name: getattr(request.sampling, name) for name in sampling} == sampling


@pytest.mark.parametrize("n", [None, 1, 2, 7, 16])
async def test_choices_share_the_pool_where_no_length_is_asked_for(
    client: httpx.AsyncClient, engine: ScriptedEngine, n: int | None
) -> None:
    """So that no number of them is refused for what nobody asked for."""
    for url in (CHAT, COMPLETIONS):
        await answer(client, url, n=n, max_tokens=None)
        asked, ready = engine.submitted[-1], engine.ready
        room = ready.context_length - len(asked.token_ids)
        most = asked.sampling.max_tokens
        if n in (None, 1):
            assert most == room
            continue
        assert n is not None
        assert len(asked.token_ids) + n * (most + ROUNDING) <= ready.pool_tokens
        assert most == room or n * (most + 1 + ROUNDING) > ready.pool_tokens - len(asked.token_ids)
