"""A RAG service's trace against a running server: time to first token with reuse and without.

    redknot serve embedded --port 8000
    python benchmarks/rag_trace.py --data triviaqa.jsonl squad.jsonl --json rag_trace.json

Every document stands in three prompts, each time among others and in another order. The first round
is the warm-up: the server sees each document for the first time and builds its state when idle. The
two rounds behind it are measured, then asked again with `{"exact": true}`, by as many clients.

With `--cold` only the first round is asked, by one client, each prompt once as it is and once with
`{"exact": true}`, in turn one or the other first: what first sight costs beside dense. Exact
requests leave nothing behind that others find.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import torch
from openai import AsyncOpenAI

from redknot.bench.machine import describe_machine
from redknot.evaluation.data import load_rows

ONE_STRING = (
    "Use the following pieces of context to answer the question at the end. If you don't know the"
    " answer, just say that you don't know.\n\n{context}\n\nQuestion: {question}\nHelpful Answer:"
)


@dataclass
class Ask:
    """One prompt of the trace."""

    question: str
    documents: list[tuple[str, str]]
    "Title and text."


@dataclass
class Seen:
    """What came of one request."""

    ttft: float
    prompt_tokens: int
    cached_tokens: int
    segments: int
    hits: int
    policy: str


def trace(files: list[Path], documents: int, per_prompt: int, seed: int) -> list[list[Ask]]:
    """Three rounds; in each of them every document stands in one prompt."""
    draw = random.Random(seed)
    pool: list[tuple[str, str, str]] = []
    for row in load_rows(files):
        for document in row.documents:
            words = document.text.split(" ")
            if len(words) >= 120:
                text = " ".join(words[:500])
                pool.append((document.title or row.id, text.strip(), row.question))
    draw.shuffle(pool)
    pool = pool[:documents]
    rounds = []
    for _ in range(3):
        draw.shuffle(pool)
        rounds.append(
            [
                Ask(group[0][2], [(title, text) for title, text, _ in group])
                for at in range(0, len(pool), per_prompt)
                if (group := pool[at : at + per_prompt])
            ]
        )
    return rounds


def body(ask: Ask, form: str) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Messages, and what goes beside them."""
    if form == "string":
        context = "\n\n".join(text for _, text in ask.documents)
        text = ONE_STRING.format(context=context, question=ask.question)
        return [{"role": "user", "content": text}], {}
    documents = [{"title": title, "text": text} for title, text in ask.documents]
    question = f"Question: {ask.question}\nAnswer with only a few words."
    return [{"role": "user", "content": question}], {"documents": documents}


async def one(client: AsyncOpenAI, model: str, ask: Ask, form: str, exact: bool) -> Seen:
    """Ask, and wait for the whole answer."""
    messages, beside = body(ask, form)
    start = time.perf_counter()
    stream = await client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={**beside, "redknot": {"exact": exact, "report": True}},
    )
    ttft, usage, report = None, None, None
    async for chunk in stream:
        if ttft is None and chunk.choices and chunk.choices[0].delta.content:
            ttft = time.perf_counter() - start
        usage = chunk.usage or usage
        report = (chunk.model_extra or {}).get("redknot") or report
    end = time.perf_counter() - start
    segments = (report or {}).get("segments", [])
    return Seen(
        ttft=ttft or end,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        segments=len(segments),
        hits=sum(segment["hit"] != "none" for segment in segments),
        policy=(report or {}).get("policy", ""),
    )


async def run(
    client: AsyncOpenAI, model: str, asks: list[Ask], form: str, exact: bool, clients: int
) -> list[Seen]:
    """All of them, so many at a time."""
    left, seen = list(asks), []

    async def worker() -> None:
        while left:
            seen.append(await one(client, model, left.pop(0), form, exact))

    await asyncio.gather(*(worker() for _ in range(clients)))
    return seen


async def cold_pairs(
    client: AsyncOpenAI, model: str, asks: list[Ask], form: str
) -> dict[str, object]:
    """Ratios of the time to first token, pair by pair."""
    pairs: list[tuple[Seen, Seen]] = []
    for number, ask in enumerate(asks):
        pair = {}
        for exact in (number % 2 == 0, number % 2 == 1):
            pair[exact] = await one(client, model, ask, form, exact)
        pairs.append((pair[False], pair[True]))
    ratios = sorted(plain.ttft / exact.ttft for plain, exact in pairs)
    return {
        "first_sight": summary([plain for plain, _ in pairs]),
        "exact": summary([exact for _, exact in pairs]),
        "ratio_median": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "pairs": [(asdict(plain), asdict(exact)) for plain, exact in pairs],
    }


async def until_built(base: str, headers: dict[str, str]) -> float:
    """Wait until the server has built what it wants to build; seconds."""
    start = time.perf_counter()
    async with httpx.AsyncClient(base_url=base, headers=headers) as http:
        while True:
            await asyncio.sleep(1.0)
            text = (await http.get("/metrics")).text
            pending = [line for line in text.splitlines() if "builds_pending" in line]
            values = [float(line.rsplit(" ", 1)[1]) for line in pending if line[0] != "#"]
            if values and not sum(values):
                return time.perf_counter() - start


def summary(seen: list[Seen]) -> dict[str, object]:
    """Median, spread and hits."""
    times = sorted(one.ttft for one in seen)
    return {
        "n": len(seen),
        "ttft_median": statistics.median(times),
        "ttft_min": times[0],
        "ttft_max": times[-1],
        "prompt_tokens_median": statistics.median(one.prompt_tokens for one in seen),
        "cached_share": sum(one.cached_tokens for one in seen)
        / sum(one.prompt_tokens for one in seen),
        "segments": sum(one.segments for one in seen),
        "segment_hits": sum(one.hits for one in seen),
        "policies": sorted({one.policy for one in seen}),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    parser.add_argument("--data", nargs="+", type=Path, required=True)
    parser.add_argument("--form", choices=["documents", "string"], default="documents")
    parser.add_argument("--documents", type=int, default=36)
    parser.add_argument("--per-prompt", type=int, default=6)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cold", action="store_true", help="first sight beside dense, nothing else"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    client = AsyncOpenAI(base_url=f"{args.url}/v1", api_key=args.key, timeout=600, max_retries=0)
    model = (await client.models.list()).data[0].id
    first, *later = trace(args.data, args.documents, args.per_prompt, args.seed)
    settings = {name: str(value) for name, value in vars(args).items() if name != "key"}
    if args.cold:
        found = {"settings": settings, **await cold_pairs(client, model, first, args.form)}
    else:
        asks = [ask for round_ in later for ask in round_]
        warm = await run(client, model, first, args.form, False, args.clients)
        waited = await until_built(args.url, {"Authorization": f"Bearer {args.key}"})
        reuse = await run(client, model, asks, args.form, False, args.clients)
        exact = await run(client, model, asks, args.form, True, args.clients)
        found = {
            "settings": settings,
            "first_sight": summary(warm),
            "build_seconds_waited": waited,
            "reuse": summary(reuse),
            "exact": summary(exact),
            "ttft_ratio": summary(reuse)["ttft_median"] / summary(exact)["ttft_median"],  # type: ignore[operator]
            "requests": {"reuse": [asdict(x) for x in reuse], "exact": [asdict(x) for x in exact]},
        }
    found["environment"] = describe_machine(torch.device("cpu"), None)  # the server's is the same
    print(json.dumps({k: v for k, v in found.items() if k not in ("requests", "pairs")}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
