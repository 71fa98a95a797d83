"""`report`, and the option `--report` of other commands: the HTML report of a quantized model."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from bitwright.cli import common
from bitwright.cli.calibrate import subset_option, threads_option
from bitwright.cli.data import data_options
from bitwright.errors import BitwrightError

report_option = click.option(
    "--report",
    "report_path",
    metavar="FILE.html",
    type=click.Path(),
    help="Write an HTML report, and its data as JSON beside it.",
)
latency_option = click.option(
    "--latency/--no-latency", default=True, help="Time the models for the report."
)


def check_report(path: str | None) -> None:
    """Raise before the work of a command if its report could not be written."""
    if path is not None:
        from bitwright.report.html.data import check_path

        check_path(path)


def command_line() -> str:
    """The command as the user gave it."""
    return shlex.join(["bitwright", *sys.argv[1:]])


def write_report(path: str, quantized: Any, **sections: Any) -> None:
    """Write a report with the command line, and print its name."""
    from bitwright.report.html.assemble import write_report as write

    with common.notes_of_data():
        made = common.working("writing the report")(write)(
            path, quantized, command=command_line(), **sections
        )
    common.print_line(f"{path}: {made.headline}")


@common.main.command()
@click.argument("quantized")
@click.option("--float", "float_model", type=click.Path(), help="The model before quantization.")
@data_options()
@subset_option
@click.option("--ledger", type=click.Path(), help="JSON of the ledger.")
@click.option("--tune", type=click.Path(), help="JSON of the search.")
@click.option("-o", "--output", required=True, type=click.Path(), help="File to write: .html.")
@latency_option
@common.size_option
@click.option("--title", help="Title of the report; default: the name of the model's file.")
@click.option("--include-inputs", is_flag=True, help="Show the first elements of the worst inputs.")
@threads_option
def report(
    quantized: str,
    float_model: str | None,
    data: Any,
    subset: int | None,
    ledger: str | None,
    tune: str | None,
    output: str,
    latency: bool,
    sizes: dict[str, int],
    title: str | None,
    include_inputs: bool,
    threads: int | None,
) -> None:
    """Write an HTML report about the model QUANTIZED, and its data as JSON beside it.

    With --float and --data both models are compared layer by layer. DATA stays out of the file.
    """
    check_report(output)
    write_report(
        output,
        quantized,
        float_model=float_model,
        data=data,
        subset=subset,
        latency=latency,
        sizes=sizes,
        threads=threads,
        ledger=read_section(ledger),
        tune=read_section(tune),
        title=title,
        include_inputs=include_inputs,
    )


def read_section(path: str | None) -> dict[str, Any] | None:
    """A section of the report from a JSON file."""
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise BitwrightError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BitwrightError(f"{path} has no section of a report", expected="a JSON object")
    return found
