"""Recipes: which parts of a model get which precision, and by which rules.

    int8           static ranges, or dynamic per-token ranges where better, or float
    int8-static    one static range per activation
    int8-dynamic   dynamic per-token ranges
    w8, w4         weight-only
    f8             weight-only, f8e4m3fn in groups of 128
    f8-dynamic     f8e4m3fn weights with a scale per channel; f8e4m3fn activations with a scale per
                   row computed at run time, or one static scale where that is as accurate
    mxfp8, mxfp4   weight-only, in groups of 32 with power-of-two scales
    nvfp4          weight-only, in groups of 16 with f8 scales

    {"base": "int8", "ignore": ["lm_head", "re:.*gate$"],
     "schemes": {"re:.*down": "dynamic_per_token"}}
    {"base": "w4", "weight_bits": {"lm_head": 8, "*": 4}, "block": {"lm_head": 0}}

`weight_bits` and `block` may be maps of patterns; the first that matches counts, and the base
recipe's value where none does. A pattern is a name, a shell pattern (`block.*`), or `re:` with a
regular expression that matches from the start. It is compared with the names of a layer, of its
weight and of its module (`quant.model.layer_names`). Recipes are dicts, YAML or JSON files, or one
of the names above. `quant.model.config` has the typed form. Old names of options and schemes
(`aliases`) still work.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from bitwright import aliases
from bitwright.errors import BitwrightError
from bitwright.quant.core.formats import FORMATS

INT8_SCHEMES = ("static", "dynamic_per_token", "dynamic_per_tensor")
"""Schemes in which both operands of a product are 8-bit integers."""
SCHEMES = (*INT8_SCHEMES, "weight_only", "float")
KINDS = ("matmul", "conv", "recurrent", "embedding")
ROUNDINGS = ("gptq", "adaround", "nearest")
FLOAT_ROUNDINGS = ("gptq", "nearest")
RANGES = ("mse", "peak")
NO_DATA_HINT = (
    "Weight-only quantization with nearest rounding needs no data: "
    'recipe={"base": "w8", "rounding": "nearest"}.'
)
CONSUMERS = ("any", "onnxruntime", "openvino", "bitwright")
ATTENTION = ("auto", "int8", "float")
_INTERNAL = {"name", "schemes_allowed", "asked", "widths", "weight_bits_of", "block_of"}
"""Fields of `Recipe` that are not options."""


@dataclass(frozen=True)
class Recipe:
    """The rules of one quantization."""

    name: str = "int8"
    schemes_allowed: tuple[str, ...] = ("static", "dynamic_per_token", "float")
    weight_bits: int = 8
    block: int = 0
    """Weights per scale; 0 means one scale per output channel."""
    weight_bits_of: Mapping[str, int] = field(default_factory=dict)
    """Weight bits by pattern: the option `weight_bits` given as a map."""
    block_of: Mapping[str, int] = field(default_factory=dict)
    """Weights per scale by pattern: the option `block` given as a map."""
    weight_format: str = ""
    """A float block format for weights, in place of integers."""
    activation_format: str = ""
    """"f8" for activations in f8e4m3fn, in place of u8; weights then have a scale per channel."""
    targets: tuple[str, ...] = KINDS
    ignore: tuple[str, ...] = ()
    schemes: Mapping[str, str] = field(default_factory=dict)
    """Schemes by pattern; they override measurements."""
    symmetric: bool = False
    """Activations without zero points; excludes dynamic per-token ranges."""
    smooth: bool = True
    """SmoothQuant: move magnitude from activations to weights."""
    equalize: bool = True
    """Fold smoothing factors into the preceding product where that is exact."""
    rounding: str = "gptq"
    """`nearest`, or by the error of the product's result: `gptq`, or `adaround` after it."""
    ranges: str = "mse"
    """Weight scales of least squared error (`mse`), or of the largest weight (`peak`)."""
    bias_correction: bool = True
    static_sqnr_db: float = 24.0
    """The lowest output SQNR with all static ranges of convolutions."""
    carried_state_sqnr_db: float = 40.0
    """The same for a model with a carried recurrent state, where errors accumulate."""
    min_int8_fraction: float = 0.95
    """The fraction of multiply-adds that the mixed-precision search keeps in int8."""
    min_layer_sqnr_db: float = 12.0
    """Layers below this SQNR stay float."""
    attention: str = "auto"
    """`int8` or `float` attention; `auto` measures the output error."""
    attention_sqnr_db: float = 30.0
    """The lowest output SQNR with all int8 attention ops."""
    min_output_sqnr_db: float = 12.0
    """The lowest output SQNR on calibration data; below it, layers fall back to other schemes."""

    float_precision: str = "f32"
    """Precision of float layers in bitwright: `f32`, `bf16`, `f16` or a policy."""
    consumer: str = "any"
    """The runtime that will run the model (`export.onnx.options`). "onnxruntime" restricts scales
    and tables so that it computes the same bits as bitwright, at some cost in accuracy."""
    asked: Mapping[str, str] | None = None
    """Schemes by path of layer, after the patterns are resolved for a model."""
    widths: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Weight bits and block by path of layer, where patterns name them; resolved like `asked`."""

    @property
    def matches_onnxruntime(self) -> bool:
        """Whether ONNX Runtime must compute the same bits."""
        return self.consumer == "onnxruntime"

    @property
    def has_blocks(self) -> bool:
        """Whether the weight format's own block size applies."""
        return bool(self.weight_format) and not self.activation_format

    @property
    def needs_data(self) -> bool:
        """Whether the recipe needs data; weight-only with nearest rounding does not."""
        return self.schemes_allowed != ("weight_only",) or self.rounding != "nearest"

    def scheme_of(self, name: str) -> str | None:
        """The scheme that the recipe asks for by name, or None."""
        return self.scheme_by([name]) if self.asked is None else self.asked.get(name)

    def width_by(self, names: Iterable[str]) -> tuple[int, int]:
        """Weight bits and block of a layer, by the first patterns that match one of its names."""
        given = list(names)
        found = [
            next(
                (n for pattern, n in m.items() if any(matches(pattern, g) for g in given)), default
            )
            for m, default in (
                (self.weight_bits_of, self.weight_bits),
                (self.block_of, self.block),
            )
        ]
        return found[0], found[1]

    def scheme_by(self, names: Iterable[str]) -> str | None:
        """The scheme of the first pattern that matches one of a layer's names."""
        given = list(names)
        patterns = [*((pattern, "float") for pattern in self.ignore), *self.schemes.items()]
        return next((s for pattern, s in patterns if any(matches(pattern, n) for n in given)), None)


RECIPES = {
    "int8": Recipe(),
    "int8-static": Recipe("int8-static", ("static",)),
    "int8-dynamic": Recipe("int8-dynamic", ("dynamic_per_token", "static", "float")),
    "w8": Recipe("w8", ("weight_only",), smooth=False),
    "w4": Recipe("w4", ("weight_only",), weight_bits=4, block=32, smooth=False),
    **{
        name: Recipe(
            *(name, ("weight_only",)),
            weight_format=name,
            targets=("matmul", "embedding"),
            smooth=False,
        )
        for name in ("f8", "mxfp8", "mxfp4", "nvfp4")
    },
    "f8-dynamic": Recipe(
        *("f8-dynamic", ("dynamic_per_token", "static", "float")),
        weight_format="f8",
        activation_format="f8",
        targets=("matmul",),
        smooth=False,
        attention="float",
    ),
}


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of a recipe matches a name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name or fnmatch.fnmatchcase(name, pattern)


def recipe(source: str | Path | Mapping[str, Any] | Recipe) -> Recipe:
    """The recipe with this name, or from this file or dict."""
    if isinstance(source, Recipe):
        return source
    if isinstance(source, Mapping):
        return _from_mapping(source)
    if str(source) in RECIPES:
        return RECIPES[str(source)]
    path = Path(source) if isinstance(source, str | os.PathLike) else Path()
    if path.suffix in (".yaml", ".yml", ".json"):
        return _from_mapping(_read(path))
    raise BitwrightError(
        f"there is no recipe {str(source)!r}",
        expected=f"{', '.join(RECIPES)}, a dict, or a .yaml / .json file",
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BitwrightError(f"the recipe {path} cannot be read", found=error) from None
    if path.suffix == ".json":
        import json

        loader, problem = json.loads, ValueError
    else:
        try:
            import yaml  # type: ignore[import-untyped]
        except ImportError:
            raise BitwrightError(
                "reading YAML needs PyYAML", hint="pip install pyyaml, or write the recipe as JSON."
            ) from None
        loader, problem = yaml.safe_load, yaml.YAMLError
    try:
        found = loader(text)
    except problem as error:
        raise BitwrightError(f"the recipe {path} is malformed", found=error) from None
    if not isinstance(found, Mapping):
        raise BitwrightError(f"the recipe {path} is not a mapping", found=type(found).__name__)
    return found


def _from_mapping(found: Mapping[str, Any]) -> Recipe:
    """The base recipe with these options; old names of options and schemes are translated."""
    options = {
        aliases.current(aliases.RECIPE_OPTIONS, name, "recipe option"): value
        for name, value in found.items()
    }
    base = recipe(str(options.pop("base", "int8")))
    known = {f.name for f in fields(Recipe)} - _INTERNAL
    if unknown := set(options) - known:
        raise BitwrightError(
            f"a recipe has no option {min(unknown, key=str)!r}",
            expected=", ".join(["base", *sorted(known)]),
        )
    maps: dict[str, Any] = {
        f"{name}_of": _numbers_by_pattern(name, options.pop(name))
        for name in ("weight_bits", "block")
        if isinstance(options.get(name), Mapping)
    }
    typed = {name: _typed(name, value) for name, value in options.items()}
    made = replace(base, **typed, **maps)
    _check(made)
    is_integer = not made.activation_format  # floats have no zero points
    return without_zero_points(made) if made.symmetric and is_integer else made


def _numbers_by_pattern(name: str, given: Mapping[str, Any]) -> dict[str, int]:
    is_number = (isinstance(n, int) and not isinstance(n, bool) for n in given.values())
    if not (_are_names(list(given)) and all(is_number)):
        raise BitwrightError(
            f"option {name!r} of a recipe has the wrong type",
            expected="a number, or a mapping of patterns to numbers",
            found=repr(given),
        )
    return dict(given)


def _typed(name: str, value: Any) -> Any:
    """The value of an option, checked against the type of the option's default."""
    default = getattr(RECIPES["int8"], name)
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(default, tuple):
        fits, expected = _are_names([value] if isinstance(value, str) else value), "a list of names"
        value = (value,) if isinstance(value, str) else tuple(value) if fits else value
    elif isinstance(default, Mapping):
        fits = isinstance(value, Mapping) and _are_names([*value, *value.values()])
        expected = "a mapping of patterns to schemes"
        if fits:
            value = {
                pattern: aliases.current(aliases.SCHEMES, scheme, "scheme")
                for pattern, scheme in value.items()
            }
    elif isinstance(default, float):
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        fits, expected = fits and not math.isnan(value), "a number"
    else:
        fits, expected = type(value) is type(default), f"a value like {default!r}"
    if not fits:
        raise BitwrightError(
            f"option {name!r} of a recipe has the wrong type", expected=expected, found=repr(value)
        )
    return value


def _are_names(found: Any) -> bool:
    is_list = isinstance(found, Collection) and not isinstance(found, Mapping | str | bytes)
    return is_list and all(isinstance(name, str) for name in found)


def without_zero_points(made: Recipe) -> Recipe:
    """The recipe with symmetric activations; dynamic per-token ranges need zero points."""
    per_token = "dynamic_per_token"
    if made.schemes_allowed[0] == per_token or per_token in made.schemes.values():
        raise BitwrightError(
            "dynamic_per_token has zero points, which a symmetric recipe excludes",
            hint='Leave out "symmetric", or use static schemes.',
        )
    allowed = tuple(scheme for scheme in made.schemes_allowed if scheme != per_token)
    return replace(made, symmetric=True, schemes_allowed=allowed)


def _check(made: Recipe) -> None:
    for pattern in (*made.ignore, *made.schemes, *made.weight_bits_of, *made.block_of):
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise BitwrightError(f"pattern {pattern!r} is malformed", found=error) from None
    for what, values, allowed in (
        ("scheme", made.schemes.values(), SCHEMES),
        ("target", made.targets, KINDS),
        ("rounding", (made.rounding,), ROUNDINGS),
        ("range method", (made.ranges,), RANGES),
        ("attention mode", (made.attention,), ATTENTION),
        ("consumer", (made.consumer,), CONSUMERS),
        ("weight format", (made.weight_format,), ("", *FORMATS)),
        ("activation format", (made.activation_format,), ("", "f8")),
        ("float rounding", (made.rounding,) if made.weight_format else (), FLOAT_ROUNDINGS),
    ):
        if wrong := [v for v in values if v not in allowed]:
            raise BitwrightError(
                f"a recipe has no {what} {wrong[0]!r}", expected=", ".join(allowed)
            )
    if not 0 <= made.min_int8_fraction <= 1:
        raise BitwrightError(
            "option 'min_int8_fraction' of a recipe is a fraction of all multiply-adds",
            expected="0 to 1",
            found=made.min_int8_fraction,
        )
    if made.activation_format and made.weight_format != made.activation_format:
        raise BitwrightError(
            "f8 activations need f8 weights",
            expected='"weight_format": "f8"',
            found=made.weight_format or "integers",
            hint='Start from {"base": "f8-dynamic"}.',
        )
    if made.activation_format and made.matches_onnxruntime:
        raise BitwrightError(
            "ONNX Runtime has no product of float8 values whose bits bitwright reproduces",
            expected='"consumer": "any"',
            hint="The exported file runs there in float: it dequantizes both operands.",
        )
    bits = made.weight_bits, *made.weight_bits_of.values()
    blocks = made.block, *made.block_of.values()
    if not set(bits) <= {2, 4, 8} or min(blocks) < 0:
        raise BitwrightError(
            "weights have 2, 4 or 8 bits and a block of 0 or more",
            found=f"{', '.join(map(str, bits))} bits, block {', '.join(map(str, blocks))}",
        )
