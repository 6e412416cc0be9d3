"""Reuse as clients see it, from a real server: hits, cached tokens, tenants."""

import random
import unicodedata
from collections.abc import Callable
from itertools import count
from typing import Any

import httpx
import pytest
from tests.server.asked import CHAT, COMPLETIONS, ENDPOINTS, error_of, events
from tests.server.running import KEYS, Running, wait

from redknot.models.byte_tokenizer import byte_tokenizer

SEGMENTS = "/v1/segments"
both = pytest.mark.parametrize("url", ENDPOINTS)
streamed = pytest.mark.parametrize("stream", [True, False])
numbers = count()
TOKENIZER = byte_tokenizer(add_bos=True)


def words(num_chars: int = 200) -> str:
    """Text that no other test has."""
    draw = random.Random(next(numbers))
    letters = [draw.choice("abcdefghij klmnop rstuvw ") for _ in range(num_chars - 2)]
    return "X" + "".join(letters) + "."


def asked(url: str, documents: list[str], question: str, **fields: Any) -> dict[str, Any]:
    """Texts and a question behind a beginning that no other prompt has; one string or parts."""
    request = {"max_tokens": 2, "temperature": 0, "redknot": {}, **fields}
    if url == COMPLETIONS:
        return {"prompt": "\n\n".join([words(40), *documents, question]), **request}
    parts = [{"type": "document", "text": one} for one in documents]
    content = [{"type": "text", "text": words(40)}, *parts, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}], **request}


def told(client: httpx.Client, url: str, request: dict[str, Any]) -> dict[str, Any]:
    """Usage and report, however they come."""
    if not request.get("stream"):
        response = client.post(url, json=request)
        assert response.status_code == 200, response.text
        return response.json()
    request = {**request, "stream_options": {"include_usage": True}}
    *_, last, usage = events(client.post(url, json=request).text)
    return {"redknot": last["redknot"], "usage": usage["usage"]}


def cached(answer: dict[str, Any]) -> int:
    """Cached tokens, told twice in the same way."""
    number = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert number == answer["redknot"]["cached_tokens"]
    assert 0 <= number <= answer["usage"]["prompt_tokens"]
    return number


@both
@streamed
def test_cold_half_warm_and_warm(lean: Running, url: str, stream: bool) -> None:
    """SV-14; RU-05: what stands in front of a document does not matter."""
    first, second = words(), words()
    with lean.http() as client:
        cold = told(client, url, asked(url, [first], "Who?", stream=stream))
        lean.until_idle()
        half = told(client, url, asked(url, [first, second], "Who is it?", stream=stream))
        lean.until_idle()
        warm = told(client, url, asked(url, [second, first], "When?", stream=stream))
    assert cached(cold) == 0
    assert {one["reason"] for one in cold["redknot"]["segments"]} == {"not stored"}
    assert 0 < cached(half) < cached(warm)
    assert [one["hit"] for one in half["redknot"]["segments"]].count("device") >= 1
    found = [one for one in warm["redknot"]["segments"] if one["stop"] - one["start"] >= 150]
    assert [one["hit"] for one in found] == ["device"] * 2


@streamed
def test_an_exact_beginning_counts_in_full(real: Running, stream: bool) -> None:
    """SV-14: the same prompt again, computed but for its last token."""
    request = asked(CHAT, [words()], "Who?", stream=stream, redknot={"policy": "prefix"})
    with real.http() as client:
        assert cached(told(client, CHAT, request)) < 20  # what all prompts of these tests share
        again = told(client, CHAT, request)
    assert cached(again) == again["usage"]["prompt_tokens"] - 1


def spaced(text: str) -> str:
    return f"  \n\t {text} \n\n "


def composed(form: str) -> Callable[[str], str]:
    return lambda text: unicodedata.normalize(form, f"Žluťoučký kůň, {text}")


FORMS: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "blanks": spaced,
    "lines": lambda text: f"{text}\r\nnext\r\n\r\n{text[:40]}\r\n",
    "composed": composed("NFC"),
    "decomposed": composed("NFD"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_registered_text_is_found_wherever_it_stands(real: Running, form: str) -> None:
    """RU-21: by id, in `documents` and as a part, in front, between and at the end."""
    text, question = FORMS[form](words()), {"type": "text", "text": "  Who?"}
    with real.http() as client:
        made = client.post(SEGMENTS, json={"text": text, "title": "bridge"}).json()
        assert made["state"] == "ready"
        part = {"type": "document", "text": text, "title": "bridge"}
        by_id = {"type": "segment", "id": made["id"]}
        for one in (by_id, part):
            lead = {"type": "text", "text": words(30)}
            for content in ([one, question], [lead, one, question], [question, lead, one]):
                assert_hit(client, made["tokens"], content)
            assert_hit(client, made["tokens"], [lead, one, by_id], times=2)
        assert_hit(client, made["tokens"], "Who?", documents=[{"text": text, "title": "bridge"}])


def assert_hit(
    client: httpx.Client, tokens: int, content: Any, *, times: int = 1, **fields: Any
) -> None:
    system = {"role": "system", "content": words(30)}  # no beginning of another prompt
    messages = [system, {"role": "user", "content": content}]
    request = {"messages": messages, "max_tokens": 1, "redknot": {}, **fields}
    segments = told(client, CHAT, request)["redknot"]["segments"]
    assert [(one["hit"], one["stop"] - one["start"], one["title"]) for one in segments] == [
        ("device", tokens, "bridge")
    ] * times


def test_tenants_share_nothing(real: Running) -> None:
    """SE-01: a cold, b cold, a warm, b warm by its own; a salt of the client's is refused."""
    document = words()
    found = []
    for key in (KEYS[0], KEYS[1], KEYS[0]):
        with real.http(key) as client:
            found.append(cached(told(client, CHAT, asked(CHAT, [document], "Who?"))))
            error_of(client.post(CHAT, json=asked(CHAT, [document], "?", cache_salt="x")), 400)
            if len(found) == 1:
                real.until_idle()
    assert max(found[:2]) < 20  # what all prompts of these tests share
    assert found[2] > 100


def test_tenants_share_no_beginnings(real: Running) -> None:
    """SE-01: the same prompt word for word."""
    request = asked(CHAT, [words()], "Who?", redknot={"policy": "prefix"})
    found = []
    for key in (KEYS[0], KEYS[1], KEYS[0]):
        with real.http(key) as client:
            found.append(cached(told(client, CHAT, request)))
    assert max(found[:2]) < 20
    assert found[2] > 200


def test_segments_of_tenants_are_apart(real: Running) -> None:
    """SE-01: list, look, use and delete."""
    text = words()
    with real.http(KEYS[0]) as mine, real.http(KEYS[1]) as others:
        made = mine.post(SEGMENTS, json={"text": text}).json()
        path = f"{SEGMENTS}/{made['id']}"
        assert made["id"] not in {one["id"] for one in others.get(SEGMENTS).json()["data"]}
        error_of(others.get(path), 404)
        error_of(others.delete(path), 404)
        content = [{"type": "segment", "id": made["id"]}, {"type": "text", "text": "Who?"}]
        request = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        error_of(others.post(CHAT, json=request), 404)
        theirs = others.post(SEGMENTS, json={"text": text}).json()
        assert theirs["id"] != made["id"]
        assert mine.delete(path).json()["deleted"]
        error_of(mine.get(path), 404)
        assert others.get(f"{SEGMENTS}/{theirs['id']}").json()["state"] == "ready"
        assert cached(told(mine, CHAT, asked(CHAT, [text], "Who?"))) < 20
        assert cached(told(others, CHAT, asked(CHAT, [text], "Who?"))) > 100


@both
def test_begins_with_one_bos_and_no_segment_holds_one(real: Running, url: str) -> None:
    """SV-12: ids as the tokenizer alone gives them."""
    document, question = words(), "Who?"
    with real.http() as client:
        if url == CHAT:
            messages = [{"role": "user", "content": "Who?"}]
            ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            plain = told(client, url, {"messages": messages, "max_tokens": 1, "redknot": {}})
        else:
            ids = TOKENIZER(question).input_ids
            plain = told(client, url, {"prompt": question, "max_tokens": 1, "redknot": {}})
        assert ids.count(TOKENIZER.bos_token_id) == 1
        assert plain["usage"]["prompt_tokens"] == len(ids)
        request = asked(url, [document, document], question)
        segments = told(client, url, request)["redknot"]["segments"]
    assert len(segments) >= 2
    assert all(one["start"] > 0 for one in segments)


def test_what_is_too_short_is_told(real: Running) -> None:
    """SV-22: the least length when it starts, the reason in the answer, the miss as a metric."""
    smallest = int(real.announced.split("smallest unmarked segment ")[1].split()[0])
    missed = real.counter("redknot:missed_tokens_total")
    with real.http() as client:
        short = words(smallest - 3)  # with the blank line one less than it
        for _ in range(2):
            prompt = f"{words(10)}\n\n{short}\n\nWho?"
            request = {"prompt": prompt, "max_tokens": 1, "redknot": {}}
            answer = told(client, COMPLETIONS, request)
            assert short not in [prompt[one["start"] : one["stop"]] for one in segments_of(answer)]
            assert cached(answer) < 20
        marked = told(client, CHAT, asked(CHAT, [short], "Who?"))
    assert [one["reason"] for one in segments_of(marked)] == ["not stored"]
    wait(lambda: real.counter("redknot:missed_tokens_total") >= missed + smallest - 3)


def segments_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return answer["redknot"]["segments"]
