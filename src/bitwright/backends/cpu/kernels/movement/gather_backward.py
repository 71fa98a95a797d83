"""Adds slices up by index: y[b, indices[i], :] += dy[b, i, :], i in ascending order.

    links   head[r] is the first slice of row r, next[i] the one after slice i; -1 ends a chain
    sums    adds up the slices of each row in registers and writes every row once
    direct  slices of one element: zeros y and adds the elements in memory

A thread links the rows of its own range, each sum belongs to one thread, and every chain is in the
order of the indices: threads do not contend, and their number does not change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import computed, i64, storage_type
from bitwright.backends.cpu.codegen.expression import load_computed, to_stored
from bitwright.backends.cpu.kernels.elementwise.loop_nest import pieces
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, checked_index, unless_empty
from bitwright.ir.dtype import DType

GROUP = 8
"""Vectors of a row whose sums are in registers."""
BLOCK = 16
"""Rows per piece of work: few, because some rows have many slices."""
END = -1


def emit_links(module: Module, name: str, index: DType) -> Signature:
    """Slots: m indices, and the size of the indexed axis."""
    signature = Signature(("i", "head", "next", "fault"), ("m", "size", *FAULT_SLOTS))
    with module.kernel(name, signature) as f:
        rows, count = f.args.size("size"), f.args.size("m")
        head, following = f.args.pointer("head"), f.args.pointer("next")
        begin, end = f.share(rows)
        with f.loop(begin, end) as row:
            f.store(f.const(i64, END), head, row.index)

        def link() -> None:
            with f.loop(0, count) as turn:
                at = f.sub(count - 1, turn.index)
                place = _place(f, index, at)
                with f.if_(_is_within(f, place, begin, end)):
                    f.store(f.load(i64, head, place), following, at)
                    f.store(at, head, place)

        unless_empty(f, rows, f.index(0), count, link)
    return signature


def _place(f: Kernel, index: DType, at: Value) -> Value:
    found = f.load(storage_type(index), f.args.pointer("i"), at)
    return checked_index(f, found, f.args.size("size"), index.is_signed)


def _is_within(f: Kernel, place: Value, begin: Value, end: Value) -> Value:
    return f.ult(f.sub(place, begin), f.sub(end, begin))


def emit_sums(module: Module, name: str, element: DType, group: int) -> Signature:
    """Slots: b batches; m slices of dy and `size` rows of y, each of `columns` elements.

    `group` is the number of vectors of a row that are summed together, at most `GROUP`.
    """
    signature = Signature(("dy", "head", "next", "y"), ("b", "m", "size", "columns"))
    with module.kernel(name, signature) as f:
        rows, columns = f.args.size("size"), f.args.size("columns")
        lanes = f.target.lanes(computed(element).bits)
        wide = lanes * group
        blocks, chunks = pieces(f, rows, BLOCK), pieces(f, columns, wide)
        units = f.args.size("b") * blocks * chunks
        # in turn, because neighbouring rows are often alike in their number of slices
        with f.loop(f.thread, units, f.threads) as unit:
            flat = f.udiv(unit.index, chunks)
            column = (unit.index - flat * chunks) * wide
            batch = f.udiv(flat, blocks)
            first = (flat - batch * blocks) * BLOCK
            sums = _RowSums(f, element, lanes, batch, column)
            with f.loop(first, f.min(first + BLOCK, rows)) as row:
                with f.if_(f.le(column + wide, columns)) as whole:
                    sums.write(row.index, [None] * group)
                with whole.else_():
                    left = columns - column
                    masks = [f.mask(left - turn * lanes, lanes) for turn in range(group)]
                    sums.write(row.index, masks)
    return signature


class _RowSums:
    """Sums of a few vectors of the rows of one batch."""

    def __init__(self, f: Kernel, element: DType, lanes: int, batch: Value, column: Value) -> None:
        self.f, self.element, self.lanes = f, element, lanes
        type_, columns = storage_type(element), f.args.size("columns")
        dy = batch * f.args.size("m") * columns + column
        y = batch * f.args.size("size") * columns + column
        self.dy = f.gep(type_, f.args.pointer("dy"), dy)
        self.y = f.gep(type_, f.args.pointer("y"), y)

    def write(self, row: Value, masks: Sequence[Value | None]) -> None:
        """Write the sums of a row; one mask per vector."""
        f, lanes = self.f, self.lanes
        columns = f.args.size("columns")
        zero = f.const(computed(self.element).vector(lanes), 0)
        first = f.load(i64, f.args.pointer("head"), row)
        with f.if_(f.ne(first, END), carry=[zero] * len(masks)) as branch:
            with f.do_while(carry=(first, *[zero] * len(masks))) as chain:
                at, *totals = chain.carried
                offset = at * columns
                found = [
                    load_computed(f, self.element, lanes, self.dy, offset + turn * lanes, mask=mask)
                    for turn, mask in enumerate(masks)
                ]
                following = f.load(i64, f.args.pointer("next"), at)
                sums = [f.add(a, b) for a, b in zip(totals, found, strict=True)]
                chain.next(following, *sums, again=f.ne(following, END))
            branch.next(*chain.results[1:])
        for turn, (total, mask) in enumerate(zip(branch.results, masks, strict=True)):
            value = to_stored(f, total, self.element)
            f.store(value, self.y, row * columns + turn * lanes, mask=mask)


def emit_direct(module: Module, name: str, element: DType, index: DType) -> Signature:
    """Slots: b batches of m elements of dy and of `size` elements of y."""
    signature = Signature(("dy", "i", "y", "fault"), ("b", "m", "size", *FAULT_SLOTS))
    type_ = storage_type(element)
    with module.kernel(name, signature) as f:
        rows, count = f.args.size("size"), f.args.size("m")
        begin, end = f.share(rows, 16)
        lanes = f.target.lanes(type_.bits)

        def add(batch: Value) -> None:
            dy = f.gep(type_, f.args.pointer("dy"), batch * count)
            y = f.gep(type_, f.args.pointer("y"), batch * rows)
            zero = f.const(type_.vector(lanes), 0)
            f.vectors(
                begin, f.max(begin, end), lanes, lambda at, mask: f.store(zero, y, at, mask=mask)
            )
            with f.loop(0, count) as turn:
                place = _place(f, index, turn.index)
                with f.if_(_is_within(f, place, begin, f.max(begin, end))):
                    total = f.add(f.load(type_, y, place), f.load(type_, dy, turn.index))
                    f.store(total, y, place)

        def batches() -> None:
            with f.loop(0, f.args.size("b")) as batch:
                add(batch.index)

        unless_empty(f, rows, f.index(0), f.args.size("b") * count, batches)
    return signature
