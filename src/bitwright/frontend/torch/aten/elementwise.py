"""Arithmetic, comparison, logic and functions of one number.

Operands are cast to torch's promoted type: that of the result, or for comparisons the common type
of the operands.
"""

from __future__ import annotations

import math
from typing import Any

from bitwright.frontend.torch.context import Context, maps, maps_table
from bitwright.ir.dtype import DType, bool_, i64, u8
from bitwright.ir.graph import Value

_UNARY = "acos acosh asin asinh atan atanh ceil cos cosh erf exp expm1 floor log "
_UNARY += "log1p neg reciprocal relu round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
_INTEGRAL = ("ceil", "floor", "round", "trunc")


def _unary(op: str) -> Any:
    def mapping(ctx: Context, x: Value) -> Value:
        x = ctx.operand(x)
        if op in _INTEGRAL and x.dtype.is_integer:
            return x
        return ctx.b.op(op, x)

    return mapping


for _name in _UNARY.split():
    maps(f"{_name}.default")(_unary(_name))


def _binary(op: str, **attrs: Any) -> Any:
    def mapping(ctx: Context, x: Any, y: Any) -> Value:
        return ctx.b.op(op, ctx.operand(x), ctx.operand(y), **attrs)

    return mapping


maps("maximum.default", "max.other")(_binary("maximum"))
maps("minimum.default", "min.other")(_binary("minimum"))
maps("atan2.default")(_binary("atan2"))
maps("div.Tensor", "div.Scalar")(_binary("div"))
maps("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")(_binary("mod"))
maps("fmod.Tensor", "fmod.Scalar")(_binary("mod", fmod=True))
for _name, _sign in (("left", "__lshift__"), ("right", "__rshift__")):
    _shift = _binary(f"shift_{_name}")
    maps(f"bitwise_{_name}_shift.Tensor", f"bitwise_{_name}_shift.Tensor_Scalar")(_shift)
    maps(f"{_sign}.Scalar")(_shift)
maps("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")(_binary("pow"))


def _extreme_without_nan(op: str) -> Any:
    """The maximum or minimum that ignores NaN."""

    def mapping(ctx: Context, x: Value, y: Value) -> Value:
        x, y = ctx.operand(x), ctx.operand(y)
        if not ctx.element.is_float:
            return ctx.b.op(op, x, y)
        found = ctx.b.where(ctx.b.is_nan(x), y, ctx.b.op(op, x, y))
        return ctx.b.where(ctx.b.is_nan(y), x, found)

    return mapping


maps("fmax.default")(_extreme_without_nan("maximum"))
maps("fmin.default")(_extreme_without_nan("minimum"))


@maps("hypot.default")
def hypot(ctx: Context, x: Value, y: Value) -> Value:
    x, y = ctx.operand(x), ctx.operand(y)
    return ctx.b.sqrt(ctx.b.add(ctx.b.mul(x, x), ctx.b.mul(y, y)))


@maps("signbit.default")
def signbit(ctx: Context, x: Value) -> Value:
    """Whether x is negative; so is -0, whose reciprocal is -inf."""
    if not x.dtype.is_float:
        return ctx.b.lt(ctx.cast(x, i64), 0)
    return ctx.b.or_(ctx.b.lt(x, 0.0), ctx.b.lt(ctx.b.reciprocal(x), 0.0))


@maps("copysign.Tensor", "copysign.Scalar")
def copysign(ctx: Context, x: Value, y: Any) -> Value:
    size = ctx.b.abs(ctx.operand(x))
    return ctx.b.where(signbit(ctx, ctx.operand(y)), ctx.b.neg(size), size)


def _scaled(ctx: Context, y: Any, alpha: Any) -> Value:
    y = ctx.operand(y)
    return y if isinstance(alpha, (int, float)) and alpha == 1 else ctx.b.mul(y, ctx.operand(alpha))


@maps("add.Tensor", "add.Scalar")
def add(ctx: Context, x: Any, y: Any, alpha: Any = 1) -> Value:
    if ctx.element == bool_:
        return ctx.b.or_(ctx.operand(x), ctx.operand(y))
    return ctx.b.add(ctx.operand(x), _scaled(ctx, y, alpha))


@maps("sub.Tensor", "sub.Scalar")
def sub(ctx: Context, x: Any, y: Any, alpha: Any = 1) -> Value:
    return ctx.b.sub(ctx.operand(x), _scaled(ctx, y, alpha))


@maps("rsub.Tensor", "rsub.Scalar")
def rsub(ctx: Context, x: Any, y: Any, alpha: Any = 1) -> Value:
    return ctx.b.sub(ctx.operand(y), _scaled(ctx, x, alpha))


@maps("mul.Tensor", "mul.Scalar")
def mul(ctx: Context, x: Any, y: Any) -> Value:
    op = ctx.b.and_ if ctx.element == bool_ else ctx.b.mul
    return op(ctx.operand(x), ctx.operand(y))


@maps("div.Tensor_mode", "div.Scalar_mode")
def div_mode(ctx: Context, x: Any, y: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return floor_divide(ctx, x, y)
    quotient = ctx.b.div(ctx.operand(x), ctx.operand(y))
    exact = rounding_mode is None or ctx.element.is_integer  # integer division truncates
    return quotient if exact else ctx.b.trunc(quotient)


@maps("floor_divide.default", "floor_divide.Scalar")
def floor_divide(ctx: Context, x: Any, y: Any) -> Value:
    x, y = ctx.operand(x), ctx.operand(y)
    if ctx.element.is_integer:
        return ctx.b.div(ctx.b.sub(x, ctx.b.mod(x, y)), y)
    return ctx.b.floor(ctx.b.div(x, y))


@maps("square.default")
def square(ctx: Context, x: Value) -> Value:
    x = ctx.operand(x)
    return ctx.b.mul(x, x)


@maps("round.decimals")
def round_decimals(ctx: Context, x: Value, decimals: int = 0) -> Value:
    factor = 10.0**decimals
    return ctx.b.div(ctx.b.round(ctx.b.mul(ctx.operand(x), factor)), factor)


# comparison and logic


def _compare(op: str) -> Any:
    def mapping(ctx: Context, x: Any, y: Any) -> Value:
        common = ctx.common
        assert common is not None
        if common == bool_ and op not in ("eq", "ne"):
            common = u8
        return ctx.b.op(op, ctx.operand(x, common), ctx.operand(y, common))

    return mapping


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    maps(f"{_name}.Tensor", f"{_name}.Scalar")(_compare(_name))


def _logical(op: str) -> Any:
    return lambda ctx, *xs: ctx.b.op(op, *map(ctx.truth, xs))


for _name in ("and", "or", "xor", "not"):
    maps(f"logical_{_name}.default")(_logical(_name))


def _bitwise(op: str) -> Any:
    def mapping(ctx: Context, *xs: Any) -> Value:
        prefix = "" if ctx.element == bool_ else "bitwise_"
        return ctx.b.op(prefix + op, *map(ctx.operand, xs))

    return mapping


for _name in ("and", "or", "xor"):
    maps(f"bitwise_{_name}.Tensor", f"bitwise_{_name}.Scalar")(_bitwise(_name))
maps("bitwise_not.default")(_bitwise("not"))


def _predicate(op: str, of_integers: bool, **attrs: Any) -> Any:
    def mapping(ctx: Context, x: Value) -> Value:
        if not x.dtype.is_float:
            return ctx.full(of_integers, x.shape, bool_)
        return ctx.b.op(op, x, **attrs)

    return mapping


maps("isnan.default")(_predicate("is_nan", False))
maps("isinf.default")(_predicate("is_inf", False))
maps("isfinite.default")(_predicate("is_finite", True))
maps("isposinf.default")(_predicate("is_inf", False, detect_negative=False))
maps("isneginf.default")(_predicate("is_inf", False, detect_positive=False))


# choice


@maps("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(ctx: Context, condition: Value, x: Any, y: Any) -> Value:
    return ctx.b.where(ctx.truth(condition), ctx.operand(x), ctx.operand(y))


@maps("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(ctx: Context, x: Value, mask: Value, value: Any) -> Value:
    return ctx.b.where(ctx.truth(mask), ctx.operand(value), ctx.operand(x))


@maps("clamp.default", "clamp.Tensor", "clip.default", "clip.Tensor")
def clamp(ctx: Context, x: Value, low: Any = None, high: Any = None) -> Value:
    bounds = [None if bound is None else ctx.operand(bound) for bound in (low, high)]
    return ctx.b.clip(ctx.operand(x), *bounds)


# the same elements


_SAME = "clone alias detach contiguous lift_fresh_copy lift_fresh detach_copy"


@maps(*(f"{name}.default" for name in _SAME.split()))
def same(ctx: Context, x: Value) -> Value:
    return x


@maps("convert_element_type.default", namespace="prims")
def convert(ctx: Context, x: Value, dtype: DType) -> Value:
    return ctx.operand(x)


maps_table(
    {
        "log2.default": lambda ctx, x: ctx.b.mul(ctx.b.log(ctx.operand(x)), 1 / math.log(2)),
        "log10.default": lambda ctx, x: ctx.b.mul(ctx.b.log(ctx.operand(x)), 1 / math.log(10)),
        "exp2.default": lambda ctx, x: ctx.b.exp(ctx.b.mul(ctx.operand(x), math.log(2))),
        "erfc.default": lambda ctx, x: ctx.b.sub(1.0, ctx.b.erf(ctx.operand(x))),
        "clamp_min.default clamp_min.Tensor": lambda ctx, x, low: clamp(ctx, x, low),
        "clamp_max.default clamp_max.Tensor": lambda ctx, x, high: clamp(ctx, x, None, high),
        "_to_copy.default": lambda ctx, x, dtype=None: ctx.operand(x),
        "copy.default": lambda ctx, x, source: ctx.expand(ctx.operand(source), x.shape),
    }
)
