"""`watch` and `recalibrate`: whether data still fits a quantized model, and the repair."""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import click

import bitwright
from bitwright.cli import common
from bitwright.cli.calibrate import subset_option, threads_option
from bitwright.cli.data import data_options
from bitwright.cli.export import export_options, options_given
from bitwright.cli.quantize import check_output, load_beside, rules_of
from bitwright.warn import DataWarning

DRIFT_STATUS = 1
"""The exit status if the data has drifted."""


@common.main.command()
@click.argument("model")
@data_options(required=True)
@click.option(
    "--stats",
    type=click.Path(),
    help="File of counters: continued if it exists, and written at the end.",
)
@click.option(
    "--level",
    default=0.01,
    show_default=True,
    type=click.FloatRange(0, 0.5, min_open=True),
    help="Bound on the probability of any false alarm, if calibration saw typical batches.",
)
@click.option(
    "--tolerance",
    default=0.001,
    show_default=True,
    type=click.FloatRange(0, 1, max_open=True),
    help="Clipped fraction that is allowed in addition to twice that of calibration.",
)
@subset_option
@threads_option
@common.json_option
def watch(
    model: str,
    data: Any,
    stats: str | None,
    level: float,
    tolerance: float,
    subset: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Count clipped and unused range of quantized MODEL on DATA, and say whether it has drifted.

    Every batch is one run. Exit status: 0 without drift, 1 with an alarm, 2 on errors.
    """
    from bitwright.ir.container import require_writable
    from bitwright.quant.data.batches import Batches

    load = None
    if stats is not None:
        require_writable(stats)
        load = stats if Path(stats).exists() else None
    exe = common.working(f"compiling {Path(model).name}")(bitwright.compile)(model, threads=threads)
    monitor = exe.monitor(every=1, level=level, tolerance=tolerance, load=load)
    with common.notes_of_data():
        if monitor.tensors:
            common.working("counting")(_observe)(
                exe, monitor, Batches(data, exe.graph, subset=subset)
            )
    if stats is not None and monitor.tensors:
        monitor.save(stats)
    report = monitor.report()
    if as_json:
        common.print_json(report.to_json() | {"model": model, "has_drift": report.has_drift})
    else:
        click.echo(str(report).rstrip())
    if report.has_drift:
        click.get_current_context().exit(DRIFT_STATUS)


def _observe(exe: Any, monitor: Any, batches: Any) -> None:
    """Count every batch; a model with state runs too, so that its state goes on."""
    from bitwright.quant.data.batches import has_samples

    has_state = bool(exe.interface.states)
    for batch in batches:
        if has_samples(batch):
            (exe.run if has_state else monitor.observe)(batch)


@common.main.command()
@click.argument("model")
@data_options(required=True)
@click.option(
    "--statistics",
    required=True,
    type=click.Path(),
    help="File of statistics that `bitwright quantize --statistics` wrote; it is replaced.",
)
@click.option("-o", "--output", required=True, type=click.Path(), help="File to write: .onnx, .bw.")
@click.option("--recipe", default="int8", show_default=True, help="As in `bitwright quantize`.")
@click.option("--float-precision", default="f32", show_default=True)
@export_options
@subset_option
@threads_option
@common.json_option
def recalibrate(
    model: str,
    data: Any,
    statistics: str,
    output: str,
    recipe: str,
    float_precision: str,
    subset: int | None,
    threads: int | None,
    as_json: bool,
    **export: str | None,
) -> None:
    """Continue the calibration of float MODEL with new DATA, and quantize it again.

    Prints which ranges moved and by how much. An error or Ctrl-C leaves the statistics unchanged.
    """
    from bitwright.report.compare import file_bytes

    form = options_given(output, export)
    rules = rules_of(recipe, form)
    check_output(output)
    with (
        redirect_stdout(sys.stderr) if as_json else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DataWarning)  # the report has them
        graph = common.working(f"reading {Path(model).name}")(load_beside)(model, output)
        made = bitwright.recalibrate(
            graph,
            statistics,
            data,
            rules,
            subset=subset,
            threads=threads,
            float_precision=float_precision,
        )
        options: dict[str, Any] = dict(form)
        made.save(output, **options)
    sizes = file_bytes(Path(model)), file_bytes(Path(output))
    if as_json:
        changes = [
            {"name": c.name, "before": c.before, "after": c.after, "widening": c.widening}
            for c in made.changes
        ]
        facts = {"model": model, "output": output, "file_bytes": sizes, "ranges": changes}
        return common.print_json(facts | made.report.to_json())
    click.echo(str(made.report).rstrip())
    click.echo(made.changes_text())
    common.print_size(model, output, sizes)
