"""`diff`: explains how two quantized models differ."""

from __future__ import annotations

from typing import Any

import click

from bitwright.cli import common
from bitwright.cli.calibrate import subset_option, threads_option
from bitwright.cli.data import data_options


@common.main.command()
@click.argument("first")
@click.argument("second")
@data_options()
@subset_option
@threads_option
@common.json_option
def diff(
    first: str, second: str, data: Any, subset: int | None, threads: int | None, as_json: bool
) -> None:
    """Explain how SECOND differs from FIRST, layer by layer; with --data also their outputs.

    The exit status is 1 if they differ.
    """
    from bitwright.report.differences import diff as find_differences

    options = {} if data is None else {"subset": subset, "threads": threads}
    with common.notes_of_data():
        found = common.working("comparing")(find_differences)(first, second, data, **options)
    if as_json:
        common.print_json(found.to_json())
    else:
        for line in str(found).splitlines():
            common.print_line(line)
    if not found.is_same:
        click.get_current_context().exit(1)
