"""Keys, and tenants that see nothing of each other."""

from typing import Any

import httpx
import pytest
from tests.server.asked import CHAT, ENDPOINTS, answer, body, error_of
from tests.server.conftest import Opened
from tests.server.scripted import ScriptedEngine

from redknot.errors import InputError
from redknot.server.auth import Keyring
from redknot.server.settings import ServerSettings

pytestmark = pytest.mark.anyio
KEYS = ("first-key-1", "other-key-2")
GUARDED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/v1/segments"),
    ("GET", "/v1/segments"),
    ("GET", "/v1/segments/seg-0"),
    ("DELETE", "/v1/segments/seg-0"),
    ("POST", "/v1/segments/batch"),
    ("GET", "/metrics"),
    ("GET", "/live"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("GET", "/health/"),
]
WRONG = [
    "",
    "Bearer",
    "Bearer ",
    "Bearer wrong-key",
    f"Basic {KEYS[0]}",
    f"Bearer:{KEYS[0]}",
    KEYS[0],
    "Bearer first-key-",
]


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_without_a_key_there_is_nothing(opened: Opened, method: str, path: str) -> None:
    """SE-07."""
    client = opened(api_key=KEYS)
    for shown in WRONG:
        headers = {"Authorization": shown} if shown else {}
        response = await client.request(method, path, headers=headers)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    response = await client.request(method, path, headers={"Authorization": f"bearer {KEYS[1]}"})
    assert response.status_code != 401


@pytest.mark.parametrize("path_of_host", ["/health", "/", "/health/", "//health"])
@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_no_host_header_opens_a_route(
    opened: Opened, method: str, path: str, path_of_host: str
) -> None:
    """A URL is built from it, with the path that it names."""
    client = opened(api_key=KEYS)
    for end in ("?", "#", ""):
        headers = {"Host": f"x{path_of_host}{end}"}
        error_of(await client.request(method, path, headers=headers), 401)


async def test_health_and_the_page_need_no_key_and_tell_nothing(opened: Opened) -> None:
    client = opened(api_key=KEYS)
    assert (await client.get("/health")).json() == {"status": "ok"}
    page = await client.get("/")
    assert page.status_code == 200
    assert "tiny" not in page.text


def test_every_route_is_guarded_or_known(opened: Opened) -> None:
    """A new route has to stand in the list above."""
    paths = set(opened()._transport.app.openapi()["paths"]) - {"/health"}
    listed = {path for _, path in GUARDED}
    examples = {path.format(model="tiny", segment="seg-0") for path in paths}
    assert examples <= listed


async def test_tenants_have_salts_of_their_own(opened: Opened, engine: ScriptedEngine) -> None:
    for key in (*KEYS, KEYS[0]):
        await answer(opened(key, api_key=KEYS), CHAT)
    first, other, again = (request.salt for request in engine.submitted)
    assert first == again != other
    assert len(first) == len(other) == 64
    assert not any(key in salt for key in KEYS for salt in (first, other))


@pytest.mark.parametrize("url", ENDPOINTS)
@pytest.mark.parametrize("name", ["salt", "cache_salt", "tenant"])
async def test_a_client_sets_no_salt(
    opened: Opened, engine: ScriptedEngine, url: str, name: str
) -> None:
    client = opened(KEYS[0], api_key=KEYS)
    error_of(await client.post(url, json=body(url, **{name: "x"})), 400)
    await client.post(url, json=body(url), headers={"X-Salt": "x", "X-Tenant": "x"})
    (request,) = engine.submitted
    assert request.salt == Keyring(KEYS).tenant(f"Bearer {KEYS[0]}").salt


async def test_segments_belong_to_their_tenant(opened: Opened) -> None:
    mine, others = opened(KEYS[0], api_key=KEYS), None
    app = mine._transport.app
    others = httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://redknot",
        headers={"Authorization": f"Bearer {KEYS[1]}"},
    )
    made = (await mine.post("/v1/segments", json={"text": "a bridge " * 20})).json()
    assert (await others.get("/v1/segments")).json()["data"] == []
    path = f"/v1/segments/{made['id']}"
    error_of(await others.get(path), 404)
    error_of(await others.delete(path), 404)
    content = [{"type": "segment", "id": made["id"]}]
    request = {"messages": [{"role": "user", "content": content}]}
    error_of(await others.post(CHAT, json=request), 404)
    assert (await mine.post(CHAT, json=request)).status_code == 200
    same = (await others.post("/v1/segments", json={"text": "a bridge " * 20})).json()
    assert same["id"] != made["id"]
    assert (await mine.get(path)).json() == made


@pytest.mark.parametrize("keys", [("",), ("short",), ("with\nnewline",), ("höchst geheim",)])
def test_weak_keys_are_refused_at_the_start(keys: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="api-key"):
        ServerSettings(api_key=keys)


def test_the_default_is_loopback() -> None:
    """SE-07."""
    assert ServerSettings().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-1.2_3", True), ("a" * 64, True), ("a" * 65, False), ("a b", False), ('a"b', False)],
)
async def test_only_harmless_request_ids_are_echoed(
    client: httpx.AsyncClient, given: str, echoed: bool
) -> None:
    response: Any = await client.get("/health", headers={"X-Request-Id": given})
    assert (response.headers["x-request-id"] == given) is echoed
