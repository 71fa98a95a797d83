"""`calibrate`: statistics of a model's values."""

from __future__ import annotations

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


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"
