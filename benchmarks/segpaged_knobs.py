"""What do the knobs of the page partitions do? A simulated trace of shuffled documents.

    python benchmarks/segpaged_knobs.py [--requests N] [--json FILE]

A request takes four documents by Zipf popularity, which drifts, in any order, and often continues a
chat. Document state is kept in `segment`, chat turns in `prefix`, the request's own pages in
`global` and `local` while it and the next seven are served. Every line changes one knob of the
defaults. No memory is touched: pages are counted.
"""

import argparse
import json
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from redknot.segpaged import (
    Arbiter,
    OutOfPages,
    PagePool,
    PartitionsConfig,
    Provenance,
    ScoredEviction,
    Tag,
)

NUM_PAGES = 40_000
NUM_DOCUMENTS = 600
NUM_CHATS = 60
AT_ONCE = 8

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """Documents with their pages, the turns of its chat, and pages of its own."""

    documents: dict[Key, int]
    turns: dict[Key, int]
    global_pages: int
    local_pages: int


def trace(requests: int, seed: int = 0) -> Iterator[Request]:
    """Zipf popularity over documents; every 100 requests a tenth of them trade places."""
    rng = np.random.default_rng(seed)
    sizes = np.clip(rng.lognormal(4.6, 0.6, NUM_DOCUMENTS), 16, 512).astype(int)
    chance = 1 / np.arange(1, NUM_DOCUMENTS + 1)
    chance /= chance.sum()
    order = rng.permutation(NUM_DOCUMENTS)
    turns = np.zeros(NUM_CHATS, int)
    for number in range(requests):
        if number % 100 == 99:
            moved = rng.choice(NUM_DOCUMENTS, NUM_DOCUMENTS // 10, replace=False)
            order[moved] = order[rng.permutation(moved)]
        picked = order[rng.choice(NUM_DOCUMENTS, 4, replace=False, p=chance)]
        chat = int(rng.integers(NUM_CHATS))
        turns[chat] = (turns[chat] + 1) % 12
        total = int(sizes[picked].sum())
        yield Request(
            {("document", int(name)): int(sizes[name]) for name in picked},
            {("chat", chat, turn): 32 for turn in range(turns[chat])},
            global_pages=total * int(rng.integers(2, 5)),
            local_pages=total // 2,
        )


@dataclass(slots=True)
class Served:
    """One partition of caches, driven by requests."""

    tag: Tag
    arbiter: Arbiter
    policy: ScoredEviction
    entries: dict[Key, np.ndarray] = field(default_factory=dict)
    asked: int = 0
    hit: int = 0

    def pin(self, needs: dict[Key, int]) -> list[np.ndarray]:
        """Share the entries that exist."""
        self.asked += sum(needs.values())
        found = [key for key in needs if key in self.entries]
        for key in found:
            self.hit += needs[key]
            self.policy.touch(key)
            self.arbiter.pool.share(self.entries[key])
        return [self.entries[key] for key in found]

    def add(self, needs: dict[Key, int]) -> None:
        """Keep those that did not exist, where room can be had."""
        for key in [key for key in needs if key not in self.entries]:
            try:
                fresh = self.arbiter.allocate(self.tag, needs[key], Provenance.CANONICAL)
            except OutOfPages:
                continue
            self.entries[key] = fresh
            self.policy.register(key, fresh)


def simulate(config: PartitionsConfig, half_life: float, requests: int) -> dict[str, float]:
    """Hit shares by pages, evicted pages and refusals of one setting."""
    pool = PagePool(NUM_PAGES)
    caches: dict[Tag, Served] = {}

    def policy(tag: Tag) -> ScoredEviction:
        return ScoredEviction(
            pool, half_life=half_life, on_evict=lambda key: caches[tag].entries.pop(key)
        )

    policies = {tag: policy(tag) for tag in (Tag.SEGMENT, Tag.PREFIX)}
    arbiter = Arbiter(pool, policies, config)
    caches |= {tag: Served(tag, arbiter, scored) for tag, scored in policies.items()}
    running: deque[np.ndarray] = deque()
    refused = 0
    start = time.perf_counter()
    for request in trace(requests):
        if len(running) == AT_ONCE:
            pool.free(running.popleft())
        wanted = {Tag.SEGMENT: request.documents, Tag.PREFIX: request.turns}
        held = [pages for tag, cache in caches.items() for pages in cache.pin(wanted[tag])]
        own = {Tag.GLOBAL: request.global_pages, Tag.LOCAL: request.local_pages}
        try:
            held.extend(arbiter.allocate_all(own).values())
        except OutOfPages:
            refused += 1
        running.append(np.concatenate([np.zeros(0, np.int32), *held]))
        for tag, cache in caches.items():
            cache.add(wanted[tag])
    pool.check()
    counters = {tag: arbiter.counters(tag) for tag in Tag}
    return {
        "segment_hits": caches[Tag.SEGMENT].hit / caches[Tag.SEGMENT].asked,
        "prefix_hits": caches[Tag.PREFIX].hit / caches[Tag.PREFIX].asked,
        "evicted_pages": sum(counter.evicted for counter in counters.values()),
        "called_back_pages": sum(counter.called_back for counter in counters.values()),
        "refused_requests": refused,
        "seconds": time.perf_counter() - start,
    }


def variants() -> Iterator[tuple[str, PartitionsConfig, float]]:
    """The defaults, and one knob changed at a time."""
    base, usual = PartitionsConfig(), 1024.0
    yield "defaults", base, usual
    for share in (0.05, 0.2, 0.5):
        rest = 0.85 - share
        split = {"global_": rest * 0.8, "local": rest * 0.2, "segment": share}
        parts = {name: replace(getattr(base, name), share=value) for name, value in split.items()}
        yield f"segment share {share}", replace(base, **parts), usual
    for low, high in ((1.0, 1.0), (0.7, 0.95), (0.5, 0.95), (0.5, 0.5)):
        parts = {
            name: replace(getattr(base, name), low=low, high=high) for name in ("segment", "prefix")
        }
        yield f"watermarks {low} to {high}", replace(base, **parts), usual
    parts = {name: replace(getattr(base, name), lends=False) for name in ("global_", "local")}
    yield "global, local lend nothing", replace(base, **parts), usual
    for half_life in (1.0, 64.0, 256.0, 4096.0, math.inf):
        yield f"half-life {half_life:g} uses", base, half_life


def main() -> None:
    """Print a table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--json")
    options = parser.parse_args()
    table = []
    for name, config, half_life in variants():
        row = simulate(config, half_life, options.requests)
        table.append({"knob": name} | row)
        if len(table) == 1:
            print(f"{'knob':28}", *(f"{column:>18}" for column in row))
        cells = (f"{value:18.3f}" if value % 1 else f"{value:18.0f}" for value in row.values())
        print(f"{name:28}", *cells, flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
