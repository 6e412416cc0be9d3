"""`redknot profile`: measure a model's heads and write a head map."""

from pathlib import Path
from typing import Annotated

from rich.table import Table

from redknot.cli.console import check_picture, check_writable, console, write_json
from redknot.cli.options import Flat, Paths, open_session
from redknot.evaluation import load_rows
from redknot.models.loading import LoadOptions
from redknot.profiling import ProfileSettings, profile
from redknot.profiling.pictures import heat_map, important_tokens
from redknot.profiling.run import ProfileReport


def profile_(
    model: str,
    *,
    data: Paths,
    out: Path,
    settings: Annotated[ProfileSettings, Flat] = ProfileSettings(),
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    json: Path | None = None,
    picture: Path | None = None,
    tokens_picture: Path | None = None,
) -> None:
    """Measure which KV heads need the whole context, and write a head map with a quality report.

    Parameters
    ----------
    model
        `embedded`, a folder, a GGUF file or a hub name.
    data
        JSON-lines files of rows, as for `eval`.
    out
        The head map to write.
    json
        Write the report here.
    picture
        Write a heat map of the scores here.
    tokens_picture
        Write a picture of the union of important tokens over heads, by depth, here.
    """
    check_writable(out, json)
    check_picture(picture)
    check_picture(tokens_picture)
    rows = load_rows(data)
    session = open_session(model, load)
    head_map, report = profile(session, rows, settings)
    head_map.save(out)
    console.print(_table(report))
    console.print(
        f"{report.method} on {report.num_prompts} prompts: split-half rank correlation"
        f" {report.split_half:.2f}; of the summed scores "
        + ", ".join(f"{name} carry {share:.0%}" for name, share in report.concentration.items())
    )
    write_json(json, report)
    if picture is not None:
        heat_map(report, head_map, picture)
    if tokens_picture is not None:
        important_tokens(report, tokens_picture)
    console.print(f"wrote {out}")


def _table(report: ProfileReport) -> Table:
    table = Table(title=f"maps of {report.model} on held-out prompts")
    for head in ("windows on", "global", "window", "KL", "agreement", "gold NLL", "FLOPs", "KV"):
        table.add_column(head, justify="right")
    for one in report.maps:
        table.add_row(
            one.windows,
            f"{one.global_share:.0%}",
            str(one.window),
            f"{one.kl.mean:.4f}",
            f"{one.agreement.mean:.3f}",
            f"{one.gold_nll_change.mean:+.3f}",
            f"{one.flops_share:.2f}",
            f"{one.kv_share:.2f}",
        )
    return table
