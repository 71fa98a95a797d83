"""Options of the commands that write ONNX files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from bitwright.errors import ExportError

F = TypeVar("F", bound=Callable[..., Any])
OPTIONS = (
    (
        "--consumer",
        ("any", "onnxruntime", "openvino", "bitwright"),
        "The runtime of the file. `any` is correct in ONNX Runtime and OpenVINO on every x86 "
        "processor; the others set the options below for one runtime.",
    ),
    ("--functions", ("inline", "local"), "Standard operators only, or model-local functions."),
    (
        "--zero-points",
        ("any", "zero"),
        "All zero points 0: activations are quantized symmetrically, as signed 8-bit.",
    ),
    (
        "--weight-type",
        ("u8", "i8"),
        "Unsigned 8-bit weights, with which no runtime saturates, or signed ones.",
    ),
    (
        "--weights",
        ("arithmetic", "dequantize", "nbits"),
        "Weight-only products: plain arithmetic, DequantizeLinear, or MatMulNBits of "
        "com.microsoft.",
    ),
    (
        "--activations",
        ("static", "integer", "float"),
        "Dynamically quantized layers: in float (static), or in integer operators (integer); "
        "float also keeps activations in float that ONNX Runtime would not fuse.",
    ),
    (
        "--rounding",
        ("plain", "onnxruntime"),
        "The usual operators, or those that ONNX Runtime rounds as bitwright does.",
    ),
)


def export_options(command: F) -> F:
    for name, choices, text in reversed(OPTIONS):
        command = click.option(name, type=click.Choice(choices), default=None, help=text)(command)
    return command


def options_given(output: str, options: dict[str, str | None]) -> dict[str, str]:
    """The given options; raises if the output is not an ONNX file."""
    given = {name: value for name, value in options.items() if value is not None}
    if given and Path(output).suffix != ".onnx":
        name = min(given).replace("_", "-")
        raise ExportError(f"--{name} is for ONNX files, not for {Path(output).name!r}")
    return given
