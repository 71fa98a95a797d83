"""What other consumers of a file may want: each option is one thing that ONNX can say in two ways.

functions      "local"       what takes several nodes is a function that lies in the file
               "inline"      its nodes stand in the graph, for readers without functions
zero_points    "any"         as they are
               "zero"        all of them 0; codes around 128 become signed ones around 0
weights        "dequantize"  DequantizeLinear before a product, with blocks where scales have
               "nbits"       MatMulNBits of com.microsoft for matrices of weights in codes
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from bitwright.errors import ExportError

CHOICES = {
    "functions": ("local", "inline"),
    "zero_points": ("any", "zero"),
    "weights": ("dequantize", "nbits"),
}


@dataclass(frozen=True)
class Options:
    functions: str = "local"
    zero_points: str = "any"
    weights: str = "dequantize"

    def __post_init__(self) -> None:
        for option in fields(self):
            given, allowed = getattr(self, option.name), CHOICES[option.name]
            if given not in allowed:
                raise ExportError(
                    f"the export option {option.name!r} has no value {given!r}",
                    expected=" or ".join(map(repr, allowed)),
                )
