"""Dot products of 8-bit integers widened to 16 bits, two at a time, summed exactly in i32.

Where no instruction multiplies groups of four 8-bit values, pmaddwd multiplies pairs of 16-bit
values. Both operands are widened beforehand: weights at compile time, rows by a kernel of their
own,

    a'[line, i] = a[line, i] - zero[line]         0 in the padding

which removes zero points. A difference of two 8-bit values has nine bits, so neither a pair of
products nor its sum overflows 32 bits.

Panels hold [n / columns][k / 2][columns][2].
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Type, Value, i8, i16
from bitwright.backends.cpu.codegen.instr import Instr, dot_s8s8, dot_u8s8, pairs_s16s16
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import load_last_pair, load_pair
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot
from bitwright.target import Target

WIDEN_SIZES = (
    "lines", "oh", "ih", "top", "left", "run", "width", "x_image", "x_line", "zero_line",
)  # fmt: skip


@dataclass(frozen=True)
class Int16Dot(Int8Dot):
    """One instruction per two products and their sum, and one addition."""

    instr: Instr | None = None
    element, group, name = i16, 2, "s16s16s32_pmaddwd"

    def __repr__(self) -> str:
        assert self.instr is not None
        return f"Int16Dot({self.instr.llvm_name}, {self.form})"

    @property
    def unit(self) -> Type:
        return i16.vector(2)

    def load_rhs(self, f: Kernel, w: Value, vectors: int, lanes: int) -> list[Value]:
        width = 2 * lanes
        return [f.load(i16.vector(width), w, v * width, align=2) for v in range(vectors)]

    def load_lhs(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return load_pair(f, i16, row, step, lanes)

    def load_lhs_tail(self, f: Kernel, row: Value, step: Value, count: Value, lanes: int) -> Value:
        return load_last_pair(f, i16, row, step, lanes)

    def multiply_add(self, f: Kernel, lhs: Value, rhs: Value, total: Value) -> Value:
        assert self.instr is not None
        return total + self.instr(f, lhs, rhs)


def int16_dot(target: Target, run: int, offset: bool = False) -> Int16Dot | None:
    """The dot product for rows that are read in runs of this length; None where the target has a
    faster one."""
    pairs = pairs_s16s16(target)
    if pairs is None or dot_u8s8(target) or dot_s8s8(target):
        return None
    return Int16Dot(True, run % 2 != 0, 0, offset, pairs)


def emit_widen(module: Module, name: str, signed: bool) -> Signature:
    """Emits the kernel that widens the lines of images and pads them with zeros.

    `left`, `run` and `width` count elements. `lines` counts the result's lines in all images, `oh`
    in each.
    """
    signature = Signature(("x", "y", "zero"), WIDEN_SIZES)
    with module.kernel(name, signature) as f:
        size = {slot: f.args.size(slot) for slot in WIDEN_SIZES}
        begin, end = f.share(size["lines"])
        with f.loop(begin, end) as loop:
            image = f.udiv(loop.index, size["oh"])
            line = loop.index - image * size["oh"] - size["top"]
            y = f.gep(i16, f.args.pointer("y"), loop.index * size["width"])
            with f.if_(f.ult(line, size["ih"])) as branch:
                x = f.gep(i8, f.args.pointer("x"), image * size["x_image"] + line * size["x_line"])
                zero = f.load(i8, f.args.pointer("zero"), loop.index * size["zero_line"])
                _zeros(f, y, f.index(0), size["left"])
                _widen(f, x, f.gep(i16, y, size["left"]), zero, size["run"], signed)
                _zeros(f, y, size["left"] + size["run"], size["width"])
            with branch.else_():
                _zeros(f, y, f.index(0), size["width"])
    return signature


def _zeros(f: Kernel, y: Value, begin: Value, end: Value) -> None:
    lanes = f.target.lanes(16)
    stop = end - f.urem(end - begin, lanes)
    with f.loop(begin, stop, lanes) as loop:
        f.store(f.const(i16.vector(lanes), 0), y, loop.index, align=2)
    with f.loop(stop, end) as loop:
        f.store(f.const(i16, 0), y, loop.index)


def _widen(f: Kernel, x: Value, y: Value, zero: Value, count: Value, signed: bool) -> None:
    """Widens whole vectors, then the remaining values one by one."""
    lanes = f.target.lanes(16)
    point = f.convert(zero, i16, signed)
    stop = count - f.urem(count, lanes)
    with f.loop(0, stop, lanes) as loop:
        values = f.load(i8.vector(lanes), x, loop.index, align=1)
        wide = f.convert(values, i16, signed) - f.splat(point, lanes)
        f.store(wide, y, loop.index, align=2)
    with f.loop(stop, count) as loop:
        f.store(f.convert(f.load(i8, x, loop.index), i16, signed) - point, y, loop.index)
