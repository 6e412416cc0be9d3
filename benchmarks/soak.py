"""Many clients for a long time: nothing may get stuck, leak, or change an answer.

    redknot serve MODEL --port 8000 --no-planned --prefix-share 0 --max-waiting 256
    python benchmarks/soak.py http://127.0.0.1:8000 --model-folder MODEL --clients 64 --seconds 600

Clients send shuffled documents, as parts or as one string, greedy or seeded, streamed or not; some
leave. Every state is built before the run, and each answer that came whole is asked for again when
nobody else is there: where the same segments are found, the tokens must be the same. Where they
part, the two likeliest tokens must lie as close as rounding does (`TIE`); such ties are counted and
are no mismatches.
"""

import argparse
import asyncio
import collections
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from transformers import AutoTokenizer

from fuzz_server import leaked, settled

CHAT, COMPLETIONS, SEGMENTS = "/v1/chat/completions", "/v1/completions", "/v1/segments"
DOCUMENTS = 24
STUCK_SECONDS = 120.0
"An answer that takes longer counts as stuck."
TIE = 1e-3
"Difference of log-probabilities below which two tokens count as equally likely."
WORDS = ("river", "stone", "bridge", "mill", "garden", "tower", "winter", "copper", "letter")


@dataclass
class Told:
    """An answer, as far as it must be the same again."""

    tokens: list[tuple[str, float]]
    "Of its first choice, each with how much likelier it was than the next best."
    hits: list[str]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "Told":
        """Out of a whole answer."""
        segments = answer["redknot"]["segments"]
        return cls(tokens_of(answer["choices"][0]), [one["hit"] for one in segments])


@dataclass
class Seen:
    """What happened."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    errors: list[str] = field(default_factory=list)
    answers: dict[str, tuple[str, dict[str, Any], Told]] = field(default_factory=dict)
    "By the request: endpoint, body and answer."


def documents(tokens: int, tokenizer: Any) -> list[str]:
    """Texts of about so many tokens each, the same in every run."""
    draw, made = random.Random(0), []
    for number in range(DOCUMENTS):
        text = f"Report {number}."
        while len(tokenizer(text).input_ids) < tokens:
            text += " " + " ".join(draw.choices(WORDS, k=8)) + "."
        made.append(text)
    return made


def body(draw: random.Random, texts: list[str]) -> tuple[str, dict[str, Any]]:
    """One request: some documents in some order, a question, and how to answer."""
    chosen = draw.sample(texts, draw.randint(1, 3))
    question = f"Which {draw.choice(WORDS)} is named in report {draw.randrange(DOCUMENTS)}?"
    fields: dict[str, Any] = {"max_tokens": draw.randint(1, 48), "ignore_eos": draw.random() < 0.5}
    fields["redknot"] = {}
    if draw.random() < 0.5:
        fields |= {"temperature": 0}
    else:
        fields |= {"temperature": 0.8, "top_p": 0.9, "seed": draw.randrange(1 << 20)}
    if draw.random() < 0.25:
        fields["n"] = draw.randint(2, 3)
    if draw.random() < 0.3:
        return COMPLETIONS, {"prompt": "\n\n".join([*chosen, question]), "logprobs": 2, **fields}
    fields |= {"logprobs": True, "top_logprobs": 2}
    if draw.random() < 0.4:
        content: Any = "\n\n".join([*chosen, question])
    else:
        content = [{"type": "document", "text": one} for one in chosen]
        content.append({"type": "text", "text": question})
    return CHAT, {"messages": [{"role": "user", "content": content}], **fields}


def tokens_of(choice: dict[str, Any]) -> list[tuple[str, float]]:
    """Tokens of a choice with how much likelier each was than the next best."""
    told = choice.get("logprobs") or {}
    if "content" in told:
        tops = [[top["logprob"] for top in one["top_logprobs"]] for one in told["content"] or ()]
        names = [one["token"] for one in told["content"] or ()]
    else:
        tops = [list(top.values()) for top in told.get("top_logprobs") or ()]
        names = told.get("tokens") or []
    gaps = [tops[at][0] - tops[at][1] if len(tops[at]) > 1 else 0.0 for at in range(len(names))]
    return list(zip(names, gaps, strict=True))


async def ask(client: httpx.AsyncClient, url: str, request: dict[str, Any]) -> httpx.Response:
    """An answer, once there is room for it."""
    while True:
        response = await client.post(url, json=request)
        if response.status_code != 429:
            return response
        await asyncio.sleep(0.05)


async def client_loop(
    client: httpx.AsyncClient, draw: random.Random, texts: list[str], until: float, seen: Seen
) -> None:
    """One client until time is up."""
    while time.monotonic() < until:
        url, request = body(draw, texts)
        leaves = draw.random() < 0.2
        request["stream"] = draw.random() < 0.4
        seen.counts["requests"] += 1
        try:
            async with asyncio.timeout(draw.uniform(0, 1.5) if leaves else STUCK_SECONDS):
                response = await ask(client, url, request)
        except TimeoutError:
            seen.counts["disconnects" if leaves else "stuck"] += 1
            continue
        except httpx.HTTPError as error:
            seen.errors.append(repr(error))
            continue
        if response.status_code != 200:
            seen.errors.append(f"{response.status_code} {response.text[:200]}")
        elif not request["stream"]:
            seen.counts["whole answers"] += 1
            seen.answers[json.dumps(request)] = url, request, Told.of(response.json())
        elif not response.text.endswith("data: [DONE]\n\n") or '"error"' in response.text:
            seen.errors.append(response.text[-200:])
        else:
            seen.counts["whole streams"] += 1


async def prepare(client: httpx.AsyncClient, texts: list[str]) -> None:
    """Register the texts, and let what strings are cut into be built, so that hits stay."""
    for text in texts:
        (await client.post(SEGMENTS, json={"text": text})).raise_for_status()
    for at, text in enumerate(texts):
        other = texts[at - 1]
        for order in ([text], [text, other], [other, text], [other, text, texts[at - 2]]):
            prompt = "\n\n".join([*order, f"Which {WORDS[0]} is named in report 0?"])
            messages = [{"role": "user", "content": prompt}]
            for url, request in ((COMPLETIONS, {"prompt": prompt}), (CHAT, {"messages": messages})):
                (await ask(client, url, {**request, "max_tokens": 1})).raise_for_status()
    await settled(lambda: client.get("/live"), 600)


async def compare(client: httpx.AsyncClient, seen: Seen, most: int) -> None:
    """Ask again, one after another."""
    answers = list(seen.answers.values())
    random.Random(1).shuffle(answers)
    for url, request, before in answers[:most]:
        response = await ask(client, url, request)
        again = Told.of(response.json())
        seen.counts["compared"] += 1
        kind = differ(before, again)
        seen.counts[kind] += 1
        if kind == "mismatches":
            print("mismatch", json.dumps(request)[:300], flush=True)


def differ(before: Told, again: Told) -> str:
    """How an answer in company compares with the same alone."""
    if before.hits != again.hits:
        return "other hits"
    if [token for token, _ in before.tokens] == [token for token, _ in again.tokens]:
        return "same"
    for (one, gap), (other, other_gap) in zip(before.tokens, again.tokens, strict=False):
        if one != other:
            return "ties" if min(gap, other_gap) < TIE else "mismatches"
    return "mismatches"


async def main(options: argparse.Namespace) -> int:
    """Run, compare, and print the figures."""
    tokenizer = AutoTokenizer.from_pretrained(options.model_folder)
    texts, seen = documents(options.document_tokens, tokenizer), Seen()
    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=options.url, timeout=STUCK_SECONDS, headers=headers, limits=limits
    ) as client:
        await prepare(client, texts)
        until = time.monotonic() + options.seconds
        await asyncio.gather(
            *(
                client_loop(client, random.Random(number), texts, until, seen)
                for number in range(options.clients)
            )
        )
        told = await settled(lambda: client.get("/live"), 60)
        await compare(client, seen, options.compare)
    names = ("requests", "disconnects", "whole answers", "whole streams", "stuck")
    names += ("compared", "same", "other hits", "ties", "mismatches")
    print(", ".join(f"{name} {seen.counts[name]}" for name in names))
    print(f"running {told['running']}, waiting {told['waiting']}, leaked pages {leaked(told)}")
    print(f"errors {len(seen.errors)}", *seen.errors[:10], sep="\n")
    bad = seen.counts["stuck"] + seen.counts["mismatches"] + len(seen.errors)
    return int(bool(bad or told["running"] or told["waiting"] or leaked(told)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--model-folder", required=True, help="for its tokenizer")
    parser.add_argument("--key", default="")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--document-tokens", type=int, default=200)
    parser.add_argument("--compare", type=int, default=2000, help="most answers to ask again")
    raise SystemExit(asyncio.run(main(parser.parse_args())))
