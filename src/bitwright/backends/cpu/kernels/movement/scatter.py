"""Scatters slices or elements into a copy of x by an index tensor.

    scatter           y[indices[m], :] = updates[m, :], with tuples of indices
    scatter_elements  y[…, j] = updates[…, j], with indices[…, j] as the coordinate on one axis of y
    tensor_scatter    y[b, :, start[b] + c, :] = update[b, :, c, :], a run of rows of a cache

Updates of one position are applied in order, by one thread: threads divide the columns of slices,
or the lines along the axis, never the updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import i64, storage_type
from bitwright.backends.cpu.codegen.expression import from_stored, to_stored
from bitwright.backends.cpu.kernels.elementwise.loop_nest import emit_loop_nest, pieces, product
from bitwright.backends.cpu.kernels.movement import fault as faults
from bitwright.backends.cpu.kernels.movement.copy import PIECE_BYTES, copy_bytes
from bitwright.backends.cpu.kernels.movement.gather import PIECE, IndexTuples
from bitwright.ir.dtype import DType

CHUNK = 64
"""The minimum number of columns per thread."""


def combine(f: Kernel, reduction: str, old: Value, new: Value, element: DType) -> Value:
    """The reduction of two stored values, in the computed type."""
    a, b = from_stored(f, old, element), from_stored(f, new, element)
    if reduction in ("max", "min"):
        both = getattr(f, reduction)(a, b, element.is_signed)
    else:
        both = f.add(a, b) if reduction == "add" else f.mul(a, b)
    return to_stored(f, both, element)


def emit_scatter(
    module: Module, name: str, count: int, index: DType, element: DType, reduction: str
) -> Signature:
    """Slots: m tuples, the columns of a slice; sizes and strides of the indexed axes."""
    tuples = IndexTuples(count, index)
    signature = Signature(
        ("y", "i", "u", "fault"), ("m", "columns", *tuples.slots, *faults.FAULT_SLOTS)
    )
    type_ = storage_type(element)
    with module.kernel(name, signature) as f:
        columns = f.args.size("columns")
        begin, end = f.share(columns, CHUNK)
        end = f.select(f.gt(f.args.size("m"), 0), end, begin)

        def update() -> None:
            with f.if_(f.lt(begin, end)), f.loop(0, f.args.size("m")) as loop:
                address = f.gep(storage_type(index), f.args.pointer("i"), loop.index * count)
                place = tuples.offset(f, address) + begin
                y = f.gep(type_, f.args.pointer("y"), place)
                u = f.gep(type_, f.args.pointer("u"), loop.index * columns + begin)
                _write_row(f, y, u, end - begin, element, reduction)

        faults.unless_empty(f, tuples.position_count(f), begin, end, update)
    return signature


def _write_row(f: Kernel, y: Value, u: Value, count: Value, element: DType, reduction: str) -> None:
    type_ = storage_type(element)
    if reduction == "none":
        copy_bytes(f, u, y, count * type_.bytes)
        return
    lanes = f.target.lanes(max(type_.bits, 32))

    def body(index: Value, mask: Value | None) -> None:
        vector = type_.vector(lanes)
        old, new = (f.load(vector, pointer, index, mask=mask) for pointer in (y, u))
        f.store(combine(f, reduction, old, new, element), y, index, mask=mask)

    f.vectors(0, count, lanes, body)


def emit_scatter_elements(
    module: Module, name: str, rank: int, index: DType, element: DType, reduction: str
) -> Signature:
    """Slots: sizes n of the updates; strides y, i, u; the size of the axis in y.

    The last axis is the indexed one, after a transpose; at least one axis precedes it.
    """
    slots = [f"{letter}{axis}" for letter in "nyiu" for axis in range(rank)]
    signature = Signature(("y", "i", "u", "fault"), (*slots, "size", *faults.FAULT_SLOTS))
    type_ = storage_type(element)
    with module.kernel(name, signature) as f:
        *outer, columns, turns = (f.args.size(f"n{axis}") for axis in range(rank))
        strides = {o: [f.args.size(f"{o}{axis}") for axis in range(rank)] for o in "yiu"}
        steps = {o: [*strides[o][:-2], strides[o][-2] * PIECE] for o in "yiu"}
        counts = [*outer, pieces(f, columns, PIECE)]
        size = f.args.size("size")
        begin, end = f.share(product(f, counts))
        end = f.select(f.gt(turns, 0), end, begin)

        def write(y: Value, i: Value, u: Value) -> None:
            found = f.load(storage_type(index), f.args.pointer("i"), i)
            place = faults.checked_index(f, found, size, index.is_signed) * strides["y"][-1] + y
            value = f.load(type_, f.args.pointer("u"), u)
            if reduction != "none":
                old = f.load(type_, f.args.pointer("y"), place)
                value = combine(f, reduction, old, value, element)
            f.store(value, f.args.pointer("y"), place)

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            count = f.min(columns - coordinates[-1] * PIECE, PIECE)
            with f.loop(0, turns) as turn, f.loop(0, count) as loop:
                i, u = (
                    offsets[o] + turn.index * strides[o][-1] + loop.index * strides[o][-2]
                    for o in "iu"
                )
                write(offsets["y"] + loop.index * strides["y"][-2], i, u)

        faults.unless_empty(
            f, size, begin, end, lambda: emit_loop_nest(f, counts, steps, begin, end, body)
        )
    return signature


def emit_tensor_scatter(module: Module, name: str, index: DType | None, mode: str) -> Signature:
    """Slots: b batches, m slices, c rows of `bytes` bytes; `room` in rows; strides in bytes.

    A batch whose rows do not fit is unchanged, and a fault is recorded.
    """
    strides = tuple(f"{operand}{axis}" for operand in "yu" for axis in "bmc")
    signature = Signature(
        ("y", "u", *(("i",) if index else ()), "fault"),
        ("b", "m", "c", "bytes", "room", *strides, *faults.FAULT_SLOTS),
    )
    with module.kernel(name, signature) as f:
        rows, size, room = (f.args.size(slot) for slot in ("c", "bytes", "room"))
        counts = [f.args.size("b"), f.args.size("m"), rows, pieces(f, size, PIECE_BYTES)]
        steps: dict[str, list[Operand]] = {
            "y": [*(f.args.size(f"y{axis}") for axis in "bm"), 0, PIECE_BYTES],
            "u": [*(f.args.size(f"u{axis}") for axis in "bmc"), PIECE_BYTES],
        }

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            start = f.index(0)
            if index:
                start = f.convert(
                    f.load(storage_type(index), f.args.pointer("i"), coordinates[0]), i64
                )
            wrong = f.or_(f.lt(start, 0), f.gt(rows, room))
            if mode == "linear":
                wrong = f.or_(wrong, f.gt(start, room - rows))
            with f.if_(wrong) as branch:
                faults.record_fault(f, start)
            with branch.else_():
                place = start + coordinates[2]
                place = f.urem(place, room) if mode == "circular" else place
                y = f.offset(f.args.pointer("y"), offsets["y"] + place * f.args.size("yc"))
                u = f.offset(f.args.pointer("u"), offsets["u"])
                copy_bytes(f, u, y, f.min(size - coordinates[3] * PIECE_BYTES, PIECE_BYTES))

        begin, end = f.share(product(f, counts))
        emit_loop_nest(f, counts, steps, begin, end, body)
    return signature
