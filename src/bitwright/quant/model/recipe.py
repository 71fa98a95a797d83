"""Recipes: which parts of a model get which precision, and by which rules.

    int8           static where the error allows it, dynamic where that is better, else float
    int8-static    one range for each activation
    int8-dynamic   ranges for each row, found when the model runs
    w8, w4         weights only; activations stay as they are
    f8             the same in f8e4m3fn, a scale for 128 of them
    mxfp8, mxfp4   in blocks of 32 with powers of two for scales
    nvfp4          in blocks of 16 with f8 scales

    {"base": "int8", "ignore": ["lm_head", "re:.*gate$"], "schemes": {"re:.*down": "dynamic"}}

A pattern is a name, a shell pattern (`block.*`), or `re:` with a regular expression that must match
from the start. It is held against the names of a layer, of its weight and of its module
(`quant.model.layer_names`). Recipes are dicts, YAML or JSON files, or one of the names above.
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

from bitwright.errors import BitwrightError
from bitwright.quant.core.formats import FORMATS

INT8_SCHEMES = ("static", "dynamic", "dynamic-tensor")
"""Schemes in which both operands of a product are 8-bit codes."""
SCHEMES = (*INT8_SCHEMES, "weights", "float")
KINDS = ("matmul", "conv", "recurrent", "embedding")
ROUNDINGS = ("gptq", "adaround", "nearest")
FLOAT_ROUNDINGS = ("gptq", "nearest")
RANGES = ("mse", "peak")
NO_DATA_HINT = (
    'Weights alone, rounded to the nearest value, need none: recipe={"base": "w8", "rounding": '
    '"nearest"}.'
)
CONSUMERS = ("any", "onnxruntime", "openvino", "bitwright")
ATTENTION = ("auto", "int8", "float")


@dataclass(frozen=True)
class Recipe:
    name: str = "int8"
    schemes_allowed: tuple[str, ...] = ("static", "dynamic", "float")
    weight_bits: int = 8
    block: int = 0
    """Weights that share a scale; 0 for all of an output channel."""
    weight_format: str = ""
    """A block format of floats for weights, in place of integers."""
    targets: tuple[str, ...] = KINDS
    ignore: tuple[str, ...] = ()
    schemes: Mapping[str, str] = field(default_factory=dict)
    """Schemes by pattern, before any measurement."""
    symmetric: bool = False
    """Activations have codes around 0, without zero points; none are coded row by row then."""
    smooth: bool = True
    equalize: bool = True
    """Smoothing goes into the weights before, wherever only homogeneous functions lie between."""
    rounding: str = "gptq"
    """`nearest` codes, or those that keep the product's result: `gptq`, or `adaround` after it."""
    ranges: str = "mse"
    """Scales of weights: of least squared `mse`, or those of the largest weight, its `peak`."""
    bias_correction: bool = True
    static_sqnr_db: float = 24.0
    """What the outputs keep, in decibels, of all static ranges of convolutions together."""
    carried_state_sqnr_db: float = 40.0
    """The same where a recurrent state is carried from run to run, which adds errors up."""
    min_int8_fraction: float = 0.95
    """The part of all multiply-adds that no measured effect takes out of 8 bits."""
    min_layer_sqnr_db: float = 12.0
    """Below this no 8-bit coding is used."""
    attention: str = "auto"
    """Whether attention multiplies codes: where the outputs allow it, or always: `int8`, `float`
    for never."""
    attention_sqnr_db: float = 30.0
    """What the outputs keep, in decibels, of all attentions in codes together."""
    min_output_sqnr_db: float = 12.0
    """What the model's outputs keep on the calibration data, or layers go back to safer schemes."""

    consumer: str = "any"
    """The runtime that the model is made for (`export.onnx.options`). "onnxruntime" takes scales
    and tables that it computes with to the same bits as bitwright, at some cost in accuracy."""
    asked: Mapping[str, str] | None = None
    """Schemes by path of layer, once the patterns were held against the layers of a model."""

    @property
    def matches_onnxruntime(self) -> bool:
        """Whether another runtime is to find the same bits."""
        return self.consumer == "onnxruntime"

    @property
    def needs_data(self) -> bool:
        """Whether it measures anything: rounding weights to the nearest value does not."""
        return self.schemes_allowed != ("weights",) or self.rounding != "nearest"

    def scheme_of(self, name: str) -> str | None:
        """The scheme that the recipe asks for by name."""
        return self.scheme_by([name]) if self.asked is None else self.asked.get(name)

    def scheme_by(self, names: Iterable[str]) -> str | None:
        """The scheme of the first pattern that matches one of a layer's names."""
        given = list(names)
        patterns = [*((pattern, "float") for pattern in self.ignore), *self.schemes.items()]
        return next((s for pattern, s in patterns if any(matches(pattern, n) for n in given)), None)


RECIPES = {
    "int8": Recipe(),
    "int8-static": Recipe("int8-static", ("static",)),
    "int8-dynamic": Recipe("int8-dynamic", ("dynamic", "static", "float")),
    "w8": Recipe("w8", ("weights",), smooth=False),
    "w4": Recipe("w4", ("weights",), weight_bits=4, block=32, smooth=False),
    **{
        name: Recipe(
            name, ("weights",), weight_format=name, targets=("matmul", "embedding"), smooth=False
        )
        for name in ("f8", "mxfp8", "mxfp4", "nvfp4")
    },
}


def matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name or fnmatch.fnmatchcase(name, pattern)


def recipe(source: str | Path | Mapping[str, Any] | Recipe) -> Recipe:
    """The recipe of this name, file or dict."""
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
        raise BitwrightError(f"the recipe {path} is no mapping", found=type(found).__name__)
    return found


def _from_mapping(found: Mapping[str, Any]) -> Recipe:
    options = dict(found)
    base = recipe(str(options.pop("base", "int8")))
    known = {f.name for f in fields(Recipe)} - {"name", "schemes_allowed", "asked"}
    if unknown := set(options) - known:
        raise BitwrightError(
            f"a recipe has no option {min(unknown, key=str)!r}",
            expected=", ".join(["base", *sorted(known)]),
        )
    made = replace(base, **{name: _typed(name, value) for name, value in options.items()})
    _check(made)
    return without_zero_points(made) if made.symmetric else made


def _typed(name: str, value: Any) -> Any:
    """The value of an option, which has the type of the option's default."""
    default = getattr(RECIPES["int8"], name)
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(default, tuple):
        fits, expected = _are_names([value] if isinstance(value, str) else value), "a list of names"
        value = (value,) if isinstance(value, str) else tuple(value) if fits else value
    elif isinstance(default, Mapping):
        fits = isinstance(value, Mapping) and _are_names([*value, *value.values()])
        expected = "a mapping of patterns to schemes"
    elif isinstance(default, float):
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        fits, expected = fits and not math.isnan(value), "a number"
    else:
        fits, expected = type(value) is type(default), f"a value like {default!r}"
    if not fits:
        raise BitwrightError(
            f"option {name!r} of a recipe has another type", expected=expected, found=repr(value)
        )
    return value


def _are_names(found: Any) -> bool:
    is_list = isinstance(found, Collection) and not isinstance(found, Mapping | str | bytes)
    return is_list and all(isinstance(name, str) for name in found)


def without_zero_points(made: Recipe) -> Recipe:
    """The recipe with symmetric activations; rows coded when the model runs have zero points."""
    if made.schemes_allowed[0] == "dynamic" or "dynamic" in made.schemes.values():
        raise BitwrightError(
            "dynamic codes have zero points, which a symmetric recipe has not",
            hint='Leave out "symmetric", or use static schemes.',
        )
    allowed = tuple(scheme for scheme in made.schemes_allowed if scheme != "dynamic")
    return replace(made, symmetric=True, schemes_allowed=allowed)


def _check(made: Recipe) -> None:
    for pattern in (*made.ignore, *made.schemes):
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise BitwrightError(f"pattern {pattern!r} is malformed", found=error) from None
    for what, values, allowed in (
        ("scheme", made.schemes.values(), SCHEMES),
        ("target", made.targets, KINDS),
        ("rounding", (made.rounding,), ROUNDINGS),
        ("way to find ranges", (made.ranges,), RANGES),
        ("way of attention", (made.attention,), ATTENTION),
        ("consumer", (made.consumer,), CONSUMERS),
        ("weight format", (made.weight_format,), ("", *FORMATS)),
        ("rounding to floats", (made.rounding,) if made.weight_format else (), FLOAT_ROUNDINGS),
    ):
        if wrong := [v for v in values if v not in allowed]:
            raise BitwrightError(
                f"{wrong[0]!r} is no {what} of a recipe", expected=", ".join(allowed)
            )
    if not 0 <= made.min_int8_fraction <= 1:
        raise BitwrightError(
            "option 'least_share' of a recipe is a part of all multiply-adds",
            expected="0 to 1",
            found=made.min_int8_fraction,
        )
    if made.weight_bits not in (2, 4, 8) or made.block < 0:
        raise BitwrightError(
            "weights have 2, 4 or 8 bits and a block of 0 or more",
            found=f"{made.weight_bits} bits, block {made.block}",
        )
