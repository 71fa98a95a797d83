"""Conversions between types, with defined rounding and range behaviour.

    f.convert(x, i32)            floats truncate and saturate, NaN becomes 0
    f.round_to_int(x)            f32 to i32, nearest, ties to even; out of range: any integer
    f.convert(x, bf16)           floats round to nearest even, NaN stays NaN

Half floats use the target's conversion instruction where it rounds as IEEE 754 requires, else
integer arithmetic. The AVX-512 bf16 conversion flushes subnormals: only kernels that flush use it.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit.core import Value
from bitwright.backends.cpu.codegen.emit.types import Type, bf16, f16, f32, f64, i1, i16, i32
from bitwright.backends.cpu.codegen.emit.vector import Vectors


class Conversions(Vectors):
    def bitcast(self, value: Value, type_: Type) -> Value:
        """The same bits as another type of the same size."""
        value = self._bits.get(value.text, value)
        if value.type is type_:
            return value
        found = self._cast("bitcast", value, type_)
        self._bits[found.text] = value
        return found

    def convert(self, value: Value, scalar: Type, signed: bool = True) -> Value:
        """The values in another scalar type; `signed` is the signedness of the integer side."""
        source, target = value.type, value.type.of(scalar)
        if source is target:
            return value
        if source.is_int and target.is_int:
            return self._int_to_int(value, target, signed)
        if source.is_int:
            return self._int_to_float(value, target, signed)
        if target.is_int:
            return self._float_to_int(value, target, signed)
        return self._float_to_float(value, target)

    def round_to_int(self, value: Value) -> Value:
        """f32 to i32, to nearest, ties to even; out of range or NaN gives any integer."""
        type_ = value.type.of(i32)
        if self.target.is_x86 or self.target.architecture == "aarch64":
            name = f"llvm.lrint.{type_.mangled}.{value.type.mangled}"
            if value.type.is_vector or self.target.architecture == "aarch64":
                return self.intrinsic(name, type_, value)
            single = self.with_lane(self.undefined(f32.vector(4)), 0, value)
            rounded = self.intrinsic("llvm.x86.sse2.cvtps2dq", i32.vector(4), single)
            return self.lane(rounded, 0)
        return self.convert(self.round(value), i32)

    def saturated(self, value: Value, scalar: Type, low: int, high: int) -> Value:
        """Integers clamped to [low, high] and truncated to a narrower type."""
        return self._cast("trunc", self.min(self.max(value, low), high), value.type.of(scalar))

    # by kind of source and target

    def _cast(self, name: str, value: Value, type_: Type) -> Value:
        return self.emit(type_, f"{name} {value.type.text} {value.text} to {type_.text}")

    def _int_to_int(self, value: Value, target: Type, signed: bool) -> Value:
        if target.scalar is i1:
            return self.ne(value, 0)
        if target.bits < value.type.bits:
            return self._cast("trunc", value, target)
        widens = "sext" if signed and value.type.scalar is not i1 else "zext"
        return self._cast(widens, value, target)

    def _int_to_float(self, value: Value, target: Type, signed: bool) -> Value:
        if target.bits == 16:
            # exact in the wide type, except an i64 beyond 2^53, which rounds twice as in numpy
            wide = f32 if value.type.bits <= 16 else f64
            return self.convert(self.convert(value, wide, signed), target.scalar)
        name = "sitofp" if signed and value.type.scalar is not i1 else "uitofp"
        return self._cast(name, value, target)

    def _float_to_int(self, value: Value, target: Type, signed: bool) -> Value:
        if target.scalar is i1:
            return self.ne(value, 0.0)
        if value.type.bits == 16:
            value = self.convert(value, f32)
        letter = "s" if signed else "u"
        return self.intrinsic(
            f"llvm.fpto{letter}i.sat.{target.mangled}.{value.type.mangled}", target, value
        )

    def _float_to_float(self, value: Value, target: Type) -> Value:
        source, to = value.type.scalar, target.scalar
        if source in (f16, bf16) and to in (f16, bf16, f64):
            return self.convert(self.convert(value, f32), to)
        if source is bf16:
            bits = self._cast("zext", self.bitcast(value, value.type.of(i16)), value.type.of(i32))
            return self.bitcast(self.shl(bits, 16), target)
        if source is f64 and to in (f16, bf16):
            return self.convert(self._round_to_odd(value), to)
        if to is bf16:
            return self._to_bf16(value)
        if f16 in (source, to) and not self.target.converts_f16:
            return self._to_f16(value) if to is f16 else self._from_f16(value)
        return self._cast("fptrunc" if to.bits < source.bits else "fpext", value, target)

    def _round_to_odd(self, value: Value) -> Value:
        """f64 to f32, rounded to odd: rounding the result further equals rounding once.

        An inexact result is the neighbour towards zero with its last bit set, so no later
        rounding to fewer than 23 bits sees a tie.
        """
        near = self._cast("fptrunc", value, value.type.of(f32))
        back = self._cast("fpext", near, value.type)
        bits = self.bitcast(near, near.type.of(i32))
        beyond = self._int_to_int(self.gt(self.abs(back), self.abs(value)), bits.type, False)
        odd = self.or_(self.sub(bits, beyond), 1)
        exact = self.or_(self.eq(back, value), self.is_nan(value))
        return self.bitcast(self.select(exact, bits, odd), near.type)

    def _to_bf16(self, value: Value) -> Value:
        """Round to nearest even by adding 0x7FFF plus the last kept bit; NaN is separate."""
        lanes = value.type.lanes
        if self.flushes and lanes == 16 and self.target.has("avx512bf16"):
            return self.intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", bf16.vector(16), value)
        bits = self.bitcast(value, value.type.of(i32))
        if self.target.has("avx512f"):  # masked adds
            is_odd = self.ne(self.and_(bits, 0x10000), 0)
            rounded = self.select(is_odd, self.add(bits, 0x8000), self.add(bits, 0x7FFF))
        else:
            last = self.and_(self.lshr(bits, 16), 1)
            rounded = self.add(bits, self.add(last, 0x7FFF))
        chosen = self.select(self.is_nan(value), self.or_(bits, 0x400000), rounded)
        half = self._cast("trunc", self.lshr(chosen, 16), value.type.of(i16))
        return self.bitcast(half, value.type.of(bf16))

    def _from_f16(self, value: Value) -> Value:
        """Shift exponent and fraction, then multiply by 2^112, which also normalizes denormals."""
        bits = self._cast("zext", self.bitcast(value, value.type.of(i16)), value.type.of(i32))
        sign = self.shl(self.and_(bits, 0x8000), 16)
        body = self.bitcast(self.shl(self.and_(bits, 0x7FFF), 13), bits.type.of(f32))
        size = self.bitcast(self.mul(body, 2.0**112), bits.type)
        special = self.ugt(self.and_(bits, 0x7FFF), 0x7BFF)
        return self.bitcast(
            self.or_(sign, self.select(special, self.or_(size, 0x7F800000), size)),
            bits.type.of(f32),
        )

    def _to_f16(self, value: Value) -> Value:
        """Round normal results by integer addition, denormal results by a float addition."""
        bits = self.bitcast(value, value.type.of(i32))
        sign = self.lshr(self.and_(bits, -0x80000000), 16)
        size = self.and_(bits, 0x7FFFFFFF)
        last = self.and_(self.lshr(size, 13), 1)
        rebased = self.sub(size, 112 << 23)
        normal = self.lshr(self.add(rebased, self.add(last, 0xFFF)), 13)
        magic = 0.5  # adding it aligns the last place with the units of an f16 denormal
        shifted = self.add(self.bitcast(size, value.type), magic)
        denormal = self.sub(self.bitcast(shifted, bits.type), 0x3F000000)
        finite = self.select(self.ult(size, 113 << 23), denormal, normal)
        huge = self.uge(size, 0x477FF000)  # rounds to infinity
        nan = self.or_(self.and_(self.lshr(size, 13), 0x1FF), 0x7E00)
        limit = self.select(self.ugt(size, 0x7F800000), nan, self.const(bits.type, 0x7C00))
        whole = self.or_(self.select(huge, limit, finite), sign)
        return self.bitcast(self._cast("trunc", whole, bits.type.of(i16)), bits.type.of(f16))
