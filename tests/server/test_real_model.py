"""The embedded model behind a real server: real tokens, and what reuse must not change."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.asked import CHAT, COMPLETIONS, ENDPOINTS, events, pieces, text_of
from tests.server.running import Running, wait
from tests.server.templates import embedded
from tests.server.test_real_answers import WORDS, forced
from tests.server.test_real_load import send
from tests.server.test_real_reuse import cached, told

from redknot.cli.demo import _documents

pytestmark = pytest.mark.model
BRIDGE, FERRY, *_ = [document.text for document in _documents()]
OPTIONS = ("--allow-unverified", "--gate-skip", "--pool-bytes", str(1 << 29))


def served(*options: str) -> Iterator[Running]:
    running = Running("embedded", *OPTIONS, *options).until_ready()
    yield running
    assert running.stop() == 0
    running.kill()


@pytest.fixture(scope="module")
def reusing() -> Iterator[Running]:
    """With the default policy, wherever it pays or not."""
    yield from served("--no-planned", "--prefix-share", "0")


@pytest.fixture(scope="module")
def dense() -> Iterator[Running]:
    yield from served("--policy", "dense", "--no-build-idle", "--prefix-share", "0")


@pytest.fixture
def client(reusing: Running) -> Iterator[httpx.Client]:
    with reusing.http() as client:
        yield client


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "document", "text": text} for text in texts]


def question(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("size", [0, 1, 3, 9])
def test_stop_strings_and_whole_characters(client: httpx.Client, size: int) -> None:
    """SV-02, SV-04: over tokens of several characters, and characters of several tokens."""
    whole = json.dumps(WORDS, ensure_ascii=False)
    stop = whole[22 : 22 + size]
    request = chat("Say it.", **forced(), **({"stop": [stop]} if size else {}))
    plain = client.post(CHAT, json=request).json()["choices"][0]
    stream = pieces(events(client.post(CHAT, json={**request, "stream": True}).text))
    expected = whole[: whole.index(stop)] if size else whole
    assert text_of(plain) == "".join(stream) == expected
    assert "\ufffd" not in "".join(stream)


@pytest.mark.parametrize("url", ENDPOINTS)
def test_one_bos_and_none_in_segments(client: httpx.Client, url: str) -> None:
    """SV-12: as many tokens as the tokenizer alone makes."""
    text = f"{BRIDGE}\n\nWho?"
    if url == CHAT:
        messages = [{"role": "user", "content": text}]
        ids = embedded().apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        found = told(client, url, chat(text, max_tokens=1, redknot={}))
    else:
        ids = embedded()(text).input_ids
        found = told(client, url, {"prompt": text, "max_tokens": 1, "redknot": {}})
    assert found["usage"]["prompt_tokens"] == len(ids)
    for one in found["redknot"]["segments"]:
        assert embedded().bos_token_id not in ids[one["start"] : one["stop"]]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("url", ENDPOINTS)
def test_one_string_is_reused_once_it_was_seen(reusing: Running, url: str, stream: bool) -> None:
    """SV-14, RU-05: texts that stand elsewhere, behind another question, in one string."""
    mark = f"({url} {stream})"  # texts of no other test, though of the same length
    first, second = (text.replace(".", f" {mark}.") for text in (BRIDGE, FERRY))

    def asked(*texts: str, ahead: str) -> dict[str, Any]:
        with reusing.http() as client:
            text = "\n\n".join([ahead, *texts, "Who is the owner?"])
            messages = [{"role": "user", "content": text}]
            fields = {"max_tokens": 1, "redknot": {}, "stream": stream, "temperature": 0}
            if url == COMPLETIONS:  # by a client that writes out the chat template
                settings = {"tokenize": False, "add_generation_prompt": True}
                written = embedded().apply_chat_template(messages, **settings)
                found = told(client, url, {"prompt": written, **fields})
            else:
                found = told(client, url, {"messages": messages, **fields})
        reusing.until_idle(90)
        return found

    cold = asked(first, ahead="Read this.")
    half = asked(first, second, ahead="Now read on.")
    warm = asked(second, first, ahead="And once more:")
    assert cached(cold) == 0
    assert 0 < cached(half) < cached(warm)
    size = len(embedded()(first).input_ids)
    reused = sum(
        one["stop"] - one["start"] - one["recomputed"] for one in warm["redknot"]["segments"]
    )
    assert reused > 0.5 * size


def test_exact_is_a_server_without_reuse(reusing: Running, dense: Running) -> None:
    """Log-probabilities equal in every bit, although the state of all documents is there."""
    fields = {"logprobs": True, "top_logprobs": 5, "max_tokens": 12}
    content = [*parts(BRIDGE, FERRY), question("Who is the owner?")]
    with reusing.http() as client, dense.http() as other:
        for text in (BRIDGE, FERRY):
            client.post("/v1/segments", json={"text": text}).raise_for_status()
        exact = client.post(CHAT, json=chat(content, **fields, redknot={"exact": True})).json()
        plain = other.post(CHAT, json=chat(content, **fields, redknot={"exact": True})).json()
        reused = client.post(CHAT, json=chat(content, **fields, redknot={})).json()
    assert cached(reused) > 0
    assert exact["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert exact["choices"] == plain["choices"]
    assert plain["redknot"]["policy"] == "dense"
    assert reused["choices"][0]["logprobs"] != plain["choices"][0]["logprobs"]


def test_company_changes_nothing(reusing: Running) -> None:
    """SV-20: greedy, in float32, alone and together."""
    requests = [chat(f"Say {at} words.", max_tokens=8 + at, logprobs=True) for at in range(8)]
    with reusing.http() as client:
        alone = [client.post(CHAT, json=request).json()["choices"][0] for request in requests]
        connections = [send(reusing, CHAT, request) for request in requests]
        together = [answer_on(connection) for connection in connections]
    for one, other in zip(alone, together, strict=True):
        assert one["message"]["content"] == other["message"]["content"]


def answer_on(connection: Any) -> dict[str, Any]:
    data = b""
    with connection:
        while b"\r\n\r\n" not in data:
            data += connection.recv(1 << 16)
        head, _, rest = data.partition(b"\r\n\r\n")
        size = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if b"ontent-length" in line.lower()
        )
        while len(rest) < size:
            rest += connection.recv(1 << 16)
    return json.loads(rest)["choices"][0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("url", ENDPOINTS)
def test_a_client_that_leaves_in_prefill(reusing: Running, url: str, stream: bool) -> None:
    """SV-10: a prompt that takes seconds."""
    reusing.until_idle(90)
    text = (BRIDGE + FERRY) * 6
    request = {"prompt": text} if url == COMPLETIONS else chat(text)
    options = {"stream": stream, "redknot": {"policy": "dense"}}
    connection = send(reusing, url, {**request, **options})
    wait(lambda: reusing.live()["running"] == 1)
    time.sleep(0.3)
    connection.close()
    wait(reusing.is_empty, 2)
