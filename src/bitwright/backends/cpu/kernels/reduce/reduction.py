"""Reductions as passes (`formulas.Pass`), independent of the loop order.

sum mean prod max min l1 l2 are one pass; log_sum_exp is two, the first being the maximum:

    ln Σ e^(v - top) + top, with 0 in place of an infinite top

The accumulator has the operand's type for sums, products, minima and maxima (integers wrap, as a
wide sum would after narrowing); means of integers are summed in i64, roots and logarithms of
integers are computed in f64. A boolean is a byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bitwright.backends.cpu.codegen import math as vector_math
from bitwright.backends.cpu.codegen.emit import Function, Value
from bitwright.backends.cpu.codegen.emit.types import Type, computed, f64, i8, i64, storage_type
from bitwright.backends.cpu.kernels.rows.formulas import Pass, Stats
from bitwright.ir.dtype import DType, bool_

_NAMES = ("sum", "mean", "prod", "max", "min", "l1", "l2", "log_sum_exp")
OPS = tuple(f"reduce_{name}" for name in _NAMES)


@dataclass(frozen=True)
class ReductionOp:
    op: str
    element: DType

    @property
    def type(self) -> Type:
        """The type of the accumulator."""
        if self.element == bool_:
            return i8
        if self.element.is_integer and self.op in ("reduce_l2", "reduce_log_sum_exp"):
            return f64
        if self.element.is_integer and self.op == "reduce_mean":
            return i64
        return computed(self.element)

    def to_accumulator(self, f: Function, v: Value) -> Value:
        """A computed element in the accumulator's type."""
        return f.convert(v, self.type, self.element.is_signed)

    def to_stored(self, f: Function, total: Value) -> Value:
        """A result in its storage type; an integer that is too large wraps, as in numpy."""
        if total.type.is_float and self.element.is_integer and self.element.bits < 64:
            total = f.convert(total, i64)
        return f.convert(total, storage_type(self.element), self.element.is_signed)

    @property
    def passes(self) -> tuple[Pass, ...]:
        if self.op == "reduce_log_sum_exp":
            return _TOP, _POWERS
        if self.op in ("reduce_max", "reduce_min"):
            return (self._extreme(),)
        return (self._sum(),)

    def result(self, f: Function, stats: Stats) -> Value:
        if self.op != "reduce_log_sum_exp":
            return stats[0]
        return f.add(vector_math.log(f, stats[1]), stats[0])

    def _extreme(self) -> Pass:
        larger = self.op == "reduce_max"
        limit = self.element.min if larger else self.element.max
        if self.element.is_float:
            limit = -math.inf if larger else math.inf
        signed = self.element.is_signed

        def pick(f: Function, a: Value, b: Value) -> Value:
            return f.max(a, b, signed) if larger else f.min(a, b, signed)

        return Pass(limit, lambda f, total, v, stats: pick(f, total, v), pick, _keep)

    def _sum(self) -> Pass:
        if self.op == "reduce_prod":
            return Pass(1, lambda f, total, v, stats: f.mul(total, v), Function.mul, _keep)

        def fold(f: Function, total: Value, v: Value, stats: Stats) -> Value:
            if self.op == "reduce_l2":
                return f.fma(v, v, total)
            if self.op == "reduce_l1" and self.element.is_signed:
                v = f.abs(v)
            return f.add(total, v)

        def finish(f: Function, total: Value, count: Value) -> Value:
            if self.op == "reduce_l2":
                return f.sqrt(total)
            if self.op != "reduce_mean":
                return total
            if self.element.is_float:
                return f.div(total, f.convert(count, self.type))
            divisor = f.splat(f.max(count, 1), total.type.lanes)
            return (f.sdiv if self.element.is_signed else f.udiv)(total, divisor)

        return Pass(0, fold, Function.add, finish)


def _keep(f: Function, total: Value, count: Value) -> Value:
    return total


def _finite(f: Function, total: Value, count: Value) -> Value:
    return f.select(f.lt(f.abs(total), math.inf), total, 0.0)


# The maximum does not propagate NaN, but e^(v - top) does.
_TOP = Pass(
    -math.inf, lambda f, total, v, stats: f.quick_max(v, total), Function.quick_max, _finite
)
_POWERS = Pass(
    0.0,
    lambda f, total, v, stats: f.add(total, vector_math.exp(f, f.sub(v, stats[0]))),
    Function.add,
    _keep,
)
