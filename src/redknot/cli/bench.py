"""`redknot bench`: speed and memory beside the best dense, on random ids of an exact number."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import App

from redknot.bench import capacity as capacity_bench
from redknot.bench import decode as decode_bench
from redknot.bench import records
from redknot.bench import traffic as traffic_bench
from redknot.bench.breakdown import breakdown
from redknot.bench.context import Bench
from redknot.bench.dense_attention import parse_peers
from redknot.bench.machine import describe_machine, seconds_of
from redknot.bench.maps import MapSettings
from redknot.bench.peers import Peers
from redknot.bench.room import pool_pages
from redknot.bench.setting import as_share, parse_settings
from redknot.bench.ttft import TtftSettings, shapes_of, ttft
from redknot.cli.options import Flat
from redknot.cli.show import Reporting, show
from redknot.engine.setup import CHUNK_TOKENS
from redknot.errors import InputError
from redknot.execution.cache import page_storage
from redknot.execution.planner import Planner
from redknot.models import LoadedModel, load_model
from redknot.models.loading import LoadOptions
from redknot.recovery.policies import parse_policy

bench = App(name="bench", help="Measure speed and memory beside the best dense.")
bench.command(show)
SETTINGS = "question_drop:first=0.4:then=0.2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring(Reporting):
    """What only a measurement can add."""

    commit: str | None = None
    "Commit of this code, where git cannot tell."

    def head(self, loaded: LoadedModel, *settings: Any) -> dict[str, Any]:
        """What every report begins with."""
        written = [(name, str(value)) for one in settings for name, value in asdict(one).items()]
        return {
            "model": loaded.name,
            "environment": describe_machine(loaded.adapter.device, self.commit),
            "settings": dict(written),
        }


@bench.command(name="ttft")
def ttft_(
    model: str,
    *,
    tokens: str,
    settings: str = SETTINGS,
    how: Annotated[TtftSettings, Flat] = TtftSettings(),
    maps: Annotated[MapSettings, Flat] = MapSettings(),
    peers: str | None = None,
    fa3: Path | None = None,
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    out: Annotated[Measuring, Flat] = Measuring(),
) -> None:
    """Time from a request's token ids to its first token's id.

    Parameters
    ----------
    model
        `embedded`, a folder, a GGUF file, a hub name or a shape that ships.
    tokens
        Comma-separated prompt lengths.
    settings
        Comma-separated POLICY or POLICY@SHARE, SHARE of heads that see everything; dense is always
        among them.
    peers
        Dense attention to beat: fa3, fa4, cudnn, sdpa or none; those of the device if left out.
    fa3
        Library of FlashAttention-3 (`_vllm_fa3_C*.so`) if vLLM is not installed.
    """
    reports, chosen = out.open(), parse_settings(settings)
    lengths = numbers(tokens, "--tokens")
    names = parse_peers(peers, torch.device(load.device))
    loaded = load_model(model, load)
    opened = Bench.open(loaded, maps, host=how.host_segments, verify=how.verify)
    shapes = shapes_of(opened, lengths, how.segment_tokens)
    rivals = Peers.of(opened.session.executor, names, fa3)
    planner = Planner(opened.session.executor) if how.asks_planner else None
    report = records.TtftReport(
        **out.head(loaded, how, maps, load),
        notes=[f"peer {name} is left out: {why}" for name, why in rivals.unavailable.items()],
        matmul_flops_per_second=opened.matmul_rate,
        calibration_seconds=None if planner is None else seconds_of(planner.calibrate),
        lengths=[],
    )
    for length in ttft(opened, shapes, chosen, rivals, how, planner):
        report.lengths.append(length)
        out.write(report, reports)
    out.finish(report, reports)


@bench.command(name="breakdown")
def breakdown_(
    model: str,
    *,
    tokens: int,
    settings: str = SETTINGS,
    segment_tokens: int = 2048,
    host_segments: bool = False,
    maps: Annotated[MapSettings, Flat] = MapSettings(),
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    out: Annotated[Measuring, Flat] = Measuring(),
) -> None:
    """Parts of one prefill's time: dense and each setting.

    Parameters
    ----------
    model
        `embedded`, a folder, a GGUF file, a hub name or a shape that ships.
    tokens
        Prompt length.
    settings
        As for `bench ttft`.
    segment_tokens
        Tokens of a segment; the last one is cut.
    host_segments
        Segments wait in host memory, page-locked on a GPU.
    """
    reports, chosen = out.open(), parse_settings(settings)
    loaded = load_model(model, load)
    opened = Bench.open(loaded, maps, host=host_segments)
    (shape,) = shapes_of(opened, [tokens], segment_tokens)
    request = opened.ready(shape)
    report = records.BreakdownReport(
        **out.head(loaded, maps, load),
        tokens=tokens,
        matmul_flops_per_second=opened.matmul_rate,
        build_seconds=opened.build(request),
        rows=[],
    )
    for row in breakdown(opened, request, chosen):
        report.rows.append(row)
        out.write(report, reports)
    out.finish(report, reports)


@bench.command(name="decode")
def decode_(
    model: str,
    *,
    tokens: int,
    shares: str = "0.125,0.5",
    batches: str = "1,8",
    steps: int = 64,
    maps: Annotated[MapSettings, Flat] = MapSettings(),
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    out: Annotated[Measuring, Flat] = Measuring(),
) -> None:
    """Time of a decoding step over random K/V: dense and head classes.

    Parameters
    ----------
    model
        `embedded`, a folder, a GGUF file, a hub name or a shape that ships.
    tokens
        Length of each request.
    shares
        Comma-separated shares of heads that see everything.
    batches
        Comma-separated numbers of requests that decode together.
    steps
        Timed steps, after those that compile and capture.
    """
    reports = out.open()
    settings = decode_bench.decode_settings(parse_shares(shares))
    counts = numbers(batches, "--batches")
    if steps < 1:
        raise InputError(f"{steps} steps: 1 is the least")
    loaded = load_model(model, load)
    opened = Bench.open(loaded, maps)
    decode_bench.check_length(opened, tokens, steps)
    report = records.DecodeReport(
        **out.head(loaded, maps, load),
        notes=[decode_bench.NOTE],
        tokens=tokens,
        rows=[],
    )
    for row in decode_bench.decode(opened, tokens, settings, counts, steps):
        report.rows.append(row)
        out.write(report, reports)
    out.finish(report, reports)


@bench.command(name="capacity")
def capacity_(
    model: str,
    *,
    tokens: int,
    shares: str = "0.125,0.3,0.5",
    how: Annotated[capacity_bench.CapacitySettings, Flat] = capacity_bench.CapacitySettings(),
    maps: Annotated[MapSettings, Flat] = MapSettings(),
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    out: Annotated[Measuring, Flat] = Measuring(),
) -> None:
    """Requests that a pool of pages holds at once, and how fast they decode together.

    Parameters
    ----------
    model
        `embedded`, a folder, a GGUF file, a hub name or a shape that ships.
    tokens
        Prompt length of each request.
    shares
        Comma-separated shares of heads that see everything.
    """
    reports = out.open()
    policy = parse_policy(how.prefill_policy)
    settings = capacity_bench.capacity_settings(policy, parse_shares(shares))
    loaded = load_model(model, load)
    pages = pool_pages(loaded.adapter, how.pool_gib, how.reserve_gib)
    opened = Bench.open(loaded, maps, host=how.host_segments, num_pages=pages)
    shapes_of(opened, [tokens + how.new_tokens], how.segment_tokens)  # they fit the context too
    (shape,) = shapes_of(opened, [tokens], how.segment_tokens)
    report = records.CapacityReport(
        **out.head(loaded, how, maps, load),
        notes=[capacity_bench.NOTE],
        tokens=tokens,
        new_tokens=how.new_tokens,
        num_pages=pages,
        page_bytes=opened.session.executor.storage.page_bytes,
        build_seconds=opened.build(opened.ready(shape)),
        rows=[],
    )
    for row in capacity_bench.capacity(opened, shape, settings, how.new_tokens):
        report.rows.append(row)
        out.write(report, reports)
    out.finish(report, reports)


@bench.command(name="traffic")
def traffic_(
    model: str,
    *,
    tokens: int,
    clients: str = "1,8,32",
    settings: str = SETTINGS,
    how: Annotated[traffic_bench.TrafficSettings, Flat] = traffic_bench.TrafficSettings(),
    maps: Annotated[MapSettings, Flat] = MapSettings(),
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    out: Annotated[Measuring, Flat] = Measuring(),
) -> None:
    """Throughput and time to first token of the engine under load: dense and each setting.

    Parameters
    ----------
    model
        `embedded`, a folder, a GGUF file, a hub name or a shape that ships.
    tokens
        Prompt length of each request, made up to whole documents.
    clients
        Comma-separated numbers of clients, each with one request at a time.
    settings
        As for `bench ttft`.
    """
    reports, chosen, counts = out.open(), parse_settings(settings), numbers(clients, "--clients")
    loaded = load_model(model, load)
    pages = pool_pages(loaded.adapter, how.pool_gib, how.reserve_gib)
    chunk = CHUNK_TOKENS[loaded.adapter.device.type]
    kept = pages * page_storage(loaded.adapter).page_bytes // 2
    opened = Bench.open(loaded, maps, num_pages=pages, chunk_tokens=chunk, beginnings_bytes=kept)
    (asked,) = shapes_of(opened, [tokens], how.segment_tokens)
    shape = traffic_bench.whole_documents(asked)
    shapes_of(opened, [shape.tokens + how.new_tokens], how.segment_tokens)  # they fit the context
    documents = traffic_bench.Documents.of(opened, shape, how.documents)
    report = records.TrafficReport(
        **out.head(loaded, how, maps, load),
        notes=[traffic_bench.NOTE],
        tokens=shape.tokens,
        new_tokens=how.new_tokens,
        num_pages=pages,
        page_bytes=opened.session.executor.storage.page_bytes,
        build_seconds=opened.build(documents.as_request()),
        rows=[],
    )
    for row in traffic_bench.traffic(opened, shape, chosen, counts, how):
        report.rows.append(row)
        out.write(report, reports)
    out.finish(report, reports)


def numbers(text: str, option: str) -> list[int]:
    """Comma-separated counts from 1; `InputError` for anything else."""
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InputError(f"{option}: {text!r} are no whole numbers") from error
    if not found or min(found) < 1:
        raise InputError(f"{option}: {text!r} are no numbers from 1")
    return found


def parse_shares(text: str) -> list[float]:
    """Comma-separated shares; `InputError` for anything else."""
    return list(dict.fromkeys(as_share(part) for part in text.split(",") if part.strip()))
