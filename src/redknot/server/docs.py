"""The API as a page that needs nothing from elsewhere, made of its OpenAPI document."""

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

router = APIRouter()
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code{background:#eee;padding:0 .2em}td{vertical-align:top;padding:.1em .8em .1em 0}"
)


@router.get("/docs", response_model=None, include_in_schema=False)
async def page(request: Request) -> Response:
    """Routes and the fields of their bodies."""
    html = "\n".join(_page(request.app.openapi()))
    return HTMLResponse(html, headers={"Content-Security-Policy": POLICY})


def _page(api: dict[str, Any]) -> Iterator[str]:
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
    yield f"<style>{STYLE}</style><h1>{title}</h1><p>{escape(api['info']['description'])}"
    yield "<p>For programs: <a href=openapi.json>openapi.json</a>"
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            yield f"<h3><code>{method.upper()} {escape(path)}</code></h3>"
            yield f"<p>{escape(route.get('description', ''))}"
            for kind, body in route.get("requestBody", {}).get("content", {}).items():
                yield f"<p>Body: {escape(kind)}, {_type(body['schema'])}"
    for name, shape in api["components"]["schemas"].items():
        if "properties" in shape:
            yield from _fields(name, shape)


def _fields(name: str, shape: dict[str, Any]) -> Iterator[str]:
    yield f"<h3 id={escape(name)}>{escape(name)}</h3><p>{escape(shape.get('description', ''))}"
    yield "<table>"
    for field, about in shape["properties"].items():
        due = "" if field not in shape.get("required", ()) else " (required)"
        yield f"<tr><td><code>{escape(field)}</code>{due}<td>{_type(about)}"
    yield "</table>"


def _type(about: dict[str, Any]) -> str:
    if "$ref" in about:
        name = escape(about["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    for union in ("anyOf", "oneOf"):
        if union in about:
            return " | ".join(_type(one) for one in about[union])
    if "enum" in about or "const" in about:
        values = about.get("enum", [about.get("const")])
        return " | ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    if about.get("type") == "array":
        return f"list of {_type(about.get('items', {}))}"
    return escape(str(about.get("type", "anything")))
