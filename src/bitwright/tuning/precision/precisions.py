"""The precisions that a unit may have, and the recipe of an assignment.

f32            float
bf16           float at half the width, where the machine multiplies bf16
int8-static    8-bit weights, activations with static ranges
int8-dynamic   8-bit weights, activations with ranges computed at run time
w8, w4         8-bit or 4-bit weights, float activations
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bitwright.passes.precision.policy import custom
from bitwright.target import Target
from bitwright.tuning.precision.units import Unit

FLOAT = "f32"
BF16 = "bf16"
STATIC = "int8-static"
DYNAMIC = "int8-dynamic"
SCHEMES = {
    FLOAT: "float",
    BF16: "float",
    STATIC: "static",
    DYNAMIC: "dynamic_per_token",
    "w8": "weight_only",
    "w4": "weight_only",
}
"""The scheme of each precision in a recipe."""
LAYOUTS = {"w8": FLOAT, "w4": FLOAT}
"""Precisions that store values between units like another one does."""
WEIGHT_BITS = {FLOAT: 32, BF16: 32, STATIC: 8, DYNAMIC: 8, "w8": 8, "w4": 4}
"""Bits of a stored weight; bf16 is a policy of the run, the file keeps f32."""
BLOCK = 32
_NEVER = -1000.0
"""An SQNR that every model reaches: no layer falls back to another scheme."""
_KINDS = {
    "product": tuple(SCHEMES),
    "body": tuple(SCHEMES),
    "attention": (FLOAT, BF16, DYNAMIC),
    "lookup": (FLOAT, "w8"),
}


def precisions_of(unit: Unit) -> tuple[str, ...]:
    """The precisions that a kind of unit may have."""
    return _KINDS[unit.kind]


def multiplies_bf16(target: Target) -> bool:
    """Whether a machine has instructions for products of bf16."""
    return bool(target.features & {"avx512bf16", "amx-bf16", "bf16"})


def weight_bytes(unit: Unit, precision: str) -> float:
    """Bytes of a unit's weights and their scales in a file."""
    if precision == "w4" and unit.kind != "lookup":
        return unit.weights / 2 + 4 * max(unit.channels, unit.weights / BLOCK)
    bits = WEIGHT_BITS[precision]
    return unit.weights * bits / 8 + (4 * unit.channels if bits <= 8 else 0)


def uniform_recipe(precision: str) -> dict[str, Any]:
    """The recipe with one precision wherever it is possible; for timing and error tables."""
    if precision in ("w8", "w4"):
        return {"base": precision, "attention": "float"}
    attention = "int8" if precision == DYNAMIC else "float"
    return {
        "base": "int8",
        "schemes": {"*": SCHEMES[precision]},
        "attention": attention,
        "min_output_sqnr_db": _NEVER,
    }


def float_recipe(precision: str) -> dict[str, Any]:
    """The recipe that leaves every layer in float."""
    return {
        "base": "int8",
        "targets": [],
        "attention": "float",
        "min_output_sqnr_db": _NEVER,
        "float_precision": precision,
    }


def recipe_of(units: Sequence[Unit], chosen: Mapping[str, str]) -> dict[str, Any]:
    """The recipe of an assignment of precisions to units.

    The most frequent scheme is the pattern `*`; other layers are named.
    """
    if all(SCHEMES[precision] == "float" for precision in chosen.values()):
        is_bf16 = BF16 in chosen.values()
        recipe = float_recipe(FLOAT)
        return {**recipe, "float_precision": _float_precision(units, chosen)} if is_bf16 else recipe
    schemes = {layer: SCHEMES[chosen[u.name]] for u in units for layer in u.layers}
    common = Counter(schemes.values()).most_common(1)[0][0]
    named = {layer: scheme for layer, scheme in schemes.items() if scheme != common}
    attentions = {chosen[unit.name] for unit in units if unit.kind == "attention"}
    found: dict[str, Any] = {
        "base": "int8",
        "schemes": {**named, "*": common},
        "attention": "int8" if DYNAMIC in attentions else "float",
        "min_output_sqnr_db": _NEVER,
    }
    narrow = [
        layer
        for unit in units
        if chosen[unit.name] == "w4" and unit.kind != "lookup"
        for layer in unit.layers
    ]
    if narrow:
        found["weight_bits"] = dict.fromkeys(narrow, 4)
        found["block"] = dict.fromkeys(narrow, BLOCK)
    if BF16 in chosen.values():
        found["float_precision"] = _float_precision(units, chosen)
    return found


def _float_precision(units: Sequence[Unit], chosen: Mapping[str, str]) -> str:
    """bf16, or a bf16 policy with the units that stay in f32."""
    kept = [
        name
        for unit in units
        if chosen[unit.name] == FLOAT and unit.kind in ("product", "attention")
        for name in unit.nodes
    ]
    if not kept:
        return BF16
    return custom(layers={glob.escape(n): FLOAT for n in kept}, base="mixed_bf16").to_json()
