"""Registered texts: made, listed, looked at, deleted, and many at once."""

import json

import httpx
import pytest
from tests.server.asked import error_of
from tests.server.conftest import Opened
from tests.server.scripted import ScriptedEngine

from redknot.server.registry import ENTRY_BYTES, Registered, Registry

pytestmark = pytest.mark.anyio
PATH = "/v1/segments"
TEXT = "The bridge was built in 1904. " * 5
LINES = {"Content-Type": "application/x-ndjson"}


async def test_a_text_is_registered_once(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    made = (await client.post(PATH, json={"text": TEXT, "title": "bridge"})).json()
    again = (await client.post(PATH, json={"text": TEXT, "title": "bridge"})).json()
    other = (await client.post(PATH, json={"text": TEXT, "title": "house"})).json()
    assert made["id"] == again["id"] != other["id"]
    assert made["object"] == "segment"
    assert made["state"] == "ready"
    assert made["tokens"] >= len(TEXT.strip())
    listed = (await client.get(PATH)).json()
    assert {one["id"] for one in listed["data"]} == {made["id"], other["id"]}


async def test_a_deleted_text_is_gone(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    made = (await client.post(PATH, json={"text": TEXT})).json()
    path = f"{PATH}/{made['id']}"
    assert (await client.get(path)).json() == made
    gone = (await client.delete(path)).json()
    assert gone == {"id": made["id"], "object": "segment", "deleted": True}
    assert engine.stored == {}
    error_of(await client.get(path), 404)
    error_of(await client.delete(path), 404)


async def test_what_the_engine_evicted_is_absent_and_can_be_deleted(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    made = (await client.post(PATH, json={"text": TEXT})).json()
    engine.stored.clear()
    path = f"{PATH}/{made['id']}"
    assert (await client.get(path)).json()["state"] == "absent"
    assert (await client.delete(path)).json()["deleted"]


async def test_a_state_that_others_stand_for_stays(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """Texts that differ in blanks alone are one segment to the engine."""
    made = [(await client.post(PATH, json={"text": one})).json() for one in (TEXT, f" {TEXT}")]
    assert made[0]["id"] != made[1]["id"]
    assert len(engine.stored) == 1
    await client.delete(f"{PATH}/{made[0]['id']}")
    assert (await client.get(f"{PATH}/{made[1]['id']}")).json()["state"] == "ready"
    await client.delete(f"{PATH}/{made[1]['id']}")
    assert engine.stored == {}


async def test_many_in_one_request(client: httpx.AsyncClient) -> None:
    documents = [{"text": f"{TEXT} {at}", "title": str(at)} for at in range(3)]
    made = (await client.post(PATH, json={"documents": documents})).json()
    assert [one["title"] for one in made["data"]] == ["0", "1", "2"]


async def test_each_line_of_a_batch_is_answered(client: httpx.AsyncClient) -> None:
    lines = [
        json.dumps({"text": TEXT, "title": "a"}),
        '{"text": ',
        "",
        '{"text": "a", "salt": "b"}',
        '{"text": " "}',
        json.dumps({"text": TEXT + "b"}),
    ]
    response = await client.post(f"{PATH}/batch", content="\n".join(lines), headers=LINES)
    made = response.json()
    assert response.status_code == 200
    assert made["failed"] == 3
    assert ["error" in one for one in made["data"]] == [False, True, True, True, False]
    assert "salt" in made["data"][2]["error"]["message"]


async def test_bad_bodies(client: httpx.AsyncClient) -> None:
    for body in ({}, {"text": ""}, {"text": TEXT, "documents": [{"text": TEXT}]}, {"text": " "}):
        error_of(await client.post(PATH, json=body), 400)
    error_of(await client.post(f"{PATH}/batch", json={"text": TEXT}), 415)
    error_of(await client.post(f"{PATH}/batch", content=b"\n\n", headers=LINES), 400)


async def test_the_oldest_give_way(opened: Opened) -> None:
    client = opened(max_registered_bytes=4 * (len(TEXT) + ENTRY_BYTES))
    ids = []
    for at in range(6):
        text = TEXT[:-1] + str(at)
        ids.append((await client.post(PATH, json={"text": text})).json()["id"])
    kept = [one["id"] for one in (await client.get(PATH)).json()["data"]]
    assert kept == ids[2:]


def test_tiny_texts_are_bounded_too() -> None:
    registry = Registry(20 * ENTRY_BYTES)
    for at in range(1000):
        registry.add("", Registered(id=str(at), text="a", title="", keys=(), num_tokens=1))
    kept = registry.of_tenant("")
    assert [entry.id for entry in kept] == [str(at) for at in range(981, 1000)]
    for entry in kept:
        registry.remove("", entry.id)
    assert registry._size == 0
