"""Whatever the schema allows, and what it does not, is never answered with 5xx."""

import json

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from tests.server.conftest import service_over
from tests.server.scripted import ScriptedEngine

from redknot.server.app import build_app


@schemathesis.serializer("application/x-ndjson")
def as_line(ctx: schemathesis.SerializationContext, value: object) -> bytes:
    return json.dumps(value).encode()


app = build_app(service_over(ScriptedEngine()))
schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_5xx(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=[not_a_server_error])


def test_every_field_is_documented() -> None:
    shapes = app.openapi()["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "SegmentRequest"):
        assert shapes[name]["additionalProperties"] is False
        assert len(shapes[name]["properties"]) >= 3
