"""`verify`: reruns the proof of a model file."""

from __future__ import annotations

import click

from bitwright.cli import common
from bitwright.cli.calibrate import threads_option


@common.main.command()
@click.argument("file")
@click.option(
    "--with",
    "runtimes",
    default="",
    metavar="RUNTIME,...",
    help="Also run it in these runtimes: onnxruntime, openvino.",
)
@click.option("--no-layers", is_flag=True, help="Compare only the outputs of other runtimes.")
@threads_option
@common.json_option
def verify(file: str, runtimes: str, no_layers: bool, threads: int | None, as_json: bool) -> None:
    """Check the weights of FILE, and rerun its golden inputs on this machine.

    In other runtimes each layer also runs alone, and the first one that differs is named. The exit
    status is 1 if something differs, 2 if the file cannot be checked.
    """
    from bitwright.proof.verification import verify_file

    names = [name for name in runtimes.split(",") if name]
    found = common.working("verifying")(verify_file)(
        file, names, layers=not no_layers, threads=threads
    )
    if as_json:
        common.print_json(found.to_json())
    else:
        for line in str(found).splitlines():
            common.print_line(line)
    if not found.is_ok:
        click.get_current_context().exit(1)
