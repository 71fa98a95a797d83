"""How a model is written for other consumers: options of the commands that write ONNX files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from bitwright.errors import ExportError

F = TypeVar("F", bound=Callable[..., Any])
_OPTIONS = (
    (
        "--functions",
        ("local", "inline"),
        "Functions that lie in the file, or none, for readers that know no functions (OpenVINO).",
    ),
    (
        "--zero-points",
        ("any", "zero"),
        "All zero points 0: activations are coded symmetrically, as signed 8-bit.",
    ),
    (
        "--weights",
        ("dequantize", "nbits"),
        "Weight-only products behind DequantizeLinear, or as MatMulNBits of com.microsoft.",
    ),
)


def export_options(command: F) -> F:
    for name, choices, text in reversed(_OPTIONS):
        option = click.option(name, type=click.Choice(choices), default=choices[0], help=text)
        command = option(command)
    return command


def options_given(output: str, **options: str) -> dict[str, str]:
    """The options that are not left as they are, which only ONNX files have."""
    ordinary = {name[2:].replace("-", "_"): choices[0] for name, choices, _ in _OPTIONS}
    given = {name: value for name, value in options.items() if value != ordinary[name]}
    if given and Path(output).suffix != ".onnx":
        name = min(given).replace("_", "-")
        raise ExportError(f"--{name} is for ONNX files, and {Path(output).name!r} is none")
    return given
