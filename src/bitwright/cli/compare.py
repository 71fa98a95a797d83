"""`compare`: errors between two models."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext, redirect_stdout
from typing import Any

import click

from bitwright.cli import common
from bitwright.cli.calibrate import subset_option, threads_option
from bitwright.cli.data import data_options
from bitwright.cli.report import check_report, latency_option, report_option, write_report


@common.main.command()
@click.argument("first")
@click.argument("second")
@data_options(required=True)
@subset_option
@click.option("--layers/--no-layers", default=True, help="Compare values inside the models too.")
@click.option("--worst", default=5, show_default=True, type=click.IntRange(0))
@report_option
@latency_option
@threads_option
@common.json_option
def compare(
    first: str,
    second: str,
    data: Any,
    subset: int | None,
    layers: bool,
    worst: int,
    report_path: str | None,
    latency: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Compare model SECOND with model FIRST on DATA: SQNR, cosine, errors, worst batches, size."""
    from bitwright.report.compare import compare as measure

    check_report(report_path)
    with common.notes_of_data():
        found = measure(first, second, data, layers=layers, subset=subset, threads=threads)
    if report_path is not None:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            write_report(
                report_path,
                second,
                float_model=first,
                data=data,
                comparison=found,
                latency=latency,
                threads=threads,
                files=(first, second),
            )
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


def _cells(one: Any) -> tuple[str, ...]:
    sqnr = one.sqnr_db
    return (
        "exact" if sqnr == math.inf else f"{sqnr:.2f}",
        f"{one.cosine:.6f}",
        f"{one.max_error:.4g}" + (f" ({one.nonfinite} not finite)" if one.nonfinite else ""),
        f"{one.largest:.4g}",
        "" if one.same_top1 is None else f"{one.same_top1:.4f}",
    )
