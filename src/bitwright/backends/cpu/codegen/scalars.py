"""Emits the scalar forms of elementwise ops (`ops.core.scalar`) for any number of lanes.

    e = LlvmScalars(f, default=f32, lanes=16)
    y = op.scalar(e, e.term(x, f32), **attrs)

A `Term` is a value with its element type, because LLVM integers have no sign. Half floats are
computed in f32; booleans are lanes of i1. A Python number takes the type of the other operand, or
the default. Integers never trap: division by zero gives 0, the lowest integer divided by -1 and
every overflow wrap, and a shift beyond the width equals repeated shifts by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bitwright.backends.cpu.codegen import math
from bitwright.backends.cpu.codegen.emit import Function, Value, computed, storage_type
from bitwright.backends.cpu.codegen.emit import f32 as emitted_f32
from bitwright.backends.cpu.codegen.emit import i32 as emitted_i32
from bitwright.errors import CompileError
from bitwright.ir.dtype import DType, bf16, bool_, f16, f32, i32, i64


@dataclass(frozen=True)
class Term:
    value: Value
    dtype: DType

    @property
    def signed(self) -> bool:
        return self.dtype.is_signed


Operand = Term | float


def widened(dtype: DType) -> DType:
    """The type that elements of this type are computed in."""
    return f32 if dtype in (f16, bf16) else dtype


def _float_only(name: str, emit: Callable[..., Value]) -> Callable[..., Term]:
    def render(self: LlvmScalars, a: Operand) -> Term:
        term = self._as_term(a)
        if not term.dtype.is_float:
            raise CompileError(f"{name} is a function of floats", found=term.dtype)
        return Term(emit(self.f, term.value), term.dtype)

    return render


def _whole(name: str) -> Callable[..., Term]:
    def render(self: LlvmScalars, a: Operand) -> Term:
        """Integers are returned unchanged."""
        term = self._as_term(a)
        if not term.dtype.is_float:
            return term
        return Term(getattr(self.f, name)(term.value), term.dtype)

    return render


def _arithmetic(name: str) -> Callable[..., Term]:
    def render(self: LlvmScalars, a: Operand, b: Operand) -> Term:
        x, y = self._numbers(a, b)
        return Term(getattr(self.f, name)(x.value, y.value), x.dtype)

    return render


def _bitwise(name: str) -> Callable[..., Term]:
    def render(self: LlvmScalars, a: Operand, b: Operand) -> Term:
        a, b = self._pair(a, b)
        return Term(getattr(self.f, name)(a.value, b.value), a.dtype)

    return render


def _compare(signed: str, unsigned: str) -> Callable[..., Term]:
    def render(self: LlvmScalars, a: Operand, b: Operand) -> Term:
        a, b = self._pair(a, b)
        name = signed if a.signed else unsigned
        return Term(getattr(self.f, name)(a.value, b.value), bool_)

    return render


def round_clamped(f: Function, real: Value, low: Value | float, high: Value | float) -> Value:
    """The nearest integer within integral bounds, as i32; NaN gives the lower bound."""
    return f.round_to_int(f.quick_min(f.quick_max(real, low), high))


class LlvmScalars:
    """Implements the protocol `ops.core.scalar.Scalars` with emitted values."""

    def __init__(self, f: Function, default: DType = f32, lanes: int = 1) -> None:
        self.f, self.default, self.lanes = f, widened(default), lanes

    def term(self, value: Value, dtype: DType) -> Term:
        """A computed value as an operand of scalar forms."""
        return Term(value, widened(dtype))

    add, sub, mul = _arithmetic("add"), _arithmetic("sub"), _arithmetic("mul")
    eq, ne = _compare("eq", "eq"), _compare("ne", "ne")
    lt, le = _compare("lt", "ult"), _compare("le", "ule")
    gt, ge = _compare("gt", "ugt"), _compare("ge", "uge")
    bit_and, bit_or, bit_xor = _bitwise("and_"), _bitwise("or_"), _bitwise("xor")
    floor, ceil, round, trunc = _whole("floor"), _whole("ceil"), _whole("round"), _whole("trunc")
    sqrt = _float_only("sqrt", lambda f, x: f.sqrt(x))
    exp, log = _float_only("exp", math.exp), _float_only("log", math.log)
    sin, cos, tan = (_float_only(n, getattr(math, n)) for n in ("sin", "cos", "tan"))
    asin, acos, atan = (_float_only(n, getattr(math, n)) for n in ("asin", "acos", "atan"))
    sinh, cosh, tanh = (_float_only(n, getattr(math, n)) for n in ("sinh", "cosh", "tanh"))
    asinh, acosh, atanh = (_float_only(n, getattr(math, n)) for n in ("asinh", "acosh", "atanh"))
    erf = _float_only("erf", math.erf)

    def neg(self, a: Operand) -> Term:
        (x,) = self._numbers(a)
        return Term(self.f.neg(x.value), x.dtype)

    def abs(self, a: Operand) -> Term:
        (x,) = self._numbers(a)
        return Term(self.f.abs(x.value), x.dtype) if x.signed else x

    def max(self, a: Operand, b: Operand) -> Term:
        return self._extreme(self.f.max, a, b)

    def min(self, a: Operand, b: Operand) -> Term:
        return self._extreme(self.f.min, a, b)

    def _extreme(self, emit: Callable[..., Value], a: Operand, b: Operand) -> Term:
        first, second = self._numbers(a, b)
        # a constant stays a Python number: the emitter then knows that it is not NaN
        left = first.value if isinstance(a, Term) else a
        right = second.value if isinstance(b, Term) else b
        if not isinstance(left, Value) and not isinstance(right, Value):
            left = first.value
        return Term(emit(left, right, first.signed), first.dtype)

    def div(self, a: Operand, b: Operand) -> Term:
        x, y = self._numbers(a, b)
        if x.dtype.is_float:
            return Term(self.f.div(x.value, y.value), x.dtype)
        divisor, zero = self._safe_divisor(x, y)
        quotient = (self.f.sdiv if x.signed else self.f.udiv)(x.value, divisor)
        return Term(self.f.select(zero, 0, quotient), x.dtype)

    def rem(self, a: Operand, b: Operand) -> Term:
        x, y = self._numbers(a, b)
        if x.dtype.is_float:
            return Term(math.remainder(self.f, x.value, y.value), x.dtype)
        divisor, zero = self._safe_divisor(x, y)
        rest = (self.f.srem if x.signed else self.f.urem)(x.value, divisor)
        return Term(self.f.select(zero, 0, rest), x.dtype)

    def _safe_divisor(self, a: Term, b: Term) -> tuple[Value, Value]:
        """(divisor, is it 0): 1 replaces 0, and replaces -1 if the dividend is the lowest integer,
        where x / 1 equals the wrapped x / -1."""
        zero = self.f.eq(b.value, 0)
        unsafe = zero
        if a.signed:
            lowest = self.f.eq(a.value, int(a.dtype.min))
            unsafe = self.f.or_(zero, self.f.and_(lowest, self.f.eq(b.value, -1)))
        return self.f.select(unsafe, 1, b.value), zero

    def pow(self, a: Operand, b: Operand) -> Term:
        x, y = self._numbers(a, b)
        if x.dtype.is_float:
            return Term(math.pow_(self.f, x.value, y.value), x.dtype)
        return Term(self._integer_power(x, y), x.dtype)

    def _integer_power(self, a: Term, b: Term) -> Value:
        """Square and multiply, wrapping; a negative exponent gives 0 except for bases 1 and -1."""
        f = self.f
        one = f.as_value(1, a.value.type)
        with f.do_while(carry=(one, a.value, b.value)) as loop:
            total, square, left = loop.carried
            total = f.select(f.ne(f.and_(left, 1), 0), f.mul(total, square), total)
            left = f.lshr(left, 1)
            loop.next(total, f.mul(square, square), left, again=f.any(f.ne(left, 0)))
        power = loop.results[0]
        if not a.signed:
            return power
        unit = f.or_(f.eq(a.value, 1), f.eq(a.value, -1))
        return f.select(f.and_(f.lt(b.value, 0), f.not_(unit)), 0, power)

    def bit_not(self, a: Operand) -> Term:
        a = self._as_term(a)
        return Term(self.f.not_(a.value), a.dtype)

    def shift_left(self, a: Operand, b: Operand) -> Term:
        a, b = self._pair(a, b)
        inside = self.f.ult(b.value, a.value.type.bits)
        shifted = self.f.shl(a.value, self.f.select(inside, b.value, 0))
        return Term(self.f.select(inside, shifted, 0), a.dtype)

    def shift_right(self, a: Operand, b: Operand) -> Term:
        a, b = self._pair(a, b)
        last = a.value.type.bits - 1
        inside = self.f.ule(b.value, last)
        if a.signed:
            return Term(self.f.ashr(a.value, self.f.select(inside, b.value, last)), a.dtype)
        shifted = self.f.lshr(a.value, self.f.select(inside, b.value, 0))
        return Term(self.f.select(inside, shifted, 0), a.dtype)

    def select(self, condition: Operand, a: Operand, b: Operand) -> Term:
        condition = self._as_term(condition, bool_)
        a, b = self._pair(a, b)
        mask = self.f.convert(condition.value, computed(bool_))
        return Term(self.f.select(mask, a.value, b.value), a.dtype)

    def requantize(
        self, a: Operand, zero: Operand | None, highest: Operand | None, to: DType, bounded: bool
    ) -> Term:
        whole = self.rounded_qvalues(a, zero, highest, to, bounded)
        if bounded:
            return Term(self.f.saturated(whole, computed(to), int(to.min), int(to.max)), to)
        return Term(self.f.convert(whole, computed(to)), to)

    def rounded_qvalues(
        self, a: Operand, zero: Operand | None, highest: Operand | None, to: DType, bounded: bool
    ) -> Value:
        """Quantized values in i32; bounded ones are not saturated yet.

        Others are clamped as floats between integers, so rounding cannot leave the range.
        """
        f, real = self.f, self._as_term(a).value
        offset: Value | None = None
        if isinstance(zero, Term):
            offset = f.convert(zero.value, emitted_i32, zero.signed)
        elif zero is not None:
            offset = f.const(emitted_i32.vector(self.lanes), zero)
        cut = real if highest is None else f.quick_min(self._as_term(highest, f32).value, real)
        if bounded:
            whole = f.round_to_int(cut)
        else:
            bounds: tuple[Any, Any] = (float(to.min), float(to.max))
            if isinstance(zero, Term):
                assert offset is not None
                moved = f.convert(offset, emitted_f32)
                bounds = (f.sub(bounds[0], moved), f.sub(bounds[1], moved))
            elif zero is not None:
                bounds = (bounds[0] - zero, bounds[1] - zero)
            whole = round_clamped(f, cut, *bounds)
        return whole if offset is None else f.add(whole, offset)

    def result(self, a: Operand, dtype: DType) -> Term:
        """The result of a scalar form in the computed type of the op's result."""
        a = self._as_term(a)
        if a.dtype == widened(dtype):
            return a
        return Term(self.f.convert(a.value, computed(dtype), a.signed), widened(dtype))

    # operands

    def cast(self, a: Operand, dtype: DType) -> Term:
        """The term in another type, as the op `cast` defines it."""
        a, to = self._as_term(a), widened(dtype)
        if a.dtype == to:
            return self._rounded(a, dtype)
        if a.dtype.is_float and to.is_integer:
            return Term(self._truncated(a.value, to), to)
        signed = a.signed if a.dtype.is_integer else True
        return self._rounded(Term(self.f.convert(a.value, computed(to), signed), to), dtype)

    def _rounded(self, a: Term, dtype: DType) -> Term:
        """A computed value rounded to this storage type."""
        if widened(dtype) == dtype:
            return a
        half = self.f.convert(a.value, storage_type(dtype))
        return Term(self.f.convert(half, computed(dtype)), a.dtype)

    def _truncated(self, x: Value, to: DType) -> Value:
        """A float truncated; values outside i32 (for short types) or i64 become the minimum."""
        f = self.f
        if to.name == "u64":  # values from 2^63 on are shifted into the range of i64 and back
            upper = f.ge(x, 2.0**63)
            low = self._truncated(f.select(upper, f.sub(x, 2.0**63), x), i64)
            return f.xor(low, f.shl(f.convert(upper, computed(to)), 63))
        middle = i32 if to.bits < 32 or to == i32 else i64
        limit = 2.0 ** (middle.bits - 1)
        type_ = x.type.of(computed(middle))
        whole = f.emit(type_, f"fptosi {x.type.text} {x.text} to {type_.text}")
        fits = f.and_(f.gt(x, -limit - 1.0), f.lt(x, limit))
        if x.type.bits == 32 or middle is i64:  # -limit - 1 rounds to -limit
            fits = f.and_(f.ge(x, -limit), f.lt(x, limit))
        return f.convert(f.select(fits, whole, int(middle.min)), computed(to))

    def _as_term(self, a: Operand, dtype: DType | None = None) -> Term:
        if isinstance(a, Term):
            return a
        dtype = dtype or self.default
        return Term(self.f.const(computed(dtype).vector(self.lanes), a), dtype)

    def _pair(self, a: Operand, b: Operand) -> tuple[Term, Term]:
        """Both at one type: a number takes the type of the term, a boolean becomes a number."""
        if not isinstance(a, Term) and not isinstance(b, Term):
            return self._as_term(a), self._as_term(b)
        if not isinstance(a, Term):
            b, a = self._pair(b, a)
            return a, b
        if not isinstance(b, Term):
            if a.dtype == bool_ and not isinstance(b, bool) and b not in (0, 1):
                a = self.cast(a, self.default)
            return a, self._as_term(b, a.dtype)
        if a.dtype == b.dtype:
            return a, b
        if a.dtype == bool_:
            return self.cast(a, b.dtype), b
        if b.dtype == bool_:
            return a, self.cast(b, a.dtype)
        raise CompileError("operands have different element types", expected=a.dtype, found=b.dtype)

    def _numbers(self, *operands: Operand) -> tuple[Term, ...]:
        """As `_pair`, with booleans converted to the default type."""
        terms = self._pair(*operands) if len(operands) == 2 else (self._as_term(operands[0]),)
        return tuple(self.cast(t, self.default) if t.dtype == bool_ else t for t in terms)


class HalfScalars(LlvmScalars):
    """Computes in f16, on targets with f16 arithmetic."""

    def __init__(self, f: Function, lanes: int) -> None:
        super().__init__(f, f16, lanes)
        self.default = f16

    def term(self, value: Value, dtype: DType) -> Term:
        return Term(value, dtype)

    def result(self, a: Operand, dtype: DType) -> Term:
        return self._as_term(a)

    def _as_term(self, a: Operand, dtype: DType | None = None) -> Term:
        if isinstance(a, Term):
            return a
        return Term(self.f.const(storage_type(f16).vector(self.lanes), a), f16)
