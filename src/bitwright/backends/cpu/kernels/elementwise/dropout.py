"""Dropout: the hash of `ops.math.dropout` in vectors, and a selection."""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Module, Signature, Value, i32, i64
from bitwright.backends.cpu.codegen.emit.types import computed
from bitwright.backends.cpu.codegen.expression import load_computed, to_stored
from bitwright.ir.dtype import DType
from bitwright.ops.math import dropout


def emit_dropout(module: Module, name: str, element: DType, rate: float) -> Signature:
    """y[i] = x[i] · scale where the hash of key and i is large enough, else 0."""
    signature = Signature(("x", "key", "y"), ("count",))
    scalar = computed(element)
    with module.kernel(name, signature) as f:
        lanes = f.target.lanes(scalar.bits)
        key = f.load(i64, f.args.pointer("key"))
        low, high = (f.splat(f.convert(part, i32), lanes) for part in (key, f.lshr(key, 32)))
        begin, end = f.share(f.args.size("count"), 64)

        def body(at: Value, mask: Value | None) -> None:
            position = f.iota(i32, lanes) + f.splat(f.convert(at, i32), lanes)
            h = position * dropout.SPREAD + low
            h = (h ^ f.lshr(h, 16)) * dropout.FIRST ^ high
            h = (h ^ f.lshr(h, 13)) * dropout.SECOND
            h = h ^ f.lshr(h, 16)
            stays = f.ge(f.lshr(h, 32 - dropout.BITS), dropout.threshold(rate))
            x = load_computed(f, element, lanes, f.args.pointer("x"), at, mask=mask)
            y = f.select(stays, x * dropout.scale(rate), 0.0)
            f.store(to_stored(f, y, element), f.args.pointer("y"), at, mask=mask)

        f.vectors(begin, f.max(begin, end), lanes, body)
    return signature
