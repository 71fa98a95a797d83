"""Emulations of half-precision and int8 dot product instructions, for tests on any machine."""

import pytest

from bitwright.backends.cpu.codegen.emit import f32, i8, i32
from bitwright.backends.cpu.codegen.instr import dot_u8s8
from bitwright.target import host

wide_vectors = pytest.mark.skipif(host().lanes(32) != 16, reason="a tile's row is one vector")


class StandIn:
    """An emulation of vdpbf16ps."""

    llvm_name = "stand-in"

    def __call__(self, f, total, a, b):
        pairs = [f.bitcast(x, i32.vector(total.type.lanes)) for x in (a, b)]
        for half in (lambda x: f.and_(x, -0x10000), lambda x: f.shl(x, 16)):  # the odd one first
            left, right = (f.bitcast(half(pair), f32.vector(total.type.lanes)) for pair in pairs)
            total = f.fma(left, right, total)
        return total


class SlowTiles:
    """An emulation of AMX tiles in memory."""

    def __repr__(self):
        return "slow"

    def __init__(self, multiply, sum_type=f32):
        self.multiply, self.type = multiply, sum_type.vector(16)

    def zeros(self, f):
        return self._tile(f, lambda row: f.const(self.type, 0))

    def sums(self, f, pointer, stride):
        return self._tile(f, lambda row: f.load(self.type, f.offset(pointer, stride * row)))

    def _tile(self, f, line):
        buffer = f.scratch(self.type, 16)
        with f.loop(0, 16, nonempty=True) as loop:
            f.store(line(loop.index), buffer, loop.index * 16)
        return [buffer]

    def read(self, f, pointer, stride):
        return pointer, stride

    def dot(self, f, total, a, b):
        with f.loop(0, 16, nonempty=True) as rows, f.loop(0, 16, nonempty=True) as steps:
            row = f.offset(a[0], a[1] * rows.index)
            part = f.load(i32.vector(16), f.offset(b[0], b[1] * steps.index), align=2)
            pair = f.splat(f.load(i32, row, steps.index, align=2), 16)
            held = f.load(self.type, total[0], rows.index * 16)
            f.store(self.multiply(f, held, pair, part), total[0], rows.index * 16)
        return total

    def write(self, f, total, pointer, stride):
        with f.loop(0, 16, nonempty=True) as loop:
            line = f.load(self.type, total[0], loop.index * 16)
            f.store(line, f.offset(pointer, stride * loop.index))


def dot_u8s8_stand_in(f, total, a, b):
    parts = (f.bitcast(x, i8.vector(64)) for x in (a, b))
    return dot_u8s8(f.target)(f, total, *parts)
