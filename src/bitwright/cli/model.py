"""`inspect`, `opt`, `ops` and `run`: describe a model, run passes, list ops, run a model."""

from __future__ import annotations

import time
from typing import Any

import click
import numpy as np

import bitwright
from bitwright.cli import common
from bitwright.errors import BitwrightError


@common.main.command()
@click.argument("model")
@common.size_option
@common.json_option
def inspect(model: str, sizes: dict[str, int], as_json: bool) -> None:
    """Show inputs, outputs, parameters, op counts, operations and memory of MODEL."""
    from bitwright.report.summary import summarize

    summary = summarize(common.load(model), sizes)
    if as_json:
        return common.print_json(summary.as_json())
    at = ", ".join(f"{k}={v}" for k, v in summary.sizes.items())
    where = f" at {at}" if at else ""
    extra = f", without {', '.join(summary.uncounted)}" if summary.uncounted else ""
    common.show_table(
        summary.name,
        (),
        [
            *(("input", f"{name}: {type_}") for name, type_ in summary.inputs.items()),
            *(("output", f"{name}: {type_}") for name, type_ in summary.outputs.items()),
            ("weights", f"{summary.parameters:,} ({common.human(summary.parameter_bytes, 'B')})"),
            ("operations", f"{common.human(summary.flops, 'FLOP')}{where}{extra}"),
            ("activations", f"{common.human(summary.activation_bytes, 'B')} live at most{where}"),
            ("interpreter fallbacks", summary.fallbacks),
            ("ops", ", ".join(f"{op} {count}" for op, count in summary.ops.items())),
        ],
    )


@common.main.command()
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
    graph = common.working("running passes")(run_passes)(common.load(model), chosen)
    if output:
        graph.save(output)
    else:
        click.echo(str(graph))


@common.main.command()
@click.option("--onnx", "conformance", is_flag=True, help="Run the official ONNX cases instead.")
@common.json_option
def ops(conformance: bool, as_json: bool) -> None:
    """Show every op: kind, operands, attributes, gradient, scalar form."""
    from bitwright.report import coverage

    if conformance:
        return show_conformance(as_json)
    rows = coverage.op_rows()
    if as_json:
        return common.print_json(rows)
    columns = ("op", "kind", "operands", "attributes", "gradient", "scalar form")
    common.show_table(f"{len(rows)} ops", columns, (row.values() for row in rows))


def show_conformance(as_json: bool) -> None:
    from bitwright.report import coverage

    summary = common.working("running the official ONNX cases")(coverage.conformance)()
    if as_json:
        return common.print_json(summary)
    columns = ("op", "pass", "with a fallback", "refused", "wrong", "reason")
    common.show_table("official ONNX cases", columns, (row.values() for row in summary["ops"]))
    common.out.print(summary["line"], highlight=False)


@common.main.command()
@click.argument("model")
@click.option("--inputs", "archive", type=click.Path(), help=".npz by input name, or .npy.")
@click.option("--seed", default=0, help="Seed of random inputs, if none are given.")
@click.option("--threads", type=int, help="Threads; default: the number of cores.")
@click.option("--target", default="cpu", help="cpu, cuda, or reference for the interpreter.")
@common.size_option
@common.precision_option
@click.option("-o", "--output", type=click.Path(), help=".npz to write the outputs to.")
@common.json_option
def run(
    model: str,
    archive: str | None,
    seed: int,
    threads: int | None,
    target: str,
    sizes: dict[str, int],
    precision: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Run MODEL on given or random inputs and show its outputs."""
    from bitwright.ir.feeds import check_sizes
    from bitwright.report.feeds import random_inputs, read_inputs

    exe = common.working("compiling")(bitwright.compile)(
        model, target=target, threads=threads, precision=precision
    )
    graph = exe.interface
    check_sizes(sizes, (s.name for s in graph.input_symbols), f"graph {graph.name!r}")
    feeds = read_inputs(archive, graph) if archive else random_inputs(graph, sizes, seed)
    start = time.perf_counter()
    results = common.working("running")(exe.run)(feeds)
    seconds = time.perf_counter() - start
    if output:
        write_arrays(output, results)
    facts = {name: describe(array) for name, array in results.items()}
    if as_json:
        return common.print_json({"outputs": facts, "seconds": seconds})
    keys = ("type", "min", "mean", "max", "nonfinite")
    common.show_table(
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
