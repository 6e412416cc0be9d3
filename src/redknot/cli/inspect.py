"""`redknot inspect`: look at a head map, a plan, a segment or a model."""

from pathlib import Path
from typing import Annotated

from cyclopts import App
from rich.table import Table

from redknot.cli.console import check_writable, console, write_json
from redknot.cli.options import Flat, Paths, open_session, read_documents
from redknot.heads import HeadMap, Phase
from redknot.models.loading import LoadOptions
from redknot.recovery import Plan

inspect = App(name="inspect", help="Look at a head map, a plan, a segment or a model.")


@inspect.command(name="map")
def map_(file: Path, *, json: Path | None = None) -> None:
    """Classes and windows of a head map.

    Parameters
    ----------
    file
        A head map of ours or in the public reference's layout.
    json
        Write the map here, in our format.
    """
    check_writable(json)
    head_map = HeadMap.load(file)
    console.print(f"{head_map.model or 'unnamed model'}, weights {head_map.weights or 'any'}")
    if head_map.measured is not None:
        how = head_map.measured
        console.print(
            f"measured by {how.method}, window {how.window}, on {how.num_prompts} prompts of"
            f" {', '.join(how.data)}; split-half {how.split_half}"
        )
    for phase in Phase:
        rules = head_map.rules(phase)
        local = {(r.window, r.sink) for row in rules for r in row if r.window is not None}
        console.print(f"{phase}: {head_map.global_share(phase):.0%} global, local {sorted(local)}")
        for layer, row in enumerate(rules):
            marks = "".join("G" if rule.window is None else "l" for rule in row)
            console.print(f"  layer {layer:3d}  {marks}")
    write_json(json, head_map)


@inspect.command
def plan(file: Path, other: Path | None = None, *, json: Path | None = None) -> None:
    """Rows of a saved plan, or what distinguishes two.

    Parameters
    ----------
    file
        A plan that `generate --save-plan` wrote.
    other
        A second plan to compare with.
    json
        Write the row counts of every layer here.
    """
    check_writable(json)
    loaded = Plan.load(file)
    console.print(loaded.describe())
    if other is not None:
        lines = loaded.differs(Plan.load(other)) or ["no difference"]
        console.print("\n".join(lines))
    counts = [len(layer.active) for layer in loaded.layers]
    write_json(json, {"policy": loaded.policy, "tokens": loaded.num_tokens, "rows": counts})


@inspect.command
def segment(
    documents: Paths,
    *,
    model: str = "embedded",
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    json: Path | None = None,
) -> None:
    """Build the state of documents and show what would be stored.

    Parameters
    ----------
    documents
        Files, or folders of files.
    model
        `embedded`, a folder, a GGUF file or a hub name.
    json
        Write the figures here.
    """
    check_writable(json)
    texts = read_documents(documents)
    session = open_session(model, load)
    table = Table(title=f"segments behind the anchor {session.tokeniser.anchor}")
    for head in ("title", "tokens", "MiB", "key"):
        table.add_column(head, overflow="fold")
    records = []
    for text in texts:
        token_ids = session.tokeniser.segment(text)
        state = session.build(token_ids)
        key = session.namespace.key("segment", token_ids).hex()
        table.add_row(text.title, str(len(state)), f"{state.num_bytes / 2**20:.1f}", key)
        records.append(
            {"title": text.title, "tokens": len(state), "bytes": state.num_bytes, "key": key}
        )
    console.print(table)
    write_json(json, records)


@inspect.command(name="config")
def config(
    model: str = "embedded",
    *,
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    json: Path | None = None,
) -> None:
    """What RedKnot makes of a model: adapter, layers, rotary kind, anchor, end tokens.

    Parameters
    ----------
    model
        `embedded`, a folder, a GGUF file or a hub name.
    json
        Write it here.
    """
    check_writable(json)
    session = open_session(model, load)
    adapter, shape = session.model.adapter, session.executor.shapes[0]
    per_token = 2 * shape.num_groups * shape.head_dim * len(adapter.layers)
    record = {
        "model": session.model.name,
        "adapter": type(adapter).__name__,
        "layers": len(adapter.layers),
        "state": str(shape.state),
        "kv_heads": shape.num_groups,
        "query_heads": shape.num_groups * shape.queries_per_group,
        "head_dim": shape.head_dim,
        "sliding_windows": sorted({s.horizon or 0 for s in session.executor.shapes}),
        "rotary": adapter.rotary.kind,
        "context_length": adapter.context_length,
        "dtype": str(adapter.dtype),
        "state_bytes_per_token": per_token * adapter.dtype.itemsize,
        "anchor": list(session.tokeniser.anchor),
        "end_tokens": sorted(session.model.end_token_ids),
        "weights": session.weights,
    }
    for name, value in record.items():
        console.print(f"{name}: {value}")
    write_json(json, record)
