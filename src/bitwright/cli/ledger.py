"""`ledger`: where the error of a quantized model comes from."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from typing import Any

import click

import bitwright
from bitwright.cli import common
from bitwright.cli.calibrate import subset_option, threads_option
from bitwright.cli.data import data_options


@common.main.command()
@click.argument("quantized")
@click.option("--float", "float_model", required=True, help="The model that was quantized.")
@data_options(required=True)
@click.option(
    "--calibration",
    type=click.Path(),
    help="The data that the model was calibrated with, to find values outside of its ranges.",
)
@subset_option
@click.option(
    "--eval",
    "evaluation",
    metavar="SCRIPT.py:FUNCTION",
    help="Predict effects on a score: the function gets a callable from a dict of arrays to a "
    "dict of arrays, and returns a number or a dict; its first number is the metric.",
)
@click.option(
    "--fixes", default=5, show_default=True, type=click.IntRange(0), help="Fixes to measure."
)
@threads_option
@click.option(
    "--json",
    "target",
    type=click.Path(allow_dash=True),
    help="File for the ledger as JSON; - prints it.",
)
def ledger(
    quantized: str,
    float_model: str,
    data: Any,
    calibration: str | None,
    subset: int | None,
    evaluation: str | None,
    fixes: int,
    threads: int | None,
    target: str | None,
) -> None:
    """Split the output error of QUANTIZED by layer and cause, and list changed answers.

    Shares of the lines and the rest add up to the error measured on DATA. Effects of leaving out a
    line are predictions, effects of fixes are measured.
    """
    from bitwright.report.evaluate import Evaluation

    script = Evaluation(evaluation) if evaluation else None
    with (
        redirect_stdout(sys.stderr) if target == "-" else nullcontext(),  # the script may print
        common.notes_of_data(),
    ):
        found = common.working("attributing the error")(bitwright.ledger)(
            quantized,
            data,
            script.scores if script else None,
            float_model=float_model,
            calibration=calibration,
            subset=subset,
            fixes=fixes,
            threads=threads,
        )
    if target == "-":
        return common.print_json(found.to_dict())
    if target:
        found.save(target)
    click.echo(str(found).rstrip())
