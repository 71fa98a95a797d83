"""y[i] = table[index(x[i])], for element types of at most 16 bits and for f32.

    1 byte     the index is its bits: 256 entries
    2 bytes    the index is its bits: 65,536 entries
    f32        the upper half of its bits, with the last bit set if any lower bit is set (sticky)

The index of an f32 distinguishes all rounding and saturation boundaries, ties included, of types
with up to five significant bits: the dropped bits only tell whether x is exactly on a boundary.

Byte-to-byte tables are four vectors, looked up by two-vector permutes where the target has them.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, i8, i16, i32, i64
from bitwright.backends.cpu.codegen.instr import Instr, pick_bytes

WORDS = {1: i8, 2: i16, 4: i32, 8: i64}


def emit_lookup(module: Module, name: str, source: int, target: int) -> Signature:
    """A lookup from elements of `source` bytes (4 is f32) to elements of `target` bytes."""
    signature = Signature(("x", "entries", "y"), ("count",))
    with module.kernel(name, signature) as f:
        if (source, target) == (1, 1) and (pick := pick_bytes(f.target)):
            _emit_bytes(f, pick)
            return signature
        begin, end = f.share(f.args.size("count"), 64)
        with f.loop(begin, end) as loop:
            bits = f.load(WORDS[source], f.args.pointer("x"), loop.index)
            found = f.load(WORDS[target], f.args.pointer("entries"), _index(f, bits))
            f.store(found, f.args.pointer("y"), loop.index)
    return signature


def _emit_bytes(f: Kernel, pick: Instr) -> None:
    """64 bytes at once: seven bits index two vectors, the eighth selects the pair of vectors."""
    lanes = pick.result.lanes
    table = [f.load(pick.result, f.args.pointer("entries"), lanes * i, align=1) for i in range(4)]
    begin, end = f.share(f.args.size("count"), lanes)

    def step(at: Value, mask: Value | None) -> None:
        index = f.load(pick.result, f.args.pointer("x"), at, mask=mask, align=1)
        low, high = pick(f, table[0], index, table[1]), pick(f, table[2], index, table[3])
        found = f.select(f.lt(index, 0), high, low)
        f.store(found, f.args.pointer("y"), at, mask=mask, align=1)

    f.vectors(begin, f.max(begin, end), lanes, step)


def _index(f: Kernel, bits: Value) -> Value:
    if bits.type is i32:
        rest = f.convert(f.ne(f.and_(bits, 0xFFFF), 0), i32, False)
        bits = f.or_(f.lshr(bits, 16), rest)
    return f.convert(bits, i64, False)
