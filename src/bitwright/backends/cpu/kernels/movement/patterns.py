"""Position-dependent results: iota, range, sizes, one_hot, trilu, reverse_sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bitwright.backends.cpu.codegen.emit import Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import computed, f64, i64, storage_type
from bitwright.backends.cpu.codegen.expression import load_computed, to_stored
from bitwright.backends.cpu.kernels.elementwise.loop_nest import emit_loop_nest, pieces, product
from bitwright.backends.cpu.kernels.movement.copy import PIECE_BYTES, WORD, copy_bytes, fill
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, record_fault
from bitwright.ir.dtype import DType


def emit_iota(module: Module, name: str, element: DType) -> Signature:
    """y[i] = i, in the element type."""
    signature = Signature(("y",), ("count",))
    type_ = storage_type(element)
    with module.kernel(name, signature) as f:
        lanes = f.target.lanes(64)
        begin, end = f.share(f.args.size("count"), lanes)

        def body(index: Value, mask: Value | None) -> None:
            counter = f.iota(i64, lanes) + f.splat(index, lanes)
            f.store(f.convert(counter, type_), f.args.pointer("y"), index, mask=mask)

        f.vectors(begin, end, lanes, body)
    return signature


def emit_range(module: Module, name: str, element: DType) -> Signature:
    """y[i] = start + i · delta; floats are computed in f64 and rounded once."""
    signature = Signature(("start", "delta", "y"), ("count",))
    wide = f64 if element.is_float else storage_type(element)
    with module.kernel(name, signature) as f:
        lanes = f.target.lanes(64)
        start, delta = (
            f.convert(load_computed(f, element, 1, f.args.pointer(slot)), wide)
            for slot in ("start", "delta")
        )
        begin, end = f.share(f.args.size("count"), lanes)

        def body(index: Value, mask: Value | None) -> None:
            counter = f.convert(f.iota(i64, lanes) + f.splat(index, lanes), wide)
            value = f.add(f.splat(start, lanes), f.mul(counter, f.splat(delta, lanes)))
            value = to_stored(f, f.convert(value, computed(element)), element)
            f.store(value, f.args.pointer("y"), index, mask=mask)

        f.vectors(begin, end, lanes, body)
    return signature


def emit_sizes(module: Module, name: str, count: int) -> Signature:
    """y[j] = the size in slot v{j}."""
    signature = Signature(("y",), [f"v{j}" for j in range(count)])
    with module.kernel(name, signature) as f, f.if_(f.eq(f.thread, 0)):
        for j in range(count):
            f.store(f.args.size(f"v{j}"), f.args.pointer("y"), j)
    return signature


def emit_one_hot(module: Module, name: str, index: DType, width: int) -> Signature:
    """y[p, d, q] = on where d is the index at [p, q], else off; slots p, d and q."""
    signature = Signature(("i", "values", "y"), ("p", "d", "q"))
    word, type_ = WORD[width], storage_type(index)
    with module.kernel(name, signature) as f:
        depth, inner = f.args.size("d"), f.args.size("q")
        off, on = (f.load(word, f.args.pointer("values"), place) for place in (0, 1))
        begin, end = f.share(f.args.size("p") * inner)

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            at = f.convert(f.load(type_, f.args.pointer("i"), offsets["i"]), i64, index.is_signed)
            if index.is_signed:
                at = f.select(f.lt(at, 0), at + depth, at)
            y = f.gep(word, f.args.pointer("y"), offsets["y"])
            with f.if_(f.eq(inner, 1)) as close:
                fill(f, off, y, depth)
            with close.else_(), f.loop(0, depth) as loop:
                f.store(off, y, loop.index * inner)
            with f.if_(f.ult(at, depth)):
                f.store(on, y, at * inner)

        counts = [f.args.size("p"), inner]
        emit_loop_nest(f, counts, {"i": [inner, 1], "y": [depth * inner, 1]}, begin, end, body)
    return signature


def emit_trilu(
    module: Module, name: str, upper: bool, width: int, diagonal: DType | None
) -> Signature:
    """Rows of matrices with zeros on one side of the diagonal; slots in elements."""
    slots = ("matrices", "rows", "columns", "x0", "x1", *(() if diagonal else ("k",)))
    signature = Signature(("x", "y", *(("k",) if diagonal else ())), slots)
    word = WORD[width]
    with module.kernel(name, signature) as f:
        rows, columns = f.args.size("rows"), f.args.size("columns")
        if diagonal:
            shift = f.convert(f.load(storage_type(diagonal), f.args.pointer("k")), i64)
        else:
            shift = f.args.size("k")
        counts = [f.args.size("matrices"), rows]
        steps = {"x": [f.args.size("x0"), f.args.size("x1")], "y": [rows * columns, columns]}
        begin, end = f.share(product(f, counts))

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            x, y = (f.gep(word, f.args.pointer(o), offsets[o]) for o in "xy")
            # clamp the shift first, because it may be any i64
            reach = f.max(f.min(shift, columns), f.neg(rows))
            cut = coordinates[1] + reach + (0 if upper else 1)
            cut = f.max(f.min(cut, columns), 0)
            start, stop = (cut, columns) if upper else (f.index(0), cut)
            fill(f, f.const(word, 0), y, start)
            source, target = (f.gep(word, pointer, start) for pointer in (x, y))
            copy_bytes(f, source, target, (stop - start) * width)
            fill(f, f.const(word, 0), f.gep(word, y, stop), columns - stop)

        emit_loop_nest(f, counts, steps, begin, end, body)
    return signature


def emit_reverse_sequence(module: Module, name: str, time_axis: int, index: DType) -> Signature:
    """Slots: sizes n0 and n1 of time and batch, in either order; the bytes of a time step."""
    signature = Signature(("x", "lengths", "y", "fault"), ("n0", "n1", "bytes", *FAULT_SLOTS))
    with module.kernel(name, signature) as f:
        size = f.args.size("bytes")
        axes = [f.args.size("n0"), f.args.size("n1")]
        counts = [*axes, pieces(f, size, PIECE_BYTES)]
        strides = [axes[1] * size, size]
        begin, end = f.share(product(f, counts))

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            step, batch = coordinates[time_axis], coordinates[1 - time_axis]
            length = f.convert(f.load(storage_type(index), f.args.pointer("lengths"), batch), i64)
            wrong = f.ugt(length, axes[time_axis])
            with f.if_(wrong):
                record_fault(f, length)
            is_reversed = f.and_(f.lt(step, length), f.not_(wrong))
            place = f.select(is_reversed, length - 1 - step, step)
            x = f.offset(f.args.pointer("x"), offsets["y"] + (place - step) * strides[time_axis])
            y = f.offset(f.args.pointer("y"), offsets["y"])
            copy_bytes(f, x, y, f.min(size - coordinates[2] * PIECE_BYTES, PIECE_BYTES))

        emit_loop_nest(f, counts, {"y": [*strides, PIECE_BYTES]}, begin, end, body)
    return signature
