"""What all benchmarks of one process share: a session, its store, maps and the machine's speed."""

from dataclasses import dataclass

import torch

from redknot.bench.machine import matmul_rate, seconds_of, synchronise
from redknot.bench.maps import MapSettings
from redknot.bench.prompts import PromptShape, Request, Tokens
from redknot.bench.room import make_pages, pages_of
from redknot.bench.setting import Setting
from redknot.bench.timed import Runner
from redknot.execution import ExecutionSettings
from redknot.execution.planner import Planner
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.models import LoadedModel
from redknot.segments import MemoryStore

ENDLESS = 1 << 50  # bytes of a store: what fits is decided by the machine


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A session whose store keeps everything."""

    session: Session
    store: MemoryStore
    maps: MapSettings
    matmul_rate: float
    "FLOP/s, measured in this process."

    @classmethod
    def open(
        cls,
        model: LoadedModel,
        maps: MapSettings,
        *,
        host: bool = False,
        verify: bool = False,
        num_pages: int | None = None,
        chunk_tokens: int | None = None,
        beginnings_bytes: int = 1 << 30,
    ) -> "Bench":
        """Over ``model``, with segments in ``host`` memory or where they were built."""
        store = MemoryStore(ENDLESS, verify=verify, place="host" if host else "as built")
        settings = ExecutionSettings(num_pages=num_pages, chunk_tokens=chunk_tokens)
        session = Session(model, store=store, settings=settings, beginnings_bytes=beginnings_bytes)
        rate = matmul_rate(model.adapter.device, model.adapter.dtype)
        return cls(session, store, maps, rate)

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self.session.model.adapter.device

    def head_map(self, share: float | None) -> HeadMap | None:
        """A random map of this share of global groups."""
        shapes = self.session.executor.shapes
        return None if share is None else self.maps.random_map(shapes, share)

    def runner(self, setting: Setting, planner: Planner | None = None) -> Runner:
        """``setting`` with its random map."""
        return Runner(self.session, setting, self.head_map(setting.share), planner)

    def ready(self, shape: PromptShape) -> Request:
        """The seed's prompt of a shape: memory cleared for it, its pages there, nothing stored."""
        executor = self.session.executor
        spare = executor.storage.page_size
        make_pages(self.session, pages_of(executor, shape.tokens + spare))
        return Tokens(self.session, self.maps.seed).request(shape)

    def build(self, request: Request) -> float:
        """Store the state of all segments; seconds."""
        segments = [torch.tensor(ids) for ids in request.segments()]

        def build_all() -> None:
            for ids in segments:
                self.session.build(ids)
            synchronise(self.device)

        return seconds_of(build_all)
