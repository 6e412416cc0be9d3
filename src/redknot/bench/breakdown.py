"""Where one prefill's time goes, part by part, beside what its FLOPs would take at full speed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from redknot.bench.contenders import work_of
from redknot.bench.context import Bench
from redknot.bench.prompts import Request
from redknot.bench.records import BreakdownRow, Part
from redknot.bench.setting import DENSE, Setting
from redknot.bench.timed import Timed
from redknot.execution import Prefilled
from redknot.recovery import Flops, Plan, plan_flops
from redknot.recovery.flops import question_rows


def breakdown(
    bench: Bench, request: Request, settings: Sequence[Setting]
) -> Iterator[BreakdownRow]:
    """Dense and each setting on a prompt that is stored: run once to warm up, then measured."""
    for setting in (DENSE, *settings):
        runner = bench.runner(setting)
        first = runner.run(request, detailed=True).seconds
        timed = runner.run(request, detailed=True)
        yield as_row(setting, timed, first, bench.matmul_rate)


def as_row(setting: Setting, timed: Timed, first: float, matmul_rate: float) -> BreakdownRow:
    """The parts of one run."""
    seconds, flops = timed.prefilled.seconds, part_flops(timed.prefilled)
    total = sum(seconds.values())
    parts = [
        Part(
            name,
            spent * 1e3,
            spent / total,
            flops[name] / matmul_rate * 1e3 if name in flops else None,
        )
        for name, spent in seconds.items()
    ]
    return BreakdownRow(
        name=setting.label,
        parts=parts,
        sum_milliseconds=total * 1e3,
        wall_milliseconds=timed.seconds * 1e3,
        first_run_seconds=first,
        work=work_of(timed, matmul_rate),
    )


def part_flops(prefilled: Prefilled) -> dict[str, int]:
    """FLOPs by part of the clock; together they are all of the plan but relocation.

    Scores count with the attention of the probe, whose keys they read again.
    """
    layout, shapes, plan = prefilled.layout, prefilled.shapes, prefilled.plan
    recover = _flops(prefilled, replace(plan, probe_rows=0))
    both = _flops(prefilled, plan)
    last = len(shapes) - 1
    output = sum(
        shape.cost.output * (1 if index == last else len(layer.active))
        for index, (shape, layer) in enumerate(zip(shapes, plan.layers, strict=True))
    )
    found = _by_part("recover", recover, output)
    if plan.probe_rows:
        rows = len(question_rows(layout))
        probe = Flops(
            both.projection - recover.projection,
            both.attention - recover.attention,
            both.ffn - recover.ffn,
        )
        output = sum(shape.cost.output * rows for shape in shapes[:last])
        found |= _by_part("probe", probe, output)
    return found


def _by_part(stage: str, flops: Flops, output: int) -> dict[str, int]:
    return {
        f"{stage}/project": flops.projection - output,
        f"{stage}/attend": flops.attention,
        f"{stage}/finish": flops.ffn + output,
    }


def _flops(prefilled: Prefilled, plan: Plan) -> Flops:
    sight = prefilled.sight
    return plan_flops(plan, prefilled.layout, prefilled.shapes, sight.prefill, sight.decode)
