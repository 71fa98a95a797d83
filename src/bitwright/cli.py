"""The command line: parses, calls, prints.

Errors are one paragraph and exit code 2; `--debug` shows where they come from.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import bitwright
from bitwright.errors import BitwrightError

out = Console()
err = Console(stderr=True)


class Command(click.Command):
    """A command whose faults are one clear paragraph."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (BitwrightError, OSError, RecursionError, MemoryError) as error:
            if ctx.find_root().params.get("debug"):
                raise
            what = str(error) or type(error).__name__
            err.print(f"[red]error:[/] {escape(what)}", highlight=False, soft_wrap=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            err.print("interrupted")
            ctx.exit(130)


class Group(click.Group):
    command_class = Command


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(bitwright.__version__, prog_name="bitwright")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
def main(debug: bool) -> None:
    """Make a trained model smaller and faster, run it, and prove what that cost."""


def working(message: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A spinner while a slow step runs, on a terminal only."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not err.is_terminal:
                return function(*args, **kwargs)
            with err.status(message):
                return function(*args, **kwargs)

        return call

    return decorate


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def parse_sizes(
    ctx: click.Context, option: click.Parameter, value: tuple[str, ...]
) -> dict[str, int]:
    """`--size batch=4 --size seq=128`, or `--size batch=4,seq=128`."""
    sizes: dict[str, int] = {}
    for item in (part for text in value for part in text.split(",")):
        name, _, number = item.partition("=")
        if not name or not number.isdigit():
            raise click.BadParameter(f"{item!r} is not NAME=NUMBER")
        sizes[name] = int(number)
    return sizes


size_option = click.option(
    "--size",
    "sizes",
    multiple=True,
    callback=parse_sizes,
    help="Value of a free size, NAME=NUMBER.",
)


def load(path: str) -> bitwright.Graph:
    return working(f"reading {Path(path).name}")(bitwright.load)(path)  # type: ignore[no-any-return]


def show_table(title: str, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """A table of plain text; no columns means no header."""
    table = Table(title=escape(title), title_justify="left", show_header=bool(columns))
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    out.print(table, highlight=False)


def human(count: float, unit: str = "") -> str:
    """12.3 M, 4.56 k, 7."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {letter}{unit}"
    return f"{count:g} {unit}".rstrip()


@main.command()
@click.argument("model")
@size_option
@json_option
def inspect(model: str, sizes: dict[str, int], as_json: bool) -> None:
    """Show inputs, outputs, parameters, op counts, operations and memory of MODEL."""
    from bitwright.report.summary import summarize

    summary = summarize(load(model), sizes)
    if as_json:
        return print_json(summary.as_json())
    at = ", ".join(f"{k}={v}" for k, v in summary.sizes.items())
    where = f" at {at}" if at else ""
    extra = f", without {', '.join(summary.uncounted)}" if summary.uncounted else ""
    show_table(
        summary.name,
        (),
        [
            *(("input", f"{name}: {type_}") for name, type_ in summary.inputs.items()),
            *(("output", f"{name}: {type_}") for name, type_ in summary.outputs.items()),
            ("weights", f"{summary.parameters:,} ({human(summary.parameter_bytes, 'B')})"),
            ("operations", f"{human(summary.flops, 'FLOP')}{where}{extra}"),
            ("activations", f"{human(summary.activation_bytes, 'B')} alive at most{where}"),
            ("host steps", summary.host_steps),
            ("ops", ", ".join(f"{op} {count}" for op, count in summary.ops.items())),
        ],
    )


@main.command()
@click.argument("model")
@click.option("--passes", default="", help="Passes in order, separated by commas.")
@click.option("--pipeline", default="", help="A whole pipeline: simplify or inference.")
@click.option("-o", "--output", type=click.Path(), help="File to write (.txt, .bw, .onnx).")
def opt(model: str, passes: str, pipeline: str, output: str | None) -> None:
    """Run passes over MODEL and print the result as text."""
    from bitwright import pipeline as pipelines
    from bitwright.passes.manager import run_passes

    chosen = list(getattr(pipelines, pipeline.upper(), ())) if pipeline else []
    if pipeline and not chosen:
        raise BitwrightError(f"no pipeline is named {pipeline!r}", expected="simplify or inference")
    for name in filter(None, passes.split(",")):
        if name not in pipelines.PASSES:
            raise BitwrightError(
                f"no pass is named {name!r}", expected=", ".join(sorted(pipelines.PASSES))
            )
        chosen.append(pipelines.PASSES[name])
    graph = working("running passes")(run_passes)(load(model), chosen)
    if output:
        graph.save(output)
    else:
        click.echo(str(graph))


@main.command()
@click.option("--onnx", "conformance", is_flag=True, help="Run the official ONNX cases instead.")
@json_option
def ops(conformance: bool, as_json: bool) -> None:
    """Show every op: kind, operands, attributes, gradient, scalar form."""
    from bitwright.report import coverage

    if conformance:
        return show_conformance(as_json)
    rows = coverage.op_rows()
    if as_json:
        return print_json(rows)
    columns = ("op", "kind", "operands", "attributes", "gradient", "scalar form")
    show_table(f"{len(rows)} ops", columns, (row.values() for row in rows))


def show_conformance(as_json: bool) -> None:
    from bitwright.report import coverage

    summary = working("running the official ONNX cases")(coverage.conformance)()
    if as_json:
        return print_json(summary)
    columns = ("op", "pass", "through a host step", "refused", "wrong", "reason")
    show_table("official ONNX cases", columns, (row.values() for row in summary["ops"]))
    out.print(summary["line"], highlight=False)


@main.command()
@click.argument("model")
@click.option("--inputs", "archive", type=click.Path(), help=".npz with one array per input.")
@click.option("--seed", default=0, help="Seed of random inputs where none are given.")
@click.option("--threads", type=int, help="Threads; as many as the machine has cores by default.")
@click.option("--target", default="cpu", help="cpu, or reference for the interpreter.")
@size_option
@click.option("-o", "--output", type=click.Path(), help=".npz to write the outputs to.")
@json_option
def run(
    model: str,
    archive: str | None,
    seed: int,
    threads: int | None,
    target: str,
    sizes: dict[str, int],
    output: str | None,
    as_json: bool,
) -> None:
    """Run MODEL on given or random inputs and show its outputs."""
    from bitwright.report.feeds import random_inputs, read_inputs

    graph = load(model)
    exe = working("compiling")(bitwright.compile)(graph, target=target, threads=threads)
    feeds = read_inputs(archive) if archive else random_inputs(graph, sizes, seed)
    start = time.perf_counter()
    results = working("running")(exe.run)(feeds)
    seconds = time.perf_counter() - start
    if output:
        write_arrays(output, results)
    facts = {name: describe(array) for name, array in results.items()}
    if as_json:
        return print_json({"outputs": facts, "seconds": seconds})
    keys = ("type", "min", "mean", "max", "nonfinite")
    show_table(
        f"{graph.name}: {seconds * 1e3:.1f} ms",
        ("output", "type", "min", "mean", "max", "not finite"),
        ((name, *(fact.get(key, "") for key in keys)) for name, fact in facts.items()),
    )


def describe(array: Any) -> dict[str, Any]:
    from bitwright.ir import TensorType, dtype

    if not isinstance(array, np.ndarray):
        return {"type": type(array).__name__}
    facts: dict[str, Any] = {"type": str(TensorType(dtype(array.dtype), array.shape))}
    if array.dtype != object and array.dtype.kind != "c" and array.size:
        wide = array.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        facts["nonfinite"] = int(wide.size - finite.size)
        if finite.size:
            facts |= {k: float(f"{getattr(finite, k)():.6g}") for k in ("min", "mean", "max")}
    return facts


def write_arrays(path: str, arrays: dict[str, Any]) -> None:
    from bitwright.ir.container import write_atomically

    write_atomically(path, lambda file: np.savez(file, **arrays))


@main.command()
@click.argument("model")
@click.option("--node", default="", help="Follow one value by name.")
@click.option("--schedule", is_flag=True, help="Print every kernel call and buffer as well.")
@json_option
def explain(model: str, node: str, schedule: bool, as_json: bool) -> None:
    """Show what the compiler did to MODEL, or to one node of it."""
    from bitwright.report import explain as report

    exe = working("compiling")(bitwright.compile)(load(model))
    if node:
        return show_life(report.explain_node(exe.history, node), as_json)
    rows = report.explain_stages(exe.history)
    if as_json:
        return print_json([vars(row) for row in rows])
    show_table(
        exe.graph.name,
        ("stage", "nodes", "rules that fired", "rules refused"),
        ((r.stage, r.nodes, _counts(r.fired), _counts(r.refused)) for r in rows),
    )
    show_schedule(exe.engine.schedule, whole=schedule)


def show_schedule(schedule: Any, whole: bool) -> None:
    """How many steps are kernels, and which are not and why."""
    hosts = list(schedule.host_steps)
    kernels = len(schedule.steps) - len(hosts)
    out.print(f"{kernels} kernel calls, {len(hosts)} host steps", highlight=False)
    for step in hosts:
        line = f"host step: {step.op.op} %{step.node}: {step.why}"
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    if whole:
        click.echo(str(schedule))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{rule} {count}" for rule, count in counts.items())


def show_life(life: Any, as_json: bool) -> None:
    if as_json:
        return print_json(life.as_json())
    for stage, text in life.texts:
        out.print(f"[bold]{stage}[/]", highlight=False)
        out.print(f"  {text or '(gone)'}", highlight=False, markup=False, soft_wrap=True)
        for event in life.events:
            if event.stage == stage:
                out.print(f"  - {event}", highlight=False, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))


if __name__ == "__main__":
    sys.exit(main())
