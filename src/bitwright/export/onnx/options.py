"""Export options: each selects one of several ONNX forms with the same meaning.

functions      "inline"       standard nodes only; the metadata records which implement one op
               "local"        ops of several nodes are model-local functions
zero_points    "any"          unchanged
               "zero"         all 0; u8 values around 128 become signed values around 0
weight_type    "u8"           8-bit operands of static and dynamic products are unsigned: runtimes
                              do not multiply u8 by s8, which saturates on x86 without VNNI
               "i8"           unchanged
weights        "arithmetic"   weight-only products dequantize by Cast and Mul, which runtimes fold
               "dequantize"   by DequantizeLinear, which ONNX Runtime fuses to MatMulNBits and
                              then quantizes activations to 8 bits
               "nbits"        MatMulNBits of com.microsoft, with float activations
activations    "static"       static quantization is written; a product or attention with dynamic
                              quantization is written in float, and the consumer may quantize it
               "integer"      dynamic quantization and the integer product are written too
               "float"        static convolutions that ONNX Runtime would not fuse are written in
                              float: closer to the float model, and faster there
rounding       "plain"        the usual operators
               "onnxruntime"  operators that round in ONNX Runtime as in bitwright

`consumer` sets the defaults of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from bitwright.errors import ExportError

CHOICES = {
    "functions": ("inline", "local"),
    "zero_points": ("any", "zero"),
    "weight_type": ("u8", "i8"),
    "weights": ("arithmetic", "dequantize", "nbits"),
    "activations": ("static", "integer", "float"),
    "rounding": ("plain", "onnxruntime"),
}


@dataclass(frozen=True)
class Options:
    functions: str = "inline"
    zero_points: str = "any"
    weight_type: str = "u8"
    weights: str = "arithmetic"
    activations: str = "static"
    rounding: str = "plain"

    def __post_init__(self) -> None:
        for option in fields(self):
            given, allowed = getattr(self, option.name), CHOICES[option.name]
            if given not in allowed:
                raise ExportError(
                    f"the export option {option.name!r} has no value {given!r}",
                    expected=" or ".join(map(repr, allowed)),
                )
        if self.zero_points == "zero" and self.weight_type == "u8":
            raise ExportError(
                "zero points of 0 need signed weights",
                expected="weight_type='i8' with zero_points='zero'",
            )


CONSUMERS: dict[str, dict[str, str]] = {
    "any": {},
    "onnxruntime": {
        "functions": "local",
        "weight_type": "i8",
        "weights": "nbits",
        "activations": "integer",
        "rounding": "onnxruntime",
    },
    "openvino": {"weight_type": "i8"},
    "bitwright": {
        "functions": "local",
        "weight_type": "i8",
        "weights": "dequantize",
        "activations": "integer",
    },
}
"""The differences from the defaults, which are correct in every runtime on every processor."""


def options_for(consumer: str = "any", **given: str | None) -> Options:
    """The options of a consumer, overridden by those that are given."""
    if consumer not in CONSUMERS:
        raise ExportError(
            f"there is no consumer {consumer!r}", expected=" or ".join(map(repr, CONSUMERS))
        )
    named = {name: value for name, value in given.items() if value is not None}
    if unknown := set(named) - set(CHOICES):
        raise ExportError(
            f"there is no export option {min(unknown)!r}", expected=", ".join(CHOICES)
        )
    chosen: dict[str, Any] = CONSUMERS[consumer] | named
    if chosen.get("zero_points") == "zero":
        chosen.setdefault("weight_type", "i8")
    return Options(**chosen)
