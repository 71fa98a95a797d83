"""`calibrate` and `compare`: statistics of a model's values, and errors between two models."""

from __future__ import annotations

import math
from typing import Any

import click

import bitwright
from bitwright.cli import common
from bitwright.cli.data import data_options

subset_option = click.option("--subset", type=click.IntRange(1), help="Use this many batches.")
threads_option = click.option(
    "--threads", type=click.IntRange(1), help="Threads; as many as cores by default."
)


@common.main.command()
@click.argument("model")
@data_options(required=True)
@click.option("-o", "--output", required=True, type=click.Path(), help="File of statistics.")
@subset_option
@click.option(
    "--patience", type=click.IntRange(1), help="Stop after this many batches without a wider range."
)
@click.option("--value", "values", multiple=True, help="Observe this value (repeatable).")
@click.option("--ignore-nonfinite", is_flag=True, help="Skip NaN and infinities.")
@click.option("--resume", is_flag=True, help="Continue from the file of an interrupted run.")
@threads_option
@common.json_option
def calibrate(
    model: str,
    data: Any,
    output: str,
    subset: int | None,
    patience: int | None,
    values: tuple[str, ...],
    ignore_nonfinite: bool,
    resume: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Run MODEL over DATA and write statistics of its values.

    Ctrl-C stops the run after the current batch and saves the statistics.
    """
    ranges = bitwright.calibrate(
        common.load(model),
        data,
        values=values or None,
        subset=subset,
        patience=patience,
        nonfinite="ignore" if ignore_nonfinite else "error",
        save=output,
        resume=resume,
        threads=threads,
    )
    if as_json:
        facts = {"batches": ranges.batches, "values": ranges.rows(), "notes": ranges.notes()}
        return common.print_json(facts)
    common.show_table(
        f"{len(ranges.statistics)} values, {ranges.batches} batches",
        ("value", "count", "min", "max", "mean"),
        (
            (row["value"], row["count"], *(_number(row[key]) for key in ("min", "max", "mean")))
            for row in ranges.rows()
        ),
    )
    for note in ranges.notes():
        common.print_line(note)


@common.main.command()
@click.argument("first")
@click.argument("second")
@data_options(required=True)
@subset_option
@click.option("--layers/--no-layers", default=True, help="Compare values inside the models too.")
@click.option("--worst", default=5, show_default=True, type=click.IntRange(0))
@threads_option
@common.json_option
def compare(
    first: str,
    second: str,
    data: Any,
    subset: int | None,
    layers: bool,
    worst: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Compare model SECOND with model FIRST on DATA: SQNR, cosine, errors, worst batches, size."""
    from bitwright.report.compare import compare as measure

    with common.notes_of_data():
        found = measure(first, second, data, layers=layers, subset=subset, threads=threads)
    if as_json:
        return common.print_json(found.as_json(worst))
    columns = ("SQNR dB", "cosine", "max error", "largest", "same top-1")
    common.show_table(
        f"outputs, {len(found.samples)} batches",
        ("output", *columns),
        ((name, *_cells(one)) for name, one in found.outputs.items()),
    )
    if found.layers:
        common.show_table(
            "layers", ("value", *columns), ((n, *_cells(one)) for n, one in found.layers.items())
        )
    if worst and len(found.samples) > 1:
        common.show_table(
            "worst batches",
            ("batch", *columns),
            ((number, *_cells(one)) for number, one in found.worst(worst)),
        )
    if found.file_bytes:
        a, b = found.file_bytes
        line = f"files: {common.human(a, 'B')} and {common.human(b, 'B')}, {b / a:.3f} of the first"
        common.out.print(line, highlight=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _cells(one: Any) -> tuple[str, ...]:
    sqnr = one.sqnr_db
    return (
        "exact" if sqnr == math.inf else f"{sqnr:.2f}",
        f"{one.cosine:.6f}",
        f"{one.max_error:.4g}" + (f" ({one.nonfinite} not finite)" if one.nonfinite else ""),
        f"{one.largest:.4g}",
        "" if one.same_top1 is None else f"{one.same_top1:.4f}",
    )
