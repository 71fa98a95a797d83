"""Comparisons and boolean logic; every result is boolean.

Comparisons follow IEEE: NaN is unequal to everything, itself included, and never less or greater.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.ir.dim import Size
from bitwright.ir.dtype import Family, bool_, dtype
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.decide import below, decided, equal, negated
from bitwright.ops.core.inference import broadcast_to_bool
from bitwright.ops.core.numeric import Array, wide
from bitwright.ops.core.opdef import Attr, Kind, NonDifferentiable, OpDef, Sample, draw, sample
from bitwright.ops.core.scalar import scalar_form
from bitwright.ops.math.unary import real_float

_BOOLEAN = NonDifferentiable("its result is boolean")


def _infer_order(x: TensorType, y: TensorType) -> TensorType:
    for operand in (x, y):
        expect.real("an operand", operand)
    return broadcast_to_bool(x, y)


def _infer_logic(*operands: TensorType) -> TensorType:
    for operand in operands:
        expect.element("an operand", operand, bool_)
    return broadcast_to_bool(*operands)


def _infer_test(x: TensorType, **_: Any) -> TensorType:
    return real_float(x).with_dtype(bool_)


def _comparable(x: Array) -> Array:
    return x if dtype(x.dtype).family is Family.STRING else wide(x)


def _compare_samples() -> list[Sample]:
    return [
        sample(draw(40, dtype=t, low=0, high=5), draw(40, dtype=t, seed=1, low=0, high=5))
        for t in ("i64", "i8", "u8", "u64")
    ] + [
        sample(draw(3, 5), draw(3, 5, seed=1)),
        sample(draw(4, 1, 5), draw(3, 1, seed=1)),
        sample(draw(2, 3), draw(seed=1)),
        sample(draw(0, 3), draw(1, 3)),
        sample(np.round(draw(2, 7, dtype="bf16")), np.round(draw(7, dtype="bf16", seed=1))),
    ]


def _logic_samples() -> list[Sample]:
    return [
        sample(draw(8, dtype="bool"), draw(8, dtype="bool", seed=1)),
        sample(draw(4, 1, 5, dtype="bool"), draw(3, 1, dtype="bool", seed=1)),
        sample(draw(dtype="bool"), draw(0, 3, dtype="bool")),
    ]


def _test_samples(name: str) -> Callable[[], list[Sample]]:
    special = [1.0, math.nan, math.inf, -math.inf, -0.0, 3e38]

    def make() -> list[Sample]:
        found = [
            sample(np.array([special, special[::-1]], np.float32)),
            sample(np.array(special, np.float64)),
            sample(np.array(math.inf, np.float16)),
            sample(draw(0, 3)),
        ]
        if name == "is_inf":
            x = np.array(special, np.float32)
            found += [sample(x, detect_positive=False), sample(x, detect_negative=False)]
        return found

    return make


def _compare(
    name: str,
    reference: Callable[..., Any],
    rule: Callable[[Size, Size], bool | None],
    onnx: str,
    doc: str,
) -> OpDef:
    symmetric = name in ("eq", "ne")
    return OpDef(
        name,
        Kind.ELEMENTWISE,
        "x, y",
        infer=broadcast_to_bool if symmetric else _infer_order,
        reference=lambda x, y: reference(_comparable(x), _comparable(y)),
        grad=_BOOLEAN,
        samples=_compare_samples,
        scalar=scalar_form(name),
        sizes=decided(rule),
        onnx=onnx,
        commutative=symmetric,
        doc=doc,
    )


def _logic(name: str, reference: Callable[..., Any], rule: Callable[..., bool], doc: str) -> OpDef:
    return OpDef(
        name,
        Kind.ELEMENTWISE,
        "x, y",
        infer=_infer_logic,
        reference=reference,
        grad=_BOOLEAN,
        samples=_logic_samples,
        scalar=scalar_form(f"bit_{name}"),
        sizes=decided(rule),
        onnx=name.capitalize(),
        commutative=True,
        doc=doc,
    )


def _test(
    name: str,
    reference: Callable[..., Any],
    scalar: Callable[..., Any],
    doc: str,
    onnx: str = "",
    **attrs: Attr,
) -> OpDef:
    return OpDef(
        name,
        Kind.ELEMENTWISE,
        "x",
        infer=_infer_test,
        reference=lambda x, **given: reference(wide(x), **given),
        grad=_BOOLEAN,
        samples=_test_samples(name),
        attrs=attrs,
        scalar=scalar,
        onnx=onnx,
        doc=doc,
    )


def is_infinite(x: Array, detect_positive: bool, detect_negative: bool) -> Array:
    positive = np.isposinf(x) & detect_positive
    return np.logical_or(positive, np.isneginf(x) & detect_negative)


def _is_inf_scalar(e: Any, x: Any, detect_positive: bool, detect_negative: bool) -> Any:
    positive, negative = e.eq(x, math.inf), e.eq(x, -math.inf)
    if detect_positive and detect_negative:
        return e.bit_or(positive, negative)
    if detect_positive or detect_negative:
        return positive if detect_positive else negative
    return e.bit_and(positive, negative)  # no number is both


def _not_equal(a: Size, b: Size) -> bool | None:
    return negated(equal(a, b))


def _above(a: Size, b: Size) -> bool | None:
    return below(b, a)


def _at_most(a: Size, b: Size) -> bool | None:
    return negated(below(b, a))


def _at_least(a: Size, b: Size) -> bool | None:
    return negated(below(a, b))


OPDEFS = [
    _compare("eq", np.equal, equal, "Equal", "x == y"),
    _compare("ne", np.not_equal, _not_equal, "", "x != y"),
    _compare("lt", np.less, below, "Less", "x < y"),
    _compare("le", np.less_equal, _at_most, "LessOrEqual", "x <= y"),
    _compare("gt", np.greater, _above, "Greater", "x > y"),
    _compare("ge", np.greater_equal, _at_least, "GreaterOrEqual", "x >= y"),
    _logic("and", np.logical_and, lambda a, b: bool(a and b), "true where both are"),
    _logic("or", np.logical_or, lambda a, b: bool(a or b), "true where one is"),
    _logic("xor", np.logical_xor, lambda a, b: bool(a) != bool(b), "true where exactly one is"),
    OpDef(
        "not",
        Kind.ELEMENTWISE,
        "x",
        infer=_infer_logic,
        reference=np.logical_not,
        grad=_BOOLEAN,
        samples=lambda: [sample(draw(*shape, dtype="bool")) for shape in ((7,), (), (0, 3))],
        scalar=scalar_form("bit_not"),
        sizes=decided(lambda a: not a),
        onnx="Not",
        doc="true where x is false",
    ),
    _test("is_nan", np.isnan, lambda e, x: e.ne(x, x), "true where x is not a number", "IsNaN"),
    _test(
        "is_inf",
        is_infinite,
        _is_inf_scalar,
        "true where x is infinite, of the signs asked for",
        detect_positive=Attr("bool", True),
        detect_negative=Attr("bool", True),
    ),
    _test(
        "is_finite",
        np.isfinite,
        lambda e, x: e.lt(e.abs(x), math.inf),
        "true where x is neither infinite nor NaN",
    ),
]
