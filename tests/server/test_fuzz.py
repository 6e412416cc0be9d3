"""Broken bodies against a real server: no 5xx, and nothing left behind."""

import pytest
import schemathesis
from benchmarks.fuzz_server import fuzz, leaked, settled
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from tests.server.running import KEYS, Running
from tests.server.test_openapi import app

HEADERS = {"Authorization": f"Bearer {KEYS[0]}"}


@pytest.mark.anyio
async def test_broken_bodies_break_nothing(lean: Running) -> None:
    async with lean.client() as client:
        statuses, wrong = await fuzz(client, count=400, seed=0)
        told = await settled(lambda: client.get("/live"))
    assert wrong == []
    assert {200, 400, 415} <= set(statuses)
    assert (told["running"], told["waiting"], leaked(told)) == (0, 0, 0)


schema = schemathesis.openapi.from_dict(app.openapi())


@schema.parametrize()
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_5xx(lean: Running, case: schemathesis.Case) -> None:
    if isinstance(case.body, dict) and {"messages", "prompt"} & set(case.body):
        case.body.setdefault("max_tokens", 2)
    case.call_and_validate(base_url=lean.address, headers=HEADERS, checks=[not_a_server_error])
