"""cache[slot[i], h, position[i], :] = new[i, h, :], rounded to the type of the cache.

A cache in i8 gets q = rint(x 127 / peak) and the scale peak / 127 of each token and head, as
`ops.quant.int8_attention.quantize_rows` computes them.

A position belongs to one thread, which writes its rows in order: of rows with the same place, the
last one stays.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, f32, i8, i32, i64
from bitwright.backends.cpu.codegen.emit.types import storage_type
from bitwright.backends.cpu.codegen.expression import load_computed, to_stored
from bitwright.backends.cpu.kernels.movement import fault as faults
from bitwright.ir.dtype import DType
from bitwright.ir.dtype import i8 as quantized
from bitwright.ops.quant.block_formats import TINY

_INFINITY = 0x7F800000


def checked_place(f: Kernel, name: str, index: DType, row: Value, size: Value) -> Value:
    """The slot or position of a row; 0 and a fault if it is out of range."""
    place, outside = _place(f, name, index, row, size)
    return f.select(outside, 0, place)


def _place(f: Kernel, name: str, index: DType, row: Value, size: Value) -> tuple[Value, Value]:
    """The slot or position of a row, and whether it is out of range, which is a fault."""
    found = f.load(storage_type(index), f.args.pointer(name), row)
    place = f.convert(found, i64, index.is_signed)
    outside = f.uge(place, size)
    with f.if_(outside):
        faults.record_fault(f, place)
    return place, outside


def emit_kv_write(
    module: Module, name: str, source: DType, element: DType, slot: DType, position: DType
) -> Signature:
    """Slots: the cache and its scale, new, slot, position; sizes, and strides of new."""
    scaled = element == quantized
    signature = Signature(
        ("y", "new", "slot", "position", "fault", *(("scale",) if scaled else ())),
        ("rows", "heads", "slots", "context", "features", "new.0", "new.1", *faults.FAULT_SLOTS),
    )
    with module.kernel(name, signature) as f:
        heads, features = f.args.size("heads"), f.args.size("features")
        slots, context = f.args.size("slots"), f.args.size("context")
        with f.loop(0, f.args.size("rows")) as row:
            into, no_slot = _place(f, "slot", slot, row.index, slots)
            token, no_position = _place(f, "position", position, row.index, context)
            is_own = f.eq(f.urem(token, f.threads), f.thread)
            is_written = f.and_(is_own, f.not_(f.or_(no_slot, no_position)))
            with f.if_(is_written), f.loop(0, heads) as head:  # other tokens stay
                at = (into * heads + head.index) * context + token
                offset = row.index * f.args.size("new.0") + head.index * f.args.size("new.1")
                new = f.gep(storage_type(source), f.args.pointer("new"), offset)
                y = f.gep(storage_type(element), f.args.pointer("y"), at * features)
                if scaled:
                    scale = f.gep(f32, f.args.pointer("scale"), at)
                    _write_quantized(f, source, new, y, scale, features)
                else:
                    _write_converted(f, source, element, new, y, features)
    return signature


def _write_converted(
    f: Kernel, source: DType, element: DType, new: Value, y: Value, features: Value
) -> None:
    lanes = f.target.lanes(32)

    def body(index: Value, mask: Value | None) -> None:
        x = load_computed(f, source, lanes, new, index, mask=mask)
        f.store(to_stored(f, x, element), y, index, mask=mask)

    f.vectors(0, features, lanes, body)


def _write_quantized(
    f: Kernel, source: DType, new: Value, y: Value, scale: Value, features: Value
) -> None:
    lanes = f.target.lanes(32)
    words = i32.vector(lanes)

    def find(index: Value, mask: Value | None, peak: Value) -> list[Value]:
        x = f.convert(load_computed(f, source, lanes, new, index, mask=mask), f32)
        return [f.max(peak, f.and_(f.bitcast(x, words), 0x7FFFFFFF))]

    (peaks,) = f.vectors(0, features, lanes, find, [f.const(words, 0)])
    peak = f.reduce(peaks, lambda a, b: f.max(a, b))
    number, finite = f.bitcast(peak, f32), f.lt(peak, _INFINITY)
    is_used = f.and_(finite, f.ge(peak, int(TINY.view("uint32"))))
    inverse = f.select(is_used, f.div(f.const(f32, 127.0), number), 0.0)
    f.store(f.select(finite, f.div(number, 127.0), float("nan")), scale)
    factor = f.splat(inverse, lanes)

    def write(index: Value, mask: Value | None) -> None:
        x = f.convert(load_computed(f, source, lanes, new, index, mask=mask), f32)
        q = f.round_to_int(x * factor)
        f.store(f.convert(q, i8), y, index, mask=mask)

    f.vectors(0, features, lanes, write)
