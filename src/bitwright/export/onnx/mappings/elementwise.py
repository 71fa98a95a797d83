"""Elementwise ops whose ONNX form differs from their own declaration."""

from __future__ import annotations

import math
from typing import Any

from bitwright.export.onnx.mapping import Ref, Scope, exports, no_form, same_form
from bitwright.export.onnx.scalars import scalar_form
from bitwright.ir.dtype import DType, bool_

_SAME_ATTRIBUTES = {
    "elu": "Elu", "selu": "Selu", "celu": "Celu", "leaky_relu": "LeakyRelu",
    "hard_sigmoid": "HardSigmoid", "thresholded_relu": "ThresholdedRelu", "shrink": "Shrink",
    "is_inf": "IsInf", "pow": "Pow", "maximum": "Max", "minimum": "Min",
}  # fmt: skip


def _register(op: str, op_type: str) -> None:
    @exports(op)
    def write(e: Scope, *operands: Ref, **attrs: Any) -> Any:
        return same_form(e, op, op_type, operands, attrs)


for _op, _op_type in _SAME_ATTRIBUTES.items():
    _register(_op, _op_type)


@exports("mod")
def mod(e: Scope, x: Ref, y: Ref, fmod: bool) -> Any:
    if x.element.is_float and not fmod:  # in ONNX only integer Mod has the sign of the divisor
        return scalar_form(e, "mod", (x, y), {"fmod": fmod})
    return e.Mod(x, y, fmod=fmod)


@exports("clip")
def clip(e: Scope, x: Ref, low: Ref | None, high: Ref | None) -> Any:
    if all(bound is None or not bound.rank for bound in (low, high)):
        return e.Clip(x, low, high)
    bounded = x if low is None else e.Max(x, low)
    return bounded if high is None else e.Min(bounded, high)


# activations


@exports("silu")
def silu(e: Scope, x: Ref) -> Ref:
    return swish(e, x, 1.0)


@exports("swish", "quick_gelu")
def swish(e: Scope, x: Ref, alpha: float) -> Ref:
    if e.fits("Swish", [x]):
        return e.Swish(x, alpha=alpha)
    return e.Mul(x, e.Sigmoid(x if alpha == 1 else e.Mul(x, e.scalar(alpha, x))))


@exports("mish")
def mish(e: Scope, x: Ref) -> Ref:
    return e.Mish(x) if e.fits("Mish", [x]) else e.Mul(x, e.Tanh(e.Softplus(x)))


@exports("hard_swish")
def hard_swish(e: Scope, x: Ref) -> Ref:
    if e.fits("HardSwish", [x]):
        return e.HardSwish(x)
    return e.Mul(x, e.HardSigmoid(x, alpha=1 / 6, beta=0.5))


@exports("gelu")
def gelu(e: Scope, x: Ref, approximate: str) -> Ref:
    """Gelu; below opset 20 the decomposition that runtimes recognize and fuse."""
    if e.fits("Gelu", [x]):
        return e.Gelu(x, approximate=approximate)
    one, half = e.scalar(1, x), e.scalar(0.5, x)
    if approximate == "none":
        gate = e.Erf(e.Div(x, e.scalar(math.sqrt(2), x)))
        return e.Mul(e.Mul(x, e.Add(gate, one)), half)
    cube = e.Mul(e.Pow(x, e.scalar(3, x)), e.scalar(0.044715, x))
    gate = e.Tanh(e.Mul(e.Add(x, cube), e.scalar(math.sqrt(2 / math.pi), x)))
    return e.Mul(e.Mul(x, half), e.Add(gate, one))


# bits


@exports("shift_left", "shift_right")
def shift(e: Scope, x: Ref, y: Ref) -> Ref:
    """BitShift for unsigned types; a product or quotient by 2**y for signed ones."""
    is_left = e.node is not None and e.node.op == "shift_left"
    lost = e.Or(e.Less(y, e.scalar(0, y)), e.GreaterOrEqual(y, e.scalar(x.element.bits, y)))
    distance = e.Where(lost, e.scalar(0, y), y)
    if not x.element.is_signed:
        direction = "LEFT" if is_left else "RIGHT"
        return e.Where(lost, e.scalar(0, x), e.BitShift(x, distance, direction=direction))
    power = e.Pow(e.scalar(2, x), distance)
    if is_left:
        return e.Where(lost, e.scalar(0, x), e.Mul(x, power))
    floor = e.Div(e.Sub(x, e.Mod(x, power)), power)
    sign = e.Where(e.Less(x, e.scalar(0, x)), e.scalar(-1, x), e.scalar(0, x))
    return e.Where(lost, sign, floor)


# cast


@exports("cast", widens=False)
def cast(e: Scope, x: Ref, to: DType, saturate: bool, round_mode: str) -> Ref:
    if x.element.is_complex or to.is_complex:
        raise e.reject("ONNX Cast has no complex types")
    is_float8 = to.is_float and to.bits == 8
    attrs: dict[str, Any] = {"to": to}
    if is_float8 and not saturate:
        attrs["saturate"] = 0
    if to.name == "f8e8m0" and round_mode != "up":
        attrs["round_mode"] = round_mode
    return e.emit("Cast", [x], attrs, dtypes=[to])[0]


@exports("bitcast", widens=False)
def bitcast(e: Scope, x: Ref, to: DType) -> Ref:
    """Cast keeps the bits of integers and booleans; other types need BitCast."""
    keeps_bits = to.is_integer and (x.element.is_integer or x.element == bool_)
    op_type = "Cast" if keeps_bits and to.bits >= 8 else "BitCast"
    return e.emit(op_type, [x], {"to": to}, dtypes=[to])[0]


no_form(
    "conj",
    "real",
    "imag",
    "squared_norm",
    "complex",
    reason="no ONNX op computes with complex numbers",
)
