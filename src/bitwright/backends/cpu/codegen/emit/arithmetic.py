"""Arithmetic, comparisons and selection, lane by lane.

Integer types have no sign: a sign-dependent instruction has two forms (`sdiv` and `udiv`, `lshr`
and `ashr`, `ult`) or takes `signed=`. Float comparisons are ordered (false if an operand is NaN)
except `ne`. Operations that a target lacks are expanded here: emitted code never calls a C library.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bitwright.backends.cpu.codegen.emit.core import Core, Operand, Value
from bitwright.backends.cpu.codegen.emit.types import i1
from bitwright.errors import CompileError

_NEUTRAL = {"add": "0", "sub": "0", "mul": "1", "udiv": "1", "shl": "0", "lshr": "0", "ashr": "0"}
"""The identity element as second operand of each integer instruction."""


def _binary(integer: str, real: str) -> Callable[[Core, Operand, Operand], Value]:
    neutral = _NEUTRAL.get(integer)

    def emit(self: Core, a: Operand, b: Operand) -> Value:
        a, b = self.pair(a, b)
        name = integer if a.type.is_int else real
        if not name or not (a.type.is_int or a.type.is_float):
            raise CompileError(f"{integer or real} does not exist for {a.type}")
        if a.type.is_int and b.text == neutral:
            return a
        if a.type.is_int and a.text == neutral and integer in ("add", "mul"):
            return b
        if integer == "mul" and "0" in (a.text, b.text):
            return self.const(a.type, 0)
        return self.emit(a.type, f"{name} {a.type.text} {a.text}, {b.text}")

    return emit


def _compare(integer: str, real: str) -> Callable[[Core, Operand, Operand], Value]:
    def emit(self: Core, a: Operand, b: Operand) -> Value:
        a, b = self.pair(a, b)
        name = f"fcmp {real}" if a.type.is_float else f"icmp {integer}"
        return self.emit(a.type.of(i1), f"{name} {a.type.text} {a.text}, {b.text}")

    return emit


class Arithmetic(Core):
    add, sub, mul = _binary("add", "fadd"), _binary("sub", "fsub"), _binary("mul", "fmul")
    div = _binary("", "fdiv")
    sdiv, udiv = _binary("sdiv", ""), _binary("udiv", "")
    srem, urem = _binary("srem", ""), _binary("urem", "")
    and_, or_, xor = _binary("and", ""), _binary("or", ""), _binary("xor", "")
    shl, lshr, ashr = _binary("shl", ""), _binary("lshr", ""), _binary("ashr", "")
    eq, ne = _compare("eq", "oeq"), _compare("ne", "une")
    lt, le = _compare("slt", "olt"), _compare("sle", "ole")
    gt, ge = _compare("sgt", "ogt"), _compare("sge", "oge")
    ult, ule = _compare("ult", "ult"), _compare("ule", "ule")
    ugt, uge = _compare("ugt", "ugt"), _compare("uge", "uge")
    unordered = _compare("eq", "uno")

    def neg(self, a: Value) -> Value:
        if a.type.is_float:
            return self.emit(a.type, f"fneg {a.type.text} {a.text}")
        return self.sub(0, a)

    def not_(self, a: Value) -> Value:
        return self.xor(a, -1 if a.type.scalar is not i1 else 1)

    def select(self, condition: Value, a: Operand, b: Operand) -> Value:
        """a where the condition holds, else b; a scalar condition selects whole vectors."""
        a, b = self.pair(a, b)
        if condition.type.lanes > a.type.lanes:
            lanes = condition.type.lanes
            a, b = self.splat(a, lanes), self.splat(b, lanes)
        return self.emit(a.type, f"select {self.listed((condition, a, b))}")

    def is_nan(self, a: Value) -> Value:
        return self.unordered(a, a)

    # minimum and maximum

    def min(self, a: Operand, b: Operand, signed: bool = True) -> Value:
        """The minimum; NaN if either is NaN (one instruction when one operand is a constant)."""
        return self._extreme("min", a, b, signed)

    def max(self, a: Operand, b: Operand, signed: bool = True) -> Value:
        """The maximum; NaN if either is NaN (one instruction when one operand is a constant)."""
        return self._extreme("max", a, b, signed)

    def _extreme(self, name: str, a: Operand, b: Operand, signed: bool) -> Value:
        if not isinstance(a, Value):
            a, b = b, a
        number = not isinstance(b, Value) and not math.isnan(b)
        a, b = self.pair(a, b)
        if a.type.is_int:
            prefix = "s" if signed else "u"
            return self.intrinsic(f"llvm.{prefix}{name}.{a.type.mangled}", a.type, a, b)
        wins = self.lt(b, a) if name == "min" else self.gt(b, a)
        quick = self.select(wins, b, a)  # propagates a NaN in a
        return quick if number else self.select(self.is_nan(b), b, quick)

    def quick_min(self, a: Operand, b: Operand) -> Value:
        """The minimum in one instruction; b if either is NaN."""
        a, b = self.pair(a, b)
        return self.select(self.lt(a, b), a, b)

    def quick_max(self, a: Operand, b: Operand) -> Value:
        """The maximum in one instruction; b if either is NaN."""
        a, b = self.pair(a, b)
        return self.select(self.gt(a, b), a, b)

    def clamp(self, a: Value, low: float, high: float, signed: bool = True) -> Value:
        return self.min(self.max(a, low, signed), high, signed)

    # functions that are one instruction

    def fma(self, a: Operand, b: Operand, c: Operand) -> Value:
        """a * b + c, rounded once if the target has fma, else rounded twice."""
        a, b = self.pair(a, b)
        if isinstance(c, Value) and c.type.lanes > a.type.lanes:
            a, b = self.as_value(a, c.type), self.as_value(b, c.type)
        c = self.as_value(c, a.type)
        if not self.target.has_fma or a.type.is_int:
            return self.add(self.mul(a, b), c)
        return self.intrinsic(f"llvm.fma.{a.type.mangled}", a.type, a, b, c)

    def abs(self, a: Value) -> Value:
        if a.type.is_float:
            return self.intrinsic(f"llvm.fabs.{a.type.mangled}", a.type, a)
        wraps = self.const(i1, 0)  # abs of the lowest integer wraps instead of being poison
        return self.intrinsic(f"llvm.abs.{a.type.mangled}", a.type, a, wraps)

    def sqrt(self, a: Value) -> Value:
        return self.intrinsic(f"llvm.sqrt.{a.type.mangled}", a.type, a)

    def copysign(self, magnitude: Value, sign: Value) -> Value:
        return self.intrinsic(
            f"llvm.copysign.{magnitude.type.mangled}", magnitude.type, magnitude, sign
        )

    def round(self, a: Value) -> Value:
        """Round to the nearest integer, ties to even."""
        if self._rounds:
            return self.intrinsic(f"llvm.rint.{a.type.mangled}", a.type, a)
        # floats of at least 2^p are integers; adding 2^p to smaller ones rounds off the fraction
        whole = float(1 << (23 if a.type.bits == 32 else 52))
        size = self.abs(a)
        near = self.sub(self.add(size, whole), whole)
        return self.copysign(self.select(self.lt(size, whole), near, size), a)

    def floor(self, a: Value) -> Value:
        if self._rounds:
            return self.intrinsic(f"llvm.floor.{a.type.mangled}", a.type, a)
        near = self.round(a)
        return self.copysign(self.select(self.gt(near, a), self.sub(near, 1.0), near), a)

    def ceil(self, a: Value) -> Value:
        if self._rounds:
            return self.intrinsic(f"llvm.ceil.{a.type.mangled}", a.type, a)
        near = self.round(a)
        return self.copysign(self.select(self.lt(near, a), self.add(near, 1.0), near), a)

    def trunc(self, a: Value) -> Value:
        if self._rounds:
            return self.intrinsic(f"llvm.trunc.{a.type.mangled}", a.type, a)
        size = self.abs(a)
        near = self.round(size)
        return self.copysign(self.select(self.gt(near, size), self.sub(near, 1.0), near), a)

    @property
    def _rounds(self) -> bool:
        """Whether the target has an instruction that rounds to an integral float."""
        return not self.target.is_x86 or self.target.has("sse4.1")
