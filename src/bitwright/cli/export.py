"""How a model is written for its consumer: options of the commands that write ONNX files."""

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
        "Who runs the file. `any` is right in ONNX Runtime and OpenVINO on every x86 processor; "
        "the others set the options below for one runtime.",
    ),
    (
        "--functions",
        ("inline", "local"),
        "Standard operators only, or functions that lie in the file.",
    ),
    (
        "--zero-points",
        ("any", "zero"),
        "All zero points 0: activations are quantized symmetrically, as signed 8-bit.",
    ),
    (
        "--weight-type",
        ("u8", "i8"),
        "Unsigned 8-bit weights, which no runtime saturates on, or signed ones.",
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
        "Layers whose activations are quantized at run time: in float, or spelled out in integers; "
        "or all activations in float that ONNX Runtime would not fuse.",
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
    """The options that are given, which only ONNX files have."""
    given = {name: value for name, value in options.items() if value is not None}
    if given and Path(output).suffix != ".onnx":
        name = min(given).replace("_", "-")
        raise ExportError(f"--{name} is for ONNX files, and {Path(output).name!r} is none")
    return given
