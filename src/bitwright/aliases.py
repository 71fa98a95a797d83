"""Deprecated names of the last release and their replacements; each use warns once.

This module lists all of them: recipe options and schemes, saved ops and their attributes, public
names. The next release removes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from bitwright.warn import warn_once

OPS = {
    "to_codes": "requantize",
    "map_codes": "lookup_table",
    "coded_matmul": "quantized_matmul",
    "host": "fallback",
}
ATTRIBUTES = {"in_codes": "int8"}
RECIPE_OPTIONS = {
    "guard_sqnr": "min_output_sqnr_db",
    "lowest_sqnr": "min_layer_sqnr_db",
    "static_sqnr": "static_sqnr_db",
    "attention_sqnr": "attention_sqnr_db",
    "least_share": "min_int8_fraction",
}
SCHEMES = {
    "weights": "weight_only",
    "given": "already_quantized",
    "dynamic": "dynamic_per_token",
    "dynamic-tensor": "dynamic_per_tensor",
}
REPORT = {"share_in_8_bit": "int8_mac_fraction"}
TENSOR = {"codes": "qvalues", "from_codes": "from_qvalues"}
QUANT = {"Taps": "IntermediateOutputs", "QuantizationParameters": "QuantParams"}
"""Deprecated names of `bitwright` and `bitwright.quant`."""
MOVED = dict.fromkeys(
    (
        "qadd",
        "qaverage_pool2d",
        "qconcat",
        "qconv2d",
        "qmatmul",
        "qmax_pool2d",
        "qmul",
        "qrelu",
        "requantize",
    ),
    "bitwright.quant",
)
"""Names that moved from `bitwright` to another module."""


def current(table: Mapping[str, str], name: str, what: str) -> str:
    """The current name; `what` describes it in the warning ("recipe option")."""
    if name not in table:
        return name
    _warn(f"{what} {name!r}", table[name])
    return table[name]


def public_name(package: str, name: str) -> tuple[str, str] | None:
    """The module and present name of an old public name, or None."""
    if package == "bitwright" and name in MOVED:
        _warn(f"bitwright.{name}", f"{MOVED[name]}.{name}")
        return MOVED[name], name
    if package in ("bitwright", "bitwright.quant") and name in QUANT:
        _warn(f"{package}.{name}", f"bitwright.quant.{QUANT[name]}")
        return "bitwright.quant", QUANT[name]
    return None


def _warn(old: str, new: str) -> None:
    warn_once(old, f"deprecated; use {new!r}")
