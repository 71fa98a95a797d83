"""`bench`: times a model against other installed runtimes, or runs the benchmark suite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from bitwright.cli import common

NOTABLE_DIFFERENCE = 1e-3


def parse_names(ctx: click.Context, option: click.Parameter, value: str) -> list[str]:
    """`--against onnxruntime,openvino`; empty for none."""
    return [name for name in value.split(",") if name]


def parse_counts(ctx: click.Context, option: click.Parameter, value: str | None) -> list[int]:
    """`--threads 1,2,4`."""
    if value is None:
        return []
    parts = value.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of positive numbers")
    return [int(part) for part in parts]


@common.main.command()
@click.argument("models", nargs=-1, metavar="MODEL | [SUITE]...")
@click.option(
    "--suite",
    "is_suite",
    is_flag=True,
    help="Run the suite: all of it, or the named parts (matmul, conv, depthwise, attention, norm, "
    "softmax, quantize, elementwise, models, or model files).",
)
@click.option("--quick", is_flag=True, help="Suite: few cases and rounds.")
@click.option("--baseline", type=click.Path(), help="Suite: .json of an earlier run.")
@click.option("--csv", "table", type=click.Path(), help="Suite: file for the results as CSV.")
@click.option(
    "--against",
    default="onnxruntime,openvino",
    show_default=True,
    callback=parse_names,
    help="Engines to compare with, separated by commas.",
)
@click.option(
    "--threads",
    callback=parse_counts,
    help="Numbers of threads, separated by commas; default: the number of cores.",
)
@click.option("--rounds", type=click.IntRange(1), help="Default: 15, of the suite 31.")
@common.size_option
@common.precision_option
@click.option("--feeds", type=click.Path(), help=".npz with one array per input.")
@click.option(
    "--target", "device", default="cpu", show_default=True, help="cpu or cuda, for bitwright."
)
@click.option(
    "--json",
    "target",
    type=click.Path(allow_dash=True),
    help="File for the results; - prints them.",
)
def bench(
    models: tuple[str, ...],
    is_suite: bool,
    quick: bool,
    baseline: str | None,
    table: str | None,
    against: list[str],
    threads: list[int],
    rounds: int | None,
    sizes: dict[str, int],
    precision: str | None,
    feeds: str | None,
    device: str,
    target: str | None,
) -> None:
    """Time MODEL against other runtimes: interleaved rounds, each engine in its own process.

    Inputs are random unless --feeds gives them. With --suite: ops and models at several
    precisions; with --baseline the exit status is 1 if a row got worse beyond noise.
    """
    if is_suite:
        if feeds or precision or len(threads) > 1 or device != "cpu":
            raise click.UsageError(
                "--suite takes one number of threads, no --feeds, no --precision, no --target"
            )
        options = {"quick": quick, "baseline": baseline, "rounds": rounds, "sizes": sizes}
        return run_suite(models, threads[0] if threads else None, target, table, options)
    if quick or baseline or table:
        raise click.UsageError("--quick, --baseline and --csv need --suite")
    if len(models) != 1:
        raise click.UsageError("give one MODEL, or --suite")
    (model,) = models
    from bitwright.report.bench import bench as measure

    result = common.working("measuring")(measure)(
        model,
        against=against,
        threads=threads or None,
        rounds=rounds or 15,
        sizes=sizes,
        feeds=feeds,
        precision=precision or "f32",
        target=device,
    )
    if target == "-":
        return click.echo(json.dumps(result.as_json(), indent=2))
    if target:
        Path(target).write_text(json.dumps(result.as_json(), indent=2) + "\n")
    show_bench(result)


def run_suite(
    names: tuple[str, ...],
    threads: int | None,
    target: str | None,
    table: str | None,
    options: dict[str, Any],
) -> None:
    """Run the suite, print it, write its files, and exit with status 1 on a regression."""
    from bitwright.ir.container import require_writable
    from bitwright.report.suite.machine import in_one_line
    from bitwright.report.suite.run import bench_suite

    files = [path for path in (target, table) if path and path != "-"]
    for path in files:
        require_writable(path)
    measure = common.working("measuring")(bench_suite)
    result = measure(names or None, threads=threads, **options)
    for path in files:
        result.save(path)
    if target == "-":
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        has_baseline = options["baseline"] is not None
        columns = ("suite", "case", "precision", "ms", "quartiles", "rate", "memory", "SQNR dB")
        more = ("x baseline", "verdict") if has_baseline else ()
        common.show_columns(
            (*columns, *more),
            [suite_cells(row, has_baseline) for row in result.rows],
            ("suite", "case", "precision", "verdict"),
        )
        common.print_line(in_one_line(result.machine))
        for note in result.notes:
            common.print_note(note)
    if result.regressions:
        common.print_note(f"{len(result.regressions)} rows got worse beyond noise")
        click.get_current_context().exit(1)


def suite_cells(row: Any, has_baseline: bool) -> tuple[str, ...]:
    first = row.suite, row.name, row.precision
    if row.error:
        return (*first, *[""] * 4, f"failed: {row.error}", *["", "failed"] * has_baseline)
    low, high = row.quartiles
    rate = f"{row.gflops:.0f} GFLOP/s" if row.gflops else f"{row.gbytes or 0:.1f} GB/s"
    memory = "" if row.memory_bytes is None else common.human(row.memory_bytes, "B")
    cells = (
        *first,
        f"{row.milliseconds:.4f}",
        f"{low:.4f}-{high:.4f}",
        rate,
        memory,
        "exact" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
    )
    ratio = "" if row.baseline_ratio is None else f"{row.baseline_ratio:.2f}"
    return (*cells, ratio, row.verdict) if has_baseline else cells


def show_bench(result: Any) -> None:
    inputs = ", ".join(f"{name}: {what}" for name, what in result.inputs.items())
    common.show_table(
        f"{result.model} ({inputs}), {result.rounds} rounds",
        ("threads", "engine", "ms", "quartiles", "x peer", "ready s", "MB"),
        map(bench_cells, result.rows),
    )
    versions = dict.fromkeys(f"{row.engine} {row.version}" for row in result.rows if row.version)
    common.print_line(", ".join(versions))
    for row in result.rows:
        if row.difference is not None and row.difference > NOTABLE_DIFFERENCE:
            line = f"outputs of {row.engine} differ by {row.difference:.1e}"
            common.print_line(line)


def bench_cells(row: Any) -> tuple[Any, ...]:
    if row.error:
        return row.threads, f"{row.engine}: {row.error}"
    low, high = row.quartiles
    return (
        row.threads,
        row.engine,
        f"{row.milliseconds:.3f}",
        f"{low:.3f}-{high:.3f}",
        "" if row.times_best_peer is None else f"{row.times_best_peer:.2f}",
        f"{row.ready_seconds:.2f}",
        "" if row.memory_bytes is None else f"{row.memory_bytes / 1e6:.0f}",
    )
