"""Constant weights quantized to 2 to 8 bits: their packed format, and its loads.

    w[k, n] = (q[k, n] - zero[k // block, n]) * scale[k // block, n]

Panels of `columns` columns follow each other, as for the f32 product. Within a panel, 8-bit values
are [k][columns]; narrower ones are [k / group][columns] in 32-bit words, with the first of the
`group` values of a column in the lowest bits. A lane holds a column, and a shift extracts its next
value. Where the target has a lookup in a vector (vpermps), the four lowest bits of the lane index a
table of 16 values of any format. Integers are signed: unsigned ones and their zero points are moved
by half their range. Scales are [k / block][columns] in the narrowest exact type: 8-bit exponents of
powers of two, then f16, then f32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Type, Value, f16, f32, i8, i16, i32
from bitwright.backends.cpu.codegen.instr import lookup_f32
from bitwright.backends.cpu.kernels.matmul.matmul import pack
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.ir.dtype import DType, dtype, f4e2m1, f8e4m3fn, f8e5m2
from bitwright.target import Target

Array = np.ndarray[Any, Any]
LONGEST = 512
"""The longest block in memory; longer blocks repeat their scale."""
GROUP = {8: 8, 4: 8, 2: 16}
"""Values of a column per load, by bits."""
_E4M3_FACTOR = 256.0
_DOUBLED_F4 = 0xC8643210
"""2 |x| of the eight magnitudes of f4e2m1, four bits each."""
_EXPONENT_BITS = 23


@dataclass(frozen=True)
class QuantizedWeights:
    """The format of packed weights, a parameter of the kernel."""

    kind: DType
    """A signed integer or a float of 2, 4 or 8 bits."""
    block: int
    """Values that share a scale: whole groups."""
    scale: Type
    """i8 is the exponent of a power of two."""
    zero: Type | None
    has_tail: bool
    """Whether a column ends within a group."""

    @property
    def bits(self) -> int:
        return self.kind.bits

    @property
    def group(self) -> int:
        return GROUP[self.bits]

    @property
    def unit_bytes(self) -> int:
        """Bytes of one group of a column."""
        return self.group * self.bits // 8

    @property
    def pointers(self) -> tuple[str, ...]:
        return ("scale", "zero") if self.zero is not None else ("scale",)


@dataclass(frozen=True)
class Packed:
    form: QuantizedWeights
    qvalues: Array
    scale: Array
    zero: Array | None


def pack_weights(
    qvalues: Array, scale: Array, zero: Array | None, block: int, tile: Tile, target: Target
) -> Packed | str:
    """Packed values [n, k] with scales and zero points [n, k / block], or why they have no
    kernel."""
    kind = dtype(qvalues.dtype)
    is_float = kind.is_float
    if is_float and kind not in (f4e2m1, f8e4m3fn, f8e5m2):
        return f"there is no kernel for {kind} weights"
    if kind.bits == 8 and is_float and not target.converts_f16:
        return "the target has no conversion of f16, which the f8 kernel uses"
    if is_float and not np.isfinite(qvalues.astype(np.float32)).all():
        return "a weight is not finite"
    depth = qvalues.shape[1]
    group = GROUP[kind.bits]
    shared = _shared(block, depth, group)
    if not shared:
        return f"the block size {block} is not a multiple of {group}"
    wide = scale.astype(np.float32)
    factor = _E4M3_FACTOR if kind == f8e4m3fn else 1.0
    if not np.isfinite(wide * np.float32(factor)).all():
        return "a scale is not finite"
    if zero is not None:
        zero = zero.astype(np.float32)
    if not is_float and not kind.is_signed:
        middle = 1 << (kind.bits - 1)
        qvalues = (qvalues.astype(np.int16) - middle).astype(np.int8)
        zero = (np.zeros_like(wide) if zero is None else zero) - np.float32(middle)
    points = None if zero is None or not zero.any() else zero
    stored = _narrowest(_repeated(wide, block, shared, depth), target)
    held = None
    if points is not None:
        whole = points.astype(np.int8)
        held = _repeated(whole if (whole == points).all() else points, block, shared, depth)
    signed = kind if is_float or kind.is_signed else dtype(f"i{kind.bits}")
    form = QuantizedWeights(
        signed,
        shared,
        {1: i8, 2: f16, 4: f32}[stored.dtype.itemsize],
        None if held is None else i8 if held.dtype == np.int8 else f32,
        depth % group != 0,
    )
    return Packed(
        form,
        _quantized_panels(qvalues.T, kind.bits, tile),
        pack(stored.T, tile, stored.dtype),
        None if held is None else pack(held.T, tile, held.dtype),
    )


def _shared(block: int, depth: int, group: int) -> int:
    """The longest supported block size that divides `block`; 0 if there is none."""
    if block >= depth:
        return min(LONGEST, -(-max(depth, 1) // group) * group)
    if block <= LONGEST:
        return 0 if block % group else block
    sizes = range(LONGEST - LONGEST % group, 0, -group)
    return next((size for size in sizes if block % size == 0), 0)


def _repeated(parameter: Array, block: int, shared: int, depth: int) -> Array:
    """A parameter [n, k / block] repeated to [n, k / shared]."""
    starts = np.arange(0, depth, shared)
    return parameter if shared == block else parameter[:, starts // min(block, max(depth, 1))]


def _narrowest(scale: Array, target: Target) -> Array:
    """f32 scales in the narrowest type that represents them exactly."""
    bits = scale.view(np.uint32)
    exponent = bits >> _EXPONENT_BITS
    if (bits == exponent << _EXPONENT_BITS).all() and ((exponent > 0) & (exponent < 255)).all():
        return exponent.astype(np.uint8)
    if target.converts_f16:
        with np.errstate(over="ignore"):
            half = scale.astype(np.float16)
        if (half.astype(np.float32) == scale).all():
            return half
    return scale


def _quantized_panels(qvalues: Array, bits: int, tile: Tile) -> Array:
    """Packs values [k, n] in panels, with the groups of a column contiguous."""
    depth, columns = qvalues.shape
    group = GROUP[bits]
    padded = np.zeros((-(-depth // group) * group, columns), np.uint8)
    padded[:depth] = np.ascontiguousarray(qvalues).view(np.uint8)
    if bits == 8:
        return pack(padded, tile, np.uint8)
    each = 8 // bits
    lanes = padded.reshape(len(padded) // each, each, columns) & ((1 << bits) - 1)
    packed = lanes[:, 0].copy()
    for lane in range(1, each):
        packed |= lanes[:, lane] << (lane * bits)
    by_word = packed.reshape(len(packed) // 4, 4, columns).transpose(0, 2, 1)
    return pack(np.ascontiguousarray(by_word).view(np.uint32)[..., 0], tile, np.uint32)


class Reader:
    """Emits the loads of quantized values, scales and zero points."""

    def __init__(self, f: Kernel, form: QuantizedWeights, tile: Tile) -> None:
        self.f, self.form, self.tile = f, form, tile
        self.lanes = tile.lanes
        lookup = lookup_f32(f.target)
        self.lookup = lookup if lookup and lookup.result.lanes == tile.lanes else None

    @property
    def factor(self) -> float:
        """The factor that `group` leaves to the scale."""
        if self.form.kind == f8e4m3fn:
            return _E4M3_FACTOR
        return 0.5 if self.form.kind == f4e2m1 and self.lookup is None else 1.0

    def group(self, qvalues: Value) -> Iterator[list[Value]]:
        """For each k of the group at an address, the vectors of the tile's columns."""
        f, form, tile = self.f, self.form, self.tile
        if form.bits == 8:
            for k in range(form.group):
                places = [k * tile.columns + v * tile.lanes for v in range(tile.vectors)]
                yield [self._byte(f.load(i8.vector(self.lanes), qvalues, at)) for at in places]
            return
        loaded = [
            f.load(i32.vector(self.lanes), qvalues, v * self.lanes) for v in range(tile.vectors)
        ]
        for k in range(form.group):
            yield [self._narrow(word, k) for word in loaded]

    def _byte(self, qvalues: Value) -> Value:
        f, kind = self.f, self.form.kind
        if kind.is_integer:
            return f.convert(f.convert(qvalues, i32), f32)
        if kind == f8e5m2:  # the upper half of an f16
            wide = f.shl(f.convert(qvalues, i16), 8)
        else:  # the bits of an f16 whose exponent is lower by 8
            wide = f.and_(f.shl(f.convert(qvalues, i16), 7), 0xBF80)
        return f.convert(f.bitcast(wide, f16.vector(self.lanes)), f32)

    def _narrow(self, word: Value, k: int) -> Value:
        """The k-th value of each lane's word."""
        f, bits, kind = self.f, self.form.bits, self.form.kind
        low = word if k == 0 else f.lshr(word, k * bits)
        if self.lookup is not None:
            return self.lookup(f, f.const_vector(f32, decode_table(kind)), low)
        high = f.shl(word, 32 - bits * (k + 1))
        if kind.is_integer:
            return f.convert(f.ashr(high, 32 - bits), f32)
        table = f.const(word.type, _DOUBLED_F4)
        size = f.and_(f.lshr(table, f.shl(f.and_(low, 7), 2)), 15)
        sign = f.and_(high, 1 << 31)
        bits_ = f.or_(f.bitcast(f.convert(size, f32), word.type), sign)
        return f.bitcast(bits_, f32.vector(self.lanes))

    def scale(self, pointer: Value, v: int) -> Value:
        """The scales of the v-th vector of columns times `factor`."""
        f, type_ = self.f, self.form.scale
        held = f.load(type_.vector(self.lanes), pointer, v * self.lanes)
        if type_ is i8:
            wide = f.shl(f.convert(held, i32, False), _EXPONENT_BITS)
            held = f.bitcast(wide, f32.vector(self.lanes))
        found = f.convert(held, f32)
        return found if self.factor == 1 else found * self.factor

    def zero(self, pointer: Value, v: int) -> Value:
        f, type_ = self.f, self.form.zero
        assert type_ is not None
        held = f.load(type_.vector(self.lanes), pointer, v * self.lanes)
        return held if type_ is f32 else f.convert(f.convert(held, i32), f32)


def decode_table(kind: DType) -> list[float]:
    """The lookup table of 4-bit patterns; 2-bit types repeat theirs."""
    qvalues = np.arange(16, dtype=np.uint8) & ((1 << kind.bits) - 1)
    if kind.is_integer:
        half = 1 << (kind.bits - 1)
        return [float((int(q) ^ half) - half) for q in qvalues]
    return [float(number) for number in qvalues.view(kind.numpy).astype(np.float32)]
