"""Usage counts, always with the cached share."""

from typing import Any

import httpx
import pytest
from tests.server.asked import ENDPOINTS, answer, chunks
from tests.server.scripted import ScriptedEngine

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("url", ENDPOINTS)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
async def test_cached_tokens_are_always_told(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str, share: float
) -> None:
    """SV-14: cold, half-warm and warm, plain and streamed."""
    engine.cached = share
    plain = (await answer(client, url))["usage"]
    streamed = (await chunks(client, url, stream_options={"include_usage": True}))[-1]["usage"]
    assert plain == streamed
    check(plain, len(engine.submitted[0].token_ids))
    size = plain["prompt_tokens"]
    assert plain["prompt_tokens_details"]["cached_tokens"] == int(size * share)


def check(usage: dict[str, Any], size: int) -> None:
    assert usage["prompt_tokens"] == size
    assert usage["total_tokens"] == size + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= size


@pytest.mark.parametrize("url", ENDPOINTS)
async def test_every_chunk_tells_the_usage_so_far_where_that_is_asked_for(
    client: httpx.AsyncClient, url: str
) -> None:
    """As load generators do; it never falls, and ends with that of the plain answer."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = [chunk["usage"] for chunk in await chunks(client, url, stream_options=options)]
    counts = [usage["completion_tokens"] for usage in told]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert told[-1] == (await answer(client, url))["usage"]
    for usage in told:
        check(usage, told[-1]["prompt_tokens"])
