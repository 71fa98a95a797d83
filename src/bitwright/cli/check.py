"""`check`: predicts what runtimes do with each quantized node of a file."""

from __future__ import annotations

import click

from bitwright.cli import common


@common.main.command()
@click.argument("file")
@click.option(
    "--for",
    "targets",
    default="onnxruntime-cpu,openvino",
    show_default=True,
    metavar="TARGET,...",
    help="onnxruntime-cpu, openvino, tensorrt (from its documentation).",
)
@click.option("--all", "show_all", is_flag=True, help="List fused nodes too.")
@click.option("--fix", type=click.Path(), help="Write a repaired copy to this file and check it.")
@click.option("--compare", is_flag=True, help="Compare with what the installed packages really do.")
@common.json_option
def check(
    file: str, targets: str, show_all: bool, fix: str | None, compare: bool, as_json: bool
) -> None:
    """Predict what runtimes do with each quantized node of FILE: fused, fallback, unsafe, rejected.

    The exit status is 1 if a node is unsafe or rejected.
    """
    from bitwright.deploy.checking import check_file
    from bitwright.deploy.repair import repair
    from bitwright.deploy.truth import PACKAGES, compare_with_runtime

    names = [name for name in targets.split(",") if name]
    changes: list[str] = []
    found = check_file(file, names)
    if fix is not None:
        changes = repair(file, fix, names)
        found = check_file(fix, names)
    if as_json:
        common.print_json({"changes": changes, "targets": [one.to_json() for one in found]})
    else:
        for change in changes:
            common.print_line(f"fixed {change}")
        if fix is not None and not changes:
            common.print_line("nothing to fix")
        for one in found:
            common.print_line(one.summary())
            for v in one.verdicts:
                if show_all or v.status != "fused":
                    what = v.kernel if v.status == "fused" else v.reason
                    tail = f"; fix: {v.fix}" if v.fix else ""
                    common.print_line(f"  {v.status:8} {v.op} {v.node!r}: {what}{tail}")
    for name in (name for name in names if compare and name in PACKAGES):
        agreement = compare_with_runtime(fix or file, name)
        common.print_note(agreement)
        for verdict, actual in agreement.wrong:
            common.print_note(f"{verdict.op} {verdict.node!r}: {verdict.status}, but {actual}")
    if not all(one.is_ok for one in found):
        click.get_current_context().exit(1)
