"""`redknot eval`: every policy next to dense on the user's own rows."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from redknot.cli.console import check_picture, check_writable, console, write_json
from redknot.cli.options import Flat, MapOption, Paths, open_map, open_session
from redknot.errors import InputError
from redknot.evaluation import EvalSettings, evaluate, load_rows
from redknot.evaluation.pictures import pareto
from redknot.evaluation.record import Record
from redknot.evaluation.report import as_table
from redknot.evaluation.summary import environment, summarise
from redknot.heads.head_map import Phase
from redknot.models.loading import LoadOptions
from redknot.recovery.policies import Dense, parse_policies

Switch = Parameter(negative="")


def eval_(
    model: str,
    *,
    data: Paths,
    policies: str = "dense,reuse,epic,cacheblend,question,question_drop",
    settings: Annotated[EvalSettings, Flat] = EvalSettings(),
    timing_only: Annotated[bool, Switch] = False,
    head_map: Annotated[MapOption, Flat] = MapOption(),
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    json: Path | None = None,
    rows: Path | None = None,
    picture: Path | None = None,
) -> None:
    """Compare policies with dense: fidelity, FLOPs and time to first token on the same token ids.

    Parameters
    ----------
    model
        `embedded`, a folder, a GGUF file or a hub name.
    data
        JSON-lines files of {"question", "answers", "documents": [{"title", "text"}]}.
    policies
        Comma-separated NAME or NAME:OPTION=VALUE:...; dense is always among them.
    timing_only
        Time only (--no-timing is fidelity only).
    json
        Write the report here.
    rows
        Write one JSON line a prompt and policy here, for paired analysis.
    picture
        Write a picture of fidelity against FLOPs here (PNG or SVG).
    """
    check_writable(json, rows)
    check_picture(picture)
    if timing_only:
        if not settings.timing:
            raise InputError("--no-timing and --timing-only exclude each other")
        settings = replace(settings, fidelity=False)
    chosen = parse_policies(policies)
    if Dense() not in chosen:
        chosen = [Dense(), *chosen]
    table = load_rows(data)
    session = open_session(model, load)
    chosen_map = open_map(head_map, session)
    missing = [policy.name for policy in chosen if policy.needs_head_map and chosen_map is None]
    if missing:
        raise InputError(f"policy {missing[0]} needs a head map (--head-map FILE)")
    results = evaluate(session, table, chosen, chosen_map, settings)
    records: list[Record] = []
    with rows.open("wb") if rows is not None else nullcontext() as lines:
        for found in results:
            records += found
            if lines is not None:  # as they come: a long run that breaks off loses nothing
                lines.write(b"".join(msgspec.json.encode(one) + b"\n" for one in found))
                lines.flush()
    written = {"settings": str(settings), "head_map": head_map.head_map, "data": _names(data)}
    if chosen_map is not None:
        shares = (chosen_map.global_share(phase) for phase in Phase)
        written["global_share"] = "/".join(f"{share:.3g}" for share in shares)
    machine = environment(session.model.adapter.device)
    report = summarise(session.model.name, records, written, machine)
    console.print(as_table(report))
    write_json(json, report)
    if picture is not None:
        pareto(report, picture)


def _names(data: list[Path]) -> str:
    return " ".join(path.name for path in data)
