"""The engine's process: it drains, it dies, it hangs, and its clients are told."""

import asyncio
import contextlib
import os
import pickle
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import random_ids, tiny_hf

from redknot.engine.client import EngineClient, EngineGone, new_request_id
from redknot.engine.config import EngineConfig, GateConfig
from redknot.engine.messages import Ended, Heartbeat, Produced, SamplingSpec, Submit
from redknot.models.byte_tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk."""
    path = tmp_path_factory.mktemp("model")
    tiny_hf().save_pretrained(path)
    byte_tokenizer(add_bos=True).save_pretrained(path)
    return path


def config(folder: Path, **options: Any) -> EngineConfig:
    gate = GateConfig(skip=True, allow_unverified=True)
    plain: dict[str, Any] = {"gate": gate, "pool_bytes": 16 << 20, "policy": "prefix"}
    return EngineConfig(model=str(folder), **(plain | options))


@asynccontextmanager
async def engine(folder: Path, **options: Any) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(config(folder, **options))
    try:
        yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(client.process_id, signal.SIGCONT)
        await client.close(0.0)


def submit(tokens: int = 40, max_tokens: int = 8, seed: int = 0) -> Submit:
    ids = [256, *random_ids(tokens - 1, seed).tolist()]
    return Submit(
        request_id=new_request_id(),
        token_ids=ids,
        probe=(tokens - 1, tokens),
        sampling=SamplingSpec(max_tokens=max_tokens, ignore_eos=True),
        arrived=time.time(),
    )


async def tokens_of(client: EngineClient, request: Submit) -> list[int]:
    found: list[int] = []
    async for event in client.submit(request):
        if isinstance(event, Produced):
            found += [token.token_id for token in event.tokens]
        elif isinstance(event, Ended):
            assert event.reason == "length"
    return found


async def until(what: Callable[[], bool], seconds: float) -> None:
    async def wait() -> None:
        while not what():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(wait(), seconds)


def idle(client: EngineClient) -> bool:
    """By the last heartbeat."""
    told = client.latest
    return told.waiting == told.running == 0 and told.pool is not None and told.pool.requests == 0


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


def test_many_at_once_get_what_each_gets_alone(folder: Path) -> None:
    async def test() -> None:
        async with engine(folder) as client:
            alone = [await tokens_of(client, submit(seed=seed)) for seed in range(3)]
            requests = [submit(seed=seed % 3) for seed in range(24)]
            found = await asyncio.gather(*(tokens_of(client, one) for one in requests))
            assert found == [alone[index % 3] for index in range(24)]
            await until(lambda: idle(client), 2)
            assert client.latest.counters["requests.length"] == 27

    run(test())


def test_leaving_early_stops_the_work(folder: Path) -> None:
    async def test() -> None:
        async with engine(folder) as client:
            events = client.submit(submit(max_tokens=3000))
            async for event in events:
                if isinstance(event, Produced):
                    break
            await events.aclose()  # type: ignore[attr-defined]
            left = time.time()
            await until(lambda: client.latest.time > left and idle(client), 2)
            assert client.latest.counters["requests.cancelled"] == 1

    run(test())


def test_everybody_hears_at_once_that_the_process_was_killed(folder: Path) -> None:
    async def test() -> None:
        async with engine(folder) as client:
            waiting = [
                asyncio.create_task(tokens_of(client, submit(max_tokens=3000, seed=seed)))
                for seed in range(4)
            ]
            await until(lambda: client.latest.running > 0, 10)
            os.kill(client.process_id, signal.SIGKILL)
            ends = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 2)
            assert all(isinstance(end, EngineGone) for end in ends)
            assert not client.is_alive
            with pytest.raises(EngineGone):
                await tokens_of(client, submit())

    run(test())


def test_an_engine_that_hangs_is_not_alive_until_it_moves_again(folder: Path) -> None:
    async def test() -> None:
        async with engine(folder) as client:
            assert client.is_alive
            os.kill(client.process_id, signal.SIGSTOP)
            await until(lambda: not client.is_alive, 10)
            os.kill(client.process_id, signal.SIGCONT)
            await until(lambda: client.is_alive, 3)
            assert len(await tokens_of(client, submit())) == 8

    run(test())


def test_closing_lets_requests_end(folder: Path) -> None:
    async def test() -> None:
        async with engine(folder) as client:
            running = asyncio.create_task(tokens_of(client, submit(max_tokens=200)))
            await until(lambda: client.latest.running > 0, 10)
            await client.close(60)
            assert len(await running) == 200

    run(test())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"policy": "magic"}, "magic"),
        ({"policy": "redknot"}, "head map"),
        ({"pool_bytes": 1}, "pages"),
        ({"gate": GateConfig(skip=True)}, "unverified"),
        ({"model": "no/such/folder/here"}, "no/such/folder"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    folder: Path, options: dict[str, Any], word: str
) -> None:
    async def test() -> None:
        plain = config(folder, head_map="none")
        changed = EngineConfig(
            **({name: getattr(plain, name) for name in plain.__struct_fields__} | options)
        )
        with pytest.raises(EngineGone) as refused:
            await EngineClient.start(changed)
        assert word in str(refused.value)
        assert "\n" not in str(refused.value)

    run(test())


def test_a_long_prefill_shows_signs_of_life(folder: Path) -> None:
    async def test() -> None:
        async with engine(folder, pool_bytes=64 << 20) as client:
            seen: list[Heartbeat] = []
            task = asyncio.create_task(tokens_of(client, submit(6000, 1)))
            while not task.done():
                if not seen or seen[-1] is not client.latest:
                    seen.append(client.latest)
                await asyncio.sleep(0.01)
            times = [beat.time for beat in seen if beat.time]
            assert all(after - before < 1 for before, after in pairwise(times))
            assert len(times) > 1

    run(test())


class Bomb:
    """Touches a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_what_is_no_message_is_dropped(folder: Path, tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(folder) as client:
            send: Callable[[bytes], Awaitable[Any]] = client._socket.send
            bomb = pickle.dumps(Bomb(tmp_path / "loaded"))
            for junk in (b"", b"\x00" * 100, os.urandom(1000), bomb, b"\x81\xa4type\xa4Nope"):
                await send(junk)
            assert len(await tokens_of(client, submit())) == 8
            assert not (tmp_path / "loaded").exists()

    run(test())
