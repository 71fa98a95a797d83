"""Products of 8-bit codes as 16-bit numbers, two at a time, summed exactly in i32.

Where no instruction multiplies four codes, one multiplies two 16-bit numbers (pmaddwd), and both
operands are widened before the product instead of within it: weights when the program is made, rows
by a step of its own,

    a'[line, i] = a[line, i] - zero[line]         0 where there is nothing to read

so that zero points are gone and padding is 0. A difference of two codes has nine bits: neither a
pair of products nor its sum can leave 32.

Panels hold [n / columns][k / 2][columns][2].
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Type, Value, i8, i16
from bitwright.backends.cpu.codegen.instr import Instr, dot_s8s8, dot_u8s8, pairs_s16s16
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import half_a_pair, pair
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot
from bitwright.target import Target

WIDEN_SIZES = (
    "lines", "oh", "ih", "top", "left", "run", "width", "x_image", "x_line", "zero_line",
)  # fmt: skip


@dataclass(frozen=True)
class Words(Int8Dot):
    """Two products and their sum are one instruction, adding them another."""

    pairs: Instr | None = None
    element, group = i16, 2

    def __repr__(self) -> str:
        assert self.pairs is not None
        return f"Words({self.pairs.llvm_name}, {self.form})"

    @property
    def unit(self) -> Type:
        return i16.vector(2)

    def panel(self, f: Kernel, w: Value, vectors: int, lanes: int) -> list[Value]:
        width = 2 * lanes
        return [f.load(i16.vector(width), w, v * width, align=2) for v in range(vectors)]

    def number(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return pair(f, i16, row, step, lanes)

    def rest(self, f: Kernel, row: Value, step: Value, count: Value, lanes: int) -> Value:
        return half_a_pair(f, i16, row, step, lanes)

    def multiply(self, f: Kernel, number: Value, part: Value, total: Value) -> Value:
        assert self.pairs is not None
        return total + self.pairs(f, number, part)


def words(target: Target, run: int, offset: bool = False) -> Words | None:
    """For rows that are read in runs of this length; None where another way is better."""
    pairs = pairs_s16s16(target)
    if pairs is None or dot_u8s8(target) or dot_s8s8(target):
        return None
    return Words(True, run % 2 != 0, 0, offset, pairs)


def emit_widen(module: Module, name: str, signed: bool) -> Signature:
    """Lines of images, with padding around them; `left`, `run` and `width` count elements, and
    `lines` are those of the result in all images, `oh` in each."""
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
                code = f.load(i8, f.args.pointer("zero"), loop.index * size["zero_line"])
                _zeros(f, y, f.index(0), size["left"])
                _widened(f, x, f.gep(i16, y, size["left"]), code, size["run"], signed)
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


def _widened(f: Kernel, x: Value, y: Value, zero: Value, count: Value, signed: bool) -> None:
    """Vectors of codes, then what is left one by one."""
    lanes = f.target.lanes(16)
    point = f.convert(zero, i16, signed)
    stop = count - f.urem(count, lanes)
    with f.loop(0, stop, lanes) as loop:
        qvalues = f.load(i8.vector(lanes), x, loop.index, align=1)
        wide = f.convert(qvalues, i16, signed) - f.splat(point, lanes)
        f.store(wide, y, loop.index, align=2)
    with f.loop(stop, count) as loop:
        f.store(f.convert(f.load(i8, x, loop.index), i16, signed) - point, y, loop.index)
