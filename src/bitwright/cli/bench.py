"""`bench`: times a model against other installed runtimes."""

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
@click.argument("model")
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
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(1))
@common.size_option
@common.precision_option
@click.option("--feeds", type=click.Path(), help=".npz with one array per input.")
@click.option(
    "--json",
    "target",
    type=click.Path(allow_dash=True),
    help="File for the results; - prints them.",
)
def bench(
    model: str,
    against: list[str],
    threads: list[int],
    rounds: int,
    sizes: dict[str, int],
    precision: str | None,
    feeds: str | None,
    target: str | None,
) -> None:
    """Time MODEL against other runtimes: interleaved rounds, each engine in its own process.

    Inputs are random unless --feeds gives them.
    """
    from bitwright.report.bench import bench as measure

    result = common.working("measuring")(measure)(
        model,
        against=against,
        threads=threads or None,
        rounds=rounds,
        sizes=sizes,
        feeds=feeds,
        precision=precision or "f32",
    )
    if target == "-":
        return click.echo(json.dumps(result.as_json(), indent=2))
    if target:
        Path(target).write_text(json.dumps(result.as_json(), indent=2) + "\n")
    show_bench(result)


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
