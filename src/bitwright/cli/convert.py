"""`convert`: writes a model in another precision and reports the loss."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import bitwright
from bitwright.cli import common
from bitwright.cli.calibrate import subset_option, threads_option
from bitwright.cli.data import data_options
from bitwright.cli.quantize import check_output, load_beside


@common.main.command()
@click.argument("model")
@click.option("--precision", required=True, help="f16, mixed, mixed_conservative, mixed_bf16, ….")
@click.option("-o", "--output", required=True, type=click.Path(), help="File to write: .onnx, .bw.")
@data_options()
@click.option("--io", is_flag=True, help="Change the types of inputs and outputs too.")
@click.option("--bf16-ops", is_flag=True, help="Write bf16 ops, which few runtimes support.")
@subset_option
@threads_option
@common.json_option
def convert(
    model: str,
    precision: str,
    output: str,
    data: Any,
    io: bool,
    bf16_ops: bool,
    subset: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Write MODEL with its ops in another precision.

    With DATA, ops whose values would overflow or underflow stay in full precision, and the loss is
    measured.
    """
    from bitwright.report.compare import file_bytes

    check_output(output)
    graph = common.working(f"reading {Path(model).name}")(load_beside)(model, output)
    with common.notes_of_data():
        found = common.working("converting")(bitwright.convert)(
            graph, precision, data, io=io, subset=subset, threads=threads
        )
    found.save(output, bf16_ops=bf16_ops)
    sizes = file_bytes(Path(model)), file_bytes(Path(output))
    if as_json:
        facts = {"model": model, "output": output, "file_bytes": sizes}
        return common.print_json(facts | asdict(found.report))
    click.echo(str(found.report))
    common.print_size(model, output, sizes)
