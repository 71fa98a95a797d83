"""Transposes the bf16 values of attention for AMX tiles (`kernels.attention.bf16`).

    y[batch][head][feature][key] = v[batch][head][key][feature]

padded with 0. Two neighbouring keys form a 32-bit word, and square tiles of words are transposed in
registers.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import bf16, i16, i32
from bitwright.backends.cpu.kernels.movement.transpose import transposed
from bitwright.backends.cpu.lowering.region import address_of

LANES, KEYS = 16, 32
"""Features and keys of a square tile."""


class ValuePairs:
    """Loads the values of two neighbouring keys as pairs."""

    def __init__(self, f: Kernel, features: int) -> None:
        self.f, self.features = f, features
        width = -(-features // LANES) * LANES
        self.none = f.scratch(bf16, width)
        """A row of zeros, for padding keys."""
        for column in range(0, width, LANES):
            f.store(f.const(bf16.vector(LANES), 0), self.none, column)

    def load(self, rows: tuple[Value, Value], key: Value, end: Value, column: Operand) -> Value:
        """Sixteen features from `column` on of keys `key` and `key` + 1, interleaved; `rows` is
        (address of the first key, stride); 0 from key `end` on."""
        f, (base, step), halves = self.f, rows, []
        mask = None
        if self.features % LANES:
            mask = f.mask(self.features - f.index(column), LANES, 16)
        for number in (key, key + 1):
            row = f.select(f.lt(number, end), f.gep(bf16, base, number * step), self.none)
            halves.append(f.load(i16.vector(LANES), row, column, mask=mask))
        return f.interleave(*halves)


def emit_transposed(module: Module, name: str, features: int) -> Signature:
    """`pitch`: keys of a row of y, a multiple of `KEYS`."""
    strides = [f"{operand}.{axis}" for operand in "vy" for axis in range(3)]
    signature = Signature(("v", "y"), ("batches", "heads", "keys", "pitch", *strides))
    groups = -(-features // LANES)
    with module.kernel(name, signature) as f:
        pairs, heads = ValuePairs(f, features), f.args.size("heads")
        begin, end = f.share(f.args.size("batches") * heads * groups)
        with f.loop(begin, end) as loop:
            rest, group = f.udiv(loop.index, groups), f.urem(loop.index, groups)
            column, index = group * LANES, (f.udiv(rest, heads), f.urem(rest, heads))
            rows = address_of(f, "v", bf16, index), f.args.size("v.2")
            y = address_of(f, "y", bf16, (*index, column))
            with f.loop(0, f.args.size("pitch"), KEYS) as keys:
                words = []
                for n in range(LANES):
                    pair = pairs.load(rows, keys.index + 2 * n, f.args.size("keys"), column)
                    words.append(f.bitcast(pair, i32.vector(LANES)))
                for n, word in enumerate(transposed(f, words)):
                    line = f.gep(bf16, y, f.args.size("y.2") * n)
                    f.store(word, f.gep(bf16, line, keys.index), align=2)
    return signature
