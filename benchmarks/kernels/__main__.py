"""Check and time every kernel beside its rivals in one process.

    python -m benchmarks.kernels --fa3 LIBRARY     on a GPU, from the repository's root
    python -m benchmarks.kernels --cpu             the torch backend on a CPU
    python -m benchmarks.kernels --read CSV        the table and picture of an earlier run

Exits with 1 if a result of ours was wrong or could not be had, or a rival's was wrong.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from . import append, ceilings, cpu, decode, ffn, memory, peers, prefill, score_select
from .bench import Bench
from .record import Record, machine, read, write
from .setting import Setting, tiny
from .targets import judge, show

# Short ones first: when time is over, rivals of long prompts are left out and not whole operations.
SECTIONS = {
    "ceilings": ceilings.run,
    "memory": memory.run,
    "decode": decode.run,
    "score": score_select.run,
    "append": append.run,
    "ffn": ffn.run,
    "gathered": prefill.run_gathered,
    "prefill": prefill.run,
    "article": prefill.run_article,
}


def main() -> int:
    """The command."""
    options = _options()
    if options.read is not None:
        records, found = read(options.read)
        return _report(records, found, options.picture)
    if options.cpu:
        setting, sections = cpu.setting(short=options.tiny), {"cpu": cpu.run}
    else:
        setting = tiny() if options.tiny else Setting(device=torch.device("cuda"))
        sections = _sections(options.only)
    if setting.device.type == "cuda":
        _prepare(options.fa3)
    torch.manual_seed(0)
    default = "kernels_cpu.csv" if options.cpu else "kernels.csv"
    out = options.out or Path("benchmarks/results") / default
    found = machine(setting.device, setting.config, options.commit, options.fa3, options.fa3_from)
    bench = Bench(setting, options.seconds, options.budget)
    begin = time.monotonic()
    for name, section in sections.items():
        try:
            section(bench)
        except Exception as error:  # noqa: BLE001  the other sections shall run
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            bench.add(Record(op=name, shape="", impl="", check="FAILED", notes=text))
        write(bench.records, found, out)
        print(f"-- {name}: {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{len(bench.records)} records in {out}")
    return _report(bench.records, found, options.picture)


def _report(records: list[Record], found: dict[str, str], picture: Path | None) -> int:
    print(show(judge(records)))
    if picture is not None:
        try:
            from .picture import draw

            draw(records, found, picture)
        except ImportError as error:
            print(f"no picture: {error}; draw it elsewhere with --read", file=sys.stderr)
    wrong = [r for r in records if r.check == "FAILED"]
    for record in wrong:
        print(f"WRONG: {record.op} {record.shape} {record.impl} {record.error} {record.notes}")
    return 1 if wrong else 0


def _prepare(fa3: Path | None) -> None:
    """FA3, and room for one graph of FlexAttention for each shape."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64
    if fa3 is not None:
        try:
            peers.load_fa3(fa3)
        except (peers.PeerUnavailable, OSError, RuntimeError) as error:
            print(f"FA3 is left out: {error}", file=sys.stderr)


def _sections(only: str | None) -> dict[str, object]:
    if only is None:
        return SECTIONS
    wanted = only.split(",")
    unknown = [name for name in wanted if name not in SECTIONS]
    if unknown:
        raise SystemExit(f"no section {unknown}; there are {', '.join(SECTIONS)}")
    return {name: run for name, run in SECTIONS.items() if name in ("ceilings", *wanted)}


def _options() -> argparse.Namespace:
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.kernels", None, __doc__, formatter_class=lines)
    parser.add_argument("--fa3", type=Path, help="shared library of FA3 from a vLLM wheel")
    parser.add_argument("--fa3-from", default="vLLM wheel", help="its origin, for the table")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/kernels[_cpu].csv")
    parser.add_argument("--picture", type=Path, help="for example docs/kernels.png")
    parser.add_argument("--only", help=f"of {','.join(SECTIONS)}; ceilings always run")
    parser.add_argument("--seconds", type=float, default=360, help="start nothing new after")
    parser.add_argument("--budget", type=float, default=0.08, help="seconds a call and round")
    parser.add_argument("--commit", help="where git cannot be asked")
    parser.add_argument("--cpu", action="store_true", help="the torch backend on this CPU")
    parser.add_argument("--tiny", action="store_true", help="dry run on a CPU, figures worthless")
    parser.add_argument("--read", type=Path, help="report on a CSV; nothing is measured")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
