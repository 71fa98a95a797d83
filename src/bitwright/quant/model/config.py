"""QuantConfig: the typed form of a recipe.

bw.quantize(model, data, bw.QuantConfig(weight_dtype="int4", weight_granularity=PerGroup(32)))
bw.quantize(model, data, bw.QuantConfig(activations="dynamic", ignore=("lm_head",)))
bw.quantize(model, data, bw.QuantConfig(weight_dtype="f8", activations="dynamic"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwright.errors import BitwrightError
from bitwright.ir.quant_types import Granularity, PerAxis, PerGroup, PerTensor, PerToken
from bitwright.quant.core.formats import FORMATS
from bitwright.quant.model.recipe import KINDS, Recipe
from bitwright.quant.model.recipe import recipe as find_recipe

WEIGHT_BITS = {"int8": 8, "int4": 4, "int2": 2}
_BASES = {"auto": "int8", "static": "int8-static", "dynamic": "int8-dynamic"}
_GRANULARITIES: dict[str, tuple[Granularity | PerToken, ...]] = {
    "auto": (),
    "static": (PerTensor(),),
    "dynamic": (PerToken(), PerTensor()),
}


@dataclass(frozen=True)
class QuantConfig:
    """What `bw.quantize` does with weights and activations; `to_recipe` gives the text form."""

    weight_dtype: str = "int8"
    """int8, int4, int2, or a float block format (f8, mxfp8, mxfp4, nvfp4)."""
    weight_granularity: Granularity | None = None
    """PerAxis(0) or PerGroup(size); None for the default of the dtype."""
    weight_rounding: str = "gptq"
    """gptq, adaround or nearest."""
    activations: str | None = "auto"
    """static, dynamic, auto (by measured error) or None (weight-only)."""
    activation_granularity: Granularity | PerToken | None = None
    """PerTensor() for static; PerToken() (default) or PerTensor() for dynamic."""
    symmetric_activations: bool = False
    smoothquant: bool = True
    bias_correction: bool = True
    ignore: tuple[str, ...] = ()
    """Patterns of layers that stay float."""
    schemes: Mapping[str, str] = field(default_factory=dict)
    """Schemes by pattern of layers."""
    targets: tuple[str, ...] = KINDS
    min_output_sqnr_db: float = 12.0
    min_layer_sqnr_db: float = 12.0
    min_int8_fraction: float = 0.95
    """Of all multiply-adds."""
    consumer: str = "any"

    def to_recipe(self) -> Recipe:
        options: dict[str, Any] = {
            "rounding": self.weight_rounding,
            "symmetric": self.symmetric_activations,
            "bias_correction": self.bias_correction,
            "ignore": self.ignore,
            "schemes": self._schemes(),
            "min_output_sqnr_db": self.min_output_sqnr_db,
            "min_layer_sqnr_db": self.min_layer_sqnr_db,
            "min_int8_fraction": self.min_int8_fraction,
            "consumer": self.consumer,
        }
        if self.targets != KINDS:  # float formats have fewer targets by default
            options["targets"] = self.targets
        if self.activations is not None:
            options["smooth"] = self.smoothquant
        return find_recipe({**options, **self._weights()})

    def _weights(self) -> dict[str, Any]:
        """Base recipe, bits and block of the weights."""
        dtype, granularity = self.weight_dtype, self.weight_granularity
        if dtype not in WEIGHT_BITS and dtype not in FORMATS:
            _raise("weight_dtype", dtype, (*WEIGHT_BITS, *FORMATS))
        if dtype == "f8" and self.activations == "dynamic":
            if granularity not in (None, PerAxis(0)):
                _raise("weight_granularity of f8 activations", granularity, ("PerAxis(0)",))
            return {"base": "f8-dynamic"}
        if dtype in FORMATS and self.activations is not None:
            _raise(f"activations with {dtype} weights", self.activations, (None,))
        if self.activations is not None and self.activations not in _BASES:
            _raise("activations", self.activations, (*_BASES, None))
        base = "w4" if dtype in ("int4", "int2") else "w8"
        base = dtype if dtype in FORMATS else base
        if self.activations is not None:
            base = _BASES[self.activations]
        found: dict[str, Any] = {"base": base}
        if dtype in WEIGHT_BITS:
            found["weight_bits"] = WEIGHT_BITS[dtype]
        if isinstance(granularity, PerGroup):
            found["block"] = granularity.size
        elif granularity is not None:
            if granularity != PerAxis(0) or dtype in FORMATS:
                expected = ("PerGroup(size)",) if dtype in FORMATS else ("PerAxis(0)", "PerGroup")
                _raise(f"weight_granularity of {dtype}", granularity, expected)
            found["block"] = 0
        return found

    def _schemes(self) -> dict[str, str]:
        """Schemes by pattern; dynamic per-tensor activations are a pattern for all layers."""
        mode, granularity = self.activations, self.activation_granularity
        if granularity is None:
            return dict(self.schemes)
        allowed = _GRANULARITIES.get(mode or "", ())
        if granularity not in allowed:
            _raise(f"activation_granularity of {mode}", granularity, (*allowed, None))
        if mode == "dynamic" and granularity == PerTensor():
            return {**self.schemes, "*": "dynamic_per_tensor"}
        return dict(self.schemes)


def as_recipe(source: str | Path | Mapping[str, Any] | Recipe | QuantConfig) -> Recipe:
    """The recipe of a name, file, dict or config."""
    return source.to_recipe() if isinstance(source, QuantConfig) else find_recipe(source)


def _raise(what: str, found: Any, expected: tuple[Any, ...]) -> None:
    raise BitwrightError(
        f"QuantConfig: {what} is not supported",
        expected=", ".join(x if isinstance(x, str) else repr(x) for x in expected),
        found=repr(found),
    )
