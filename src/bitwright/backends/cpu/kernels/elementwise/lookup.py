"""y[i] = table[code(x[i])], for element types of at most 16 bits and for f32.

    1 byte     its bits are the code: 256 entries
    2 bytes    its bits are the code: 65,536 entries
    f32        the upper half of its bits, the last of them set if any bit of the lower half is

The code of an f32 tells it from every number that a type of up to five significant bits rounds or
saturates at, ties included: what is cut off can only decide between above and exactly there.

Bytes from bytes take four vectors of entries and an instruction that picks from two of them, where
the target has it.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, i8, i16, i32, i64
from bitwright.backends.cpu.codegen.instr import Instr, pick_bytes

WORDS = {1: i8, 2: i16, 4: i32, 8: i64}


def emit_lookup(module: Module, name: str, source: int, target: int) -> Signature:
    """From elements of `source` bytes (4 is f32) to elements of `target` bytes."""
    signature = Signature(("x", "entries", "y"), ("count",))
    with module.kernel(name, signature) as f:
        if (source, target) == (1, 1) and (pick := pick_bytes(f.target)):
            _emit_bytes(f, pick)
            return signature
        begin, end = f.share(f.args.size("count"), 64)
        with f.loop(begin, end) as loop:
            bits = f.load(WORDS[source], f.args.pointer("x"), loop.index)
            found = f.load(WORDS[target], f.args.pointer("entries"), _code(f, bits))
            f.store(found, f.args.pointer("y"), loop.index)
    return signature


def _emit_bytes(f: Kernel, pick: Instr) -> None:
    """64 bytes at once: seven bits pick from two vectors, the eighth tells which two."""
    lanes = pick.result.lanes
    table = [f.load(pick.result, f.args.pointer("entries"), lanes * i, align=1) for i in range(4)]
    begin, end = f.share(f.args.size("count"), lanes)

    def step(at: Value, mask: Value | None) -> None:
        qvalues = f.load(pick.result, f.args.pointer("x"), at, mask=mask, align=1)
        low, high = pick(f, table[0], qvalues, table[1]), pick(f, table[2], qvalues, table[3])
        found = f.select(f.lt(qvalues, 0), high, low)
        f.store(found, f.args.pointer("y"), at, mask=mask, align=1)

    f.vectors(begin, f.max(begin, end), lanes, step)


def _code(f: Kernel, bits: Value) -> Value:
    if bits.type is i32:
        rest = f.convert(f.ne(f.and_(bits, 0xFFFF), 0), i32, False)
        bits = f.or_(f.lshr(bits, 16), rest)
    return f.convert(bits, i64, False)
