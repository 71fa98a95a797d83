"""Shared parts of the polynomials: floating-point formats, Horner's rule, powers of two.

All functions of this package use generic vector instructions, so one implementation serves every
target. They follow IEEE 754 for NaN, infinities, denormals and signed zeros. Coefficients are
minimax fits (Remez) made for this package, except those of e^x and erf in f32, which are ONNX
Runtime's; each states its interval and error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Function, Type, Value, f32, f64, i32, i64
from bitwright.errors import CompileError


@dataclass(frozen=True)
class Format:
    """A floating-point type and the integer type of its size."""

    float_: Type
    integer: Type
    fraction_bits: int
    bias: int

    @property
    def magic(self) -> float:
        """1.5 · 2^p: adding it rounds to an integer in the last bits."""
        return 1.5 * 2.0**self.fraction_bits

    @property
    def magic_bits(self) -> int:
        return ((self.bias + self.fraction_bits) << self.fraction_bits) | (
            1 << (self.fraction_bits - 1)
        )

    @property
    def least_normal(self) -> float:
        return 2.0 ** (1 - self.bias)


SINGLE = Format(f32, i32, 23, 127)
DOUBLE = Format(f64, i64, 52, 1023)

# ln 2 as a sum of two parts; the product of the first part and an exponent is exact
LN2_HIGH = {SINGLE: 0.693145751953125, DOUBLE: 0.6931471803691238}
LN2_LOW = {SINGLE: 1.428606820309417e-06, DOUBLE: 1.9082149292705877e-10}


def format_of(x: Value) -> Format:
    if x.type.scalar is f32:
        return SINGLE
    if x.type.scalar is f64:
        return DOUBLE
    raise CompileError("a function of floats", expected="f32 or f64", found=x.type)


def horner(f: Function, x: Value, coefficients: Sequence[float]) -> Value:
    """c0 + c1 x + c2 x² + …"""
    *rest, last = coefficients
    total = f.const(x.type, last)
    for coefficient in reversed(rest):
        total = f.fma(total, x, coefficient)
    return total


def power_of_two(f: Function, exponent: Value, form: Format) -> Value:
    """2^n for n in the normal range, by writing the exponent field."""
    bits = f.shl(f.add(exponent, form.bias), form.fraction_bits)
    return f.bitcast(bits, exponent.type.of(form.float_))


def scale(f: Function, x: Value, exponent: Value, form: Format) -> Value:
    """x · 2^n, also if 2^n or the result is outside the normal range: two exact factors."""
    if f.target.has("avx512f") and x.type.total_bytes % 64 == 0:
        name = f"llvm.ldexp.{x.type.mangled}.{exponent.type.mangled}"
        return f.intrinsic(name, x.type, x, exponent)
    half = f.ashr(exponent, 1)
    other = f.sub(exponent, half)
    return f.mul(f.mul(x, power_of_two(f, half, form)), power_of_two(f, other, form))


def nearest(f: Function, x: Value, factor: float, form: Format) -> tuple[Value, Value]:
    """The integer nearest to x · factor, as a float and as an integer."""
    shifted = f.fma(x, factor, form.magic)
    whole = f.sub(shifted, form.magic)
    integer = f.sub(f.bitcast(shifted, x.type.of(form.integer)), form.magic_bits)
    return whole, integer


def in_f64(function: Callable[..., Value]) -> Callable[..., Value]:
    """Decorator: computes the function in f64 and rounds the result once to f32."""

    def compute(f: Function, *operands: Value) -> Value:
        if operands[0].type.scalar is f64:
            return function(f, *operands)
        return f.convert(function(f, *(f.convert(x, f64) for x in operands)), f32)

    compute.__doc__ = function.__doc__
    return compute
