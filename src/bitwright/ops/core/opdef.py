"""The declaration of an op, from which checks, execution and tests derive.

    OpDef("relu", Kind.ELEMENTWISE, "x", infer=same, reference=lambda x: np.maximum(x, 0), ...)

`infer(*types, **attrs)` returns the result type(s). `reference(*arrays, **attrs)` returns the
result array(s) in a wide type; the interpreter rounds them once to the result dtype. An absent
optional operand is None in both. Sizes in attributes may be symbolic in `infer` and are integers in
`reference`. A body (an attribute of kind "graph") is a Graph in `infer` and a callable from arrays
to a tuple of arrays (`interpret.Body`) in `reference`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from bitwright.errors import GraphError
from bitwright.ir.dim import Dim
from bitwright.ir.dtype import DType, dtype
from bitwright.ir.graph import Graph

Array = np.ndarray[Any, Any]


class Kind(Enum):
    """The kind of an op, which precision policies select by."""

    COMPUTE = "compute"
    REDUCTION = "reduction"
    ELEMENTWISE = "elementwise"
    MOVEMENT = "movement"
    BOUNDARY = "boundary"


@dataclass(frozen=True)
class NonDifferentiable:
    """The op has no gradient, for this reason."""

    reason: str


ROUNDS = NonDifferentiable("rounding has no useful gradient; train through fake_quantize")


class NotYet:
    """The gradient is missing."""


Gradient = Callable[..., Any] | NonDifferentiable | type[NotYet]
"""A rule as `ops.core.reverse` describes it, or the reason why there is none."""
REQUIRED: Any = object()


@dataclass(frozen=True)
class Attr:
    """An attribute: int(s), float(s), bool, str(s), dtype, size(s), array or graph."""

    kind: str
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()

    def accept(self, value: Any) -> Any:
        """The value in its normal form; a `GraphError` if it has another kind."""
        if value is None and self.default is None:
            return None
        try:
            normal = _NORMALIZE[self.kind](value)
        except (TypeError, ValueError, GraphError):
            raise GraphError(
                "has the wrong kind of value", expected=self.kind, found=repr(value)
            ) from None
        if self.choices and normal not in self.choices:
            raise GraphError(
                "has an unknown value", expected=" or ".join(self.choices), found=repr(value)
            )
        return normal


def _int(value: Any) -> int:
    if isinstance(value, (float, str, Dim)) or int(value) != value:
        raise TypeError
    return int(value)


def _size(value: Any) -> int | Dim:
    return value if isinstance(value, Dim) else _int(value)


def _float(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError
    return float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _bool(value: Any) -> bool:
    if value not in (0, 1):
        raise TypeError
    return bool(value)


def _graph(value: Any) -> Graph:
    if not isinstance(value, Graph):
        raise TypeError
    return value


_NORMALIZE: Mapping[str, Callable[[Any], Any]] = {
    "int": _int,
    "ints": lambda v: tuple(map(_int, v)),
    "size": _size,
    "sizes": lambda v: tuple(map(_size, v)),
    "float": _float,
    "floats": lambda v: tuple(map(_float, v)),
    "bool": _bool,
    "str": _str,
    "strs": lambda v: tuple(map(_str, v)),
    "dtype": dtype,
    "array": np.asarray,
    "graph": _graph,
}


@dataclass(frozen=True)
class Operand:
    name: str
    optional: bool = False
    variadic: bool = False


@dataclass(frozen=True)
class Sample:
    """Inputs for the derived tests; `tolerance` is relative to the largest result."""

    inputs: tuple[Array | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5


def sample(*inputs: Any, tolerance: float = 1e-5, **attrs: Any) -> Sample:
    arrays = tuple(None if x is None else np.asarray(x) for x in inputs)
    return Sample(arrays, attrs, tolerance)


def draw(
    *shape: int, dtype: str | DType = "f32", seed: int = 0, low: float = -2, high: float = 2
) -> Array:
    """Reproducible random numbers of any element type, between `low` and `high`."""
    element = globals()["dtype"](dtype)
    numbers: Array = np.asarray(np.random.default_rng(seed).uniform(low, high, shape))
    if element.is_complex:
        numbers = numbers + 1j * np.random.default_rng(seed + 1).uniform(low, high, shape)
    if element.is_integer:
        numbers = np.clip(np.round(numbers), max(low, element.min), min(high, element.max))
    if element.name == "bool":
        numbers = numbers > (low + high) / 2
    return numbers.astype(element.numpy)


@dataclass(frozen=True)
class OpDef:
    name: str
    kind: Kind
    inputs: str
    """Operands: `"x, w, bias?"` (optional) or `"xs*"` (any number)."""
    infer: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[], Iterable[Sample]]
    grad: Gradient = NotYet
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    scalar: Callable[..., Any] | None = None
    """The op on one element, in terms of `ops.core.scalar` (elementwise ops)."""
    sizes: Callable[..., Any] | None = None
    """The op on object arrays of sizes, for symbolic shape arithmetic."""
    onnx: str = ""
    """The ONNX op with the same operands and no attributes, if there is one."""
    flops: Callable[..., Any] | None = None
    """Operations of a compute op, `flops(input types, output types, attrs)`; ops of other kinds
    are counted by their kind."""
    keeps: tuple[str, ...] = ()
    """Operands whose dtype a precision policy must not change: scales, sampling positions."""
    commutative: bool = False
    deterministic: bool = True
    """False if two equal nodes may give different results (random draws)."""
    is_foldable: bool = True
    """Constant folding evaluates the op; False if it must stay in the graph."""
    fixed_types: bool = False
    """The element types are part of the op, and no precision policy changes them."""

    # fusion
    takes_epilogue: bool = False
    """The kernel applies elementwise ops to the result before it stores."""
    takes_prologue: bool = False
    """The kernel computes elementwise ops on the rows it reads."""
    reads_cast: bool = False
    """The kernel converts a narrower operand while it reads."""
    quantizes_rows: bool = False
    """The kernel can apply dynamic_quantize to the rows it makes."""
    is_cheap: bool = False
    """An elementwise op of a few instructions; as an epilogue it is faster than a lookup table."""

    # ranges of floating-point results (integers may wrap)
    shrinks: bool = False
    """|f(x)| <= |x|."""
    max_abs: float = math.inf
    """An upper bound of |f(x)|."""
    never_negative: bool = False
    keeps_nonnegative: bool = False
    """The result is not negative if no operand is."""
    doc: str = ""

    @property
    def can_be_table(self) -> bool:
        """Whether a 256-entry table can hold the op on 8-bit values."""
        has_body = any(attr.kind == "graph" for attr in self.attrs.values())
        return self.kind is Kind.ELEMENTWISE and self.deterministic and not has_body

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        words = [word.strip() for word in self.inputs.split(",") if word.strip()]
        return tuple(
            Operand(re.sub(r"[?*]$", "", word), word.endswith("?"), word.endswith("*"))
            for word in words
        )

    def check_operands(self, count_present: list[bool]) -> None:
        """Raise a `GraphError` if the present operands do not fit the signature."""
        operands = self.operands
        variadic = bool(operands) and operands[-1].variadic
        fixed = len(operands) - variadic
        if len(count_present) > fixed and not variadic:
            raise GraphError(
                "has too many operands", expected=self.inputs, found=len(count_present)
            )
        for position, operand in enumerate(operands[:fixed]):
            present = position < len(count_present) and count_present[position]
            if not present and not operand.optional:
                raise GraphError(f"operand {operand.name!r} is missing", expected=self.inputs)

    def normal_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes with defaults filled in and values in normal form; None means absent."""
        unknown = set(attrs) - set(self.attrs)
        if unknown:
            raise GraphError(
                f"has no attribute {min(unknown)!r}", expected=", ".join(self.attrs) or "none"
            )
        normal: dict[str, Any] = {}
        for name, spec in self.attrs.items():
            value = attrs.get(name, spec.default)
            if value is REQUIRED:
                raise GraphError(f"attribute {name!r} is missing", expected=spec.kind)
            try:
                value = spec.accept(value)
            except GraphError as error:
                raise GraphError(f"attribute {name!r} {error}") from None
            if value is not None:
                normal[name] = value
        return normal

    def call_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """All attributes as `infer` and `reference` take them, with None for absent ones."""
        return {name: attrs.get(name) for name in self.attrs}
