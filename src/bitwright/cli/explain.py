"""`explain`: what the compiler did to a model or one of its nodes, and where its time goes."""

from __future__ import annotations

from typing import Any

import click

import bitwright
from bitwright.cli import common


@common.main.command()
@click.argument("model")
@click.option("--node", default="", help="Follow one value by name.")
@click.option("--fusion", is_flag=True, help="What fused, what did not, and why.")
@click.option(
    "--schedule", is_flag=True, help="Every kernel call and buffer, with the memory plan."
)
@click.option(
    "--profile", is_flag=True, help="Time every step and compare it with the machine's peaks."
)
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of the profile; default: all cores."
)
@click.option("--target", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(1))
@common.size_option
@common.precision_option
@click.option(
    "--feeds", type=click.Path(), help=".npz with the inputs of the profile; default: random."
)
@common.json_option
def explain(
    model: str,
    node: str,
    fusion: bool,
    schedule: bool,
    profile: bool,
    threads: int | None,
    target: str,
    rounds: int,
    sizes: dict[str, int],
    precision: str | None,
    feeds: str | None,
    as_json: bool,
) -> None:
    """Show what the compiler did to MODEL or one of its nodes.

    --profile runs MODEL and times every step.
    """
    from bitwright.ir.feeds import check_sizes
    from bitwright.report import explain as report

    graph = common.load(model)
    check_sizes(sizes, (s.name for s in graph.input_symbols), f"graph {graph.name!r}")
    exe = common.working("compiling")(bitwright.compile)(
        graph, target=target, threads=threads, precision=precision
    )
    if node:
        return show_node(report.explain_node(exe.history, node, exe.engine.schedule), as_json)
    if fusion:
        return show_fusion(exe, as_json)
    if profile:
        return show_profile(exe, graph, sizes, feeds, rounds, as_json)
    rows = report.explain_stages(exe.history)
    if as_json:
        return common.print_json([vars(row) for row in rows])
    common.show_table(
        exe.graph.name,
        ("stage", "nodes", "rules that fired", "rules refused"),
        ((r.stage, r.nodes, _counts(r.fired), _counts(r.refused)) for r in rows),
    )
    show_schedule(exe.engine, sizes, whole=schedule)


def show_schedule(engine: Any, sizes: dict[str, int], whole: bool) -> None:
    """Prints the number of kernel calls, the interpreter fallbacks with reasons, and the memory."""
    from bitwright.lir.plan import plan
    from bitwright.lir.text import planned_text

    fallbacks, schedule = list(engine.fallbacks), engine.schedule
    kernels = len(schedule.steps) - sum(1 for _ in schedule.fallbacks)
    common.print_line(f"{kernels} kernel calls, {len(fallbacks)} interpreter fallbacks")
    for step in fallbacks:
        common.print_line(f"interpreter fallback: {step.op.op} %{step.node}: {step.why}")
    at = {symbol.name: sizes.get(symbol.name, 1) for symbol in schedule.graph.input_symbols}
    if not schedule.symbols <= at.keys():
        common.print_line("sizes depend on data: memory is allocated step by step")
        return click.echo(str(schedule)) if whole else None
    layout = plan(schedule, at)
    where = " at " + ", ".join(f"{k}={v}" for k, v in at.items()) if at else ""
    common.print_line(
        f"arena: {layout.total:,} bytes{where}; at least {layout.lower_bound:,} live at once"
    )
    if whole:
        click.echo(planned_text(schedule, at))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{rule} {count}" for rule, count in counts.items())


def show_fusion(exe: Any, as_json: bool) -> None:
    from bitwright.report.fusion import fusion

    found = fusion(exe.history)
    if as_json:
        return common.print_json(found.as_json())
    if found.recognized:
        common.show_table("recognized as one op", ("rule", "times"), found.recognized.items())
    common.show_table(
        f"{len(found.regions)} regions",
        ("node", "prologue", "anchor", "epilogue"),
        ((r.node, ", ".join(r.prologue), r.anchor, ", ".join(r.epilogue)) for r in found.regions),
    )
    common.show_table("not fused", ("op", "nodes"), found.unfused.items())
    common.show_table(
        f"{len(found.refusals)} refusals",
        ("rule", "node", "reason"),
        ((r.rule, r.node, r.reason) for r in found.refusals),
    )


def show_profile(
    exe: Any, graph: Any, sizes: dict[str, int], feeds: str | None, rounds: int, as_json: bool
) -> None:
    from bitwright.report.feeds import random_inputs, read_inputs
    from bitwright.report.profile import profile

    inputs = read_inputs(feeds, graph) if feeds else random_inputs(graph, sizes, seed=0)
    found = common.working("measuring")(profile)(exe, inputs, rounds)
    if as_json:
        return common.print_json(found.as_json())
    common.show_columns(
        ("#", "node", "op", "in", "fused", "kernel", "us", "%", "Gop/s", "GB/s", "of roofline",
         "read", "written", "limit"),
        [profile_cells(row) for row in found.steps],
        text=("node", "op", "in", "fused", "kernel", "limit"),
    )  # fmt: skip
    click.echo()
    families = found.families()
    common.show_columns(
        ("kernel", "steps", "us", "%"),
        [
            (name, str(count), f"{seconds * 1e6:.1f}", f"{seconds / found.step_seconds:.1%}")
            for name, count, seconds in families
        ],
        text=("kernel",),
    )
    click.echo()
    for line in profile_lines(found):
        common.print_line(line)


def profile_cells(row: Any) -> tuple[str, ...]:
    rate = "" if not row.rate else f"{row.rate / 1e9:.1f}"
    return (
        str(row.number),
        row.node,
        row.op,
        row.arithmetic,
        "+".join(row.fused),
        row.kernel,
        f"{row.seconds * 1e6:.1f}",
        f"{row.share:.1%}",
        rate,
        f"{row.bytes_per_second / 1e9:.1f}",
        "" if row.reached is None else f"{row.reached:.0%}",
        common.human(sum(row.traffic.reads.values()), "B"),
        common.human(sum(row.traffic.writes.values()), "B"),
        row.limit,
    )


def profile_lines(found: Any) -> list[str]:
    """Totals, peaks and the verdict."""
    peaks, at = found.peaks, ", ".join(f"{k}={v}" for k, v in found.sizes.items())
    rates = [f"{common.human(peaks.flops, 'FLOP/s')} f32"]
    if peaks.integers is not None:
        rates.append(f"{common.human(peaks.integers, 'OP/s')} 8-bit integers")
    rates += [f"{common.human(level.rate, 'B/s')} {level.name}" for level in peaks.levels]
    seconds = found.step_seconds or 1.0
    rate = common.human(found.operations / seconds, "OP/s")
    operations, time = found.integer_fractions
    integers = [f"integer products: {operations:.1%} of product operations, {time:.1%} of the time"]
    integers += [f"float product: %{node}: {why}" for node, why in found.float_products]
    return [
        f"run: {found.run_seconds * 1e3:.3f} ms, threads: {peaks.threads}"
        + (f" at {at}" if at else ""),
        f"steps: {found.step_seconds * 1e3:.3f} ms in {len(found.steps)}, "
        f"{common.human(found.operations, 'OP')} at {rate}, "
        f"{common.human(found.nbytes, 'B')} at {common.human(found.nbytes / seconds, 'B/s')}",
        f"outside of matmul, convolution and attention: {found.outside_products:.1%}",
        *(integers if operations or found.float_products else ()),
        f"between steps: {found.overhead_seconds * 1e6:.1f} us per run; "
        f"a barrier: {found.barrier_seconds * 1e6:.2f} us",
        f"peaks measured here: {', '.join(rates)}",
        f"limited by {found.verdict()}",
    ]


def show_node(found: Any, as_json: bool) -> None:
    if as_json:
        return common.print_json(found.as_json())
    for stage, text in found.texts:
        common.out.print(f"[bold]{stage}[/]", highlight=False)
        common.print_line(f"  {text or '(gone)'}")
        for event in found.events:
            if event.stage == stage:
                common.print_line(f"  - {event}")
    if found.steps:
        common.out.print("[bold]schedule[/]", highlight=False)
        for line in found.steps:
            common.print_line(f"  {line}")
