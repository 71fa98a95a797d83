"""Copies between two strided views of one shape, by the strides of the innermost axis.

    contiguous  stride 1 on both sides: rows of bytes, for any element type
    fill        source stride 0: one element fills a row
    strided     any strides: element by element
    transpose   target stride 1, source stride 1 on another axis: square tiles in registers

Sizes and strides are slots (n, x or y and the axis number), so a kernel is specialized for a form,
a rank and, except for `contiguous`, an element width. Work is split into pieces of equal size for
the threads, independent of the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bitwright.backends.cpu.codegen.emit import Function, Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import Type, i8, i16, i32, i64
from bitwright.backends.cpu.kernels.elementwise.loop_nest import emit_loop_nest, pieces, product
from bitwright.backends.cpu.kernels.movement.transpose import transposed

WORD = {1: i8, 2: i16, 4: i32, 8: i64}
"""The integer type of an element with this many bytes."""
PIECE_BYTES = 16384
BLOCK = 128
"""Side of the blocks of a transpose, in elements: few TLB misses, and both sides of a block fit the
second-level cache."""
ALIGN_FROM = 16
"""Rows of at least this many vectors have their stores aligned."""
AHEAD_BYTES = 128
"""Prefetch distance of a transpose, ahead of its stores."""
Row = Callable[[Value, Value, Value], None]


def emit_run(module: Module, name: str, rank: int) -> Signature:
    """Rows of bytes; all sizes and strides are in bytes."""
    return _emit_rows(module, name, rank, i8, 1, 1, lambda f: lambda *row: copy_bytes(f, *row))


def emit_fill(module: Module, name: str, rank: int, width: int) -> Signature:
    word = WORD[width]

    def filled(f: Kernel) -> Row:
        return lambda x, y, count: fill(f, f.load(word, x), y, count)

    return _emit_rows(module, name, rank, word, 0, 1, filled)


def emit_strided(module: Module, name: str, rank: int, width: int) -> Signature:
    word = WORD[width]

    def stepped(f: Kernel) -> Row:
        x_step, y_step = (f.args.size(f"{operand}{rank - 1}") for operand in "xy")
        return lambda x, y, count: copy_strided(f, word, (x, x_step), (y, y_step), count)

    return _emit_rows(module, name, rank, word, None, None, stepped)


def _emit_rows(
    module: Module,
    name: str,
    rank: int,
    word: Type,
    x_step: int | None,
    y_step: int | None,
    make_row: Callable[[Kernel], Row],
) -> Signature:
    """A kernel over pieces of rows; strides within a row that are not known are slots."""
    known = {f"x{rank - 1}": x_step, f"y{rank - 1}": y_step}
    slots = [f"{letter}{axis}" for letter in "nxy" for axis in range(rank)]
    signature = Signature("xy", [slot for slot in slots if known.get(slot) is None])
    piece = PIECE_BYTES // word.bytes
    with module.kernel(name, signature) as f:
        row = make_row(f)

        def slot(name: str) -> Operand:
            found = known.get(name)
            return f.args.size(name) if found is None else found

        sizes = [f.args.size(f"n{axis}") for axis in range(rank)]
        strides = {o: [slot(f"{o}{axis}") for axis in range(rank)] for o in "xy"}
        steps = {o: [*strides[o][:-1], strides[o][-1] * piece] for o in "xy"}
        counts = [*sizes[:-1], pieces(f, sizes[-1], piece)]
        begin, end = f.share(product(f, counts))

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            x, y = (f.gep(word, f.args.pointer(o), offsets[o]) for o in "xy")
            row(x, y, f.min(sizes[-1] - coordinates[-1] * piece, piece))

        emit_loop_nest(f, counts, steps, begin, end, body)
    return signature


# rows


def copy_bytes(f: Function, x: Value, y: Value, count: Value) -> None:
    """Copy any number of bytes in whole vectors; the last one may overlap the one before."""
    size = f.target.vector_bytes
    vector = i8.vector(size)
    with f.if_(f.ge(count, size)) as long:
        f.store(f.load(vector, x), y)
        # a long row continues at an aligned target address: stores across cache lines are slower
        head = f.and_(f.neg(f.emit(i64, f"ptrtoint ptr {y.text} to i64")), size - 1)
        start = f.select(f.ge(count, ALIGN_FROM * size), head, 0)
        whole = start + f.and_(count - start, -4 * size)
        with f.loop(start, whole, 4 * size) as loop:
            at = [loop.index + turn * size for turn in range(4)]
            for place, value in [(place, f.load(vector, x, place)) for place in at]:
                f.store(value, y, place)
        last = count - size
        with f.loop(whole, last, size) as loop:
            f.store(f.load(vector, x, loop.index), y, loop.index)
        f.store(f.load(vector, x, last), y, last)
    with long.else_():
        _copy_few(f, x, y, count, size // 2)


def _copy_few(f: Function, x: Value, y: Value, count: Value, size: int) -> None:
    """Copy fewer than 2 * size bytes: two vectors of a fitting size, which may overlap."""
    if size == 1:
        with f.if_(f.gt(count, 0)):
            f.store(f.load(i8, x), y)
        return
    with f.if_(f.ge(count, size)) as fits:
        last = count - size
        first, second = f.load(i8.vector(size), x), f.load(i8.vector(size), x, last)
        f.store(first, y)
        f.store(second, y, last)
    with fits.else_():
        _copy_few(f, x, y, count, size // 2)


def fill(f: Function, value: Value, y: Value, count: Value) -> None:
    """Write one element `count` times."""
    lanes = f.target.lanes(value.type.bits)
    vector = f.splat(value, lanes)
    with f.if_(f.ge(count, lanes)) as long:
        last = count - lanes
        with f.loop(0, last, lanes) as loop:
            f.store(vector, y, loop.index)
        f.store(vector, y, last)
    with long.else_(), f.loop(0, count) as loop:
        f.store(value, y, loop.index)


def copy_strided(
    f: Function, word: Type, x: tuple[Value, Operand], y: tuple[Value, Operand], count: Value
) -> None:
    """Copy element by element; each side is a pointer and a stride."""
    unroll = 4
    whole = f.and_(count, -unroll)

    def move(index: Value) -> None:
        f.store(f.load(word, x[0], index * x[1]), y[0], index * y[1])

    with f.loop(0, whole, unroll) as loop:
        for turn in range(unroll):
            move(loop.index + turn)
    with f.loop(whole, count) as loop:
        move(loop.index)


# transposes


def emit_transpose(module: Module, name: str, rank: int, width: int, lanes: int) -> Signature:
    """The last axis but one is contiguous in x, the last in y; tiles have sides of `lanes`."""
    close = (f"x{rank - 2}", f"y{rank - 1}")
    slots = [f"{letter}{axis}" for letter in "nxy" for axis in range(rank)]
    signature = Signature("xy", [slot for slot in slots if slot not in close])
    word, block = WORD[width], BLOCK
    with module.kernel(name, signature) as f:
        *outer, rows, columns = (f.args.size(f"n{axis}") for axis in range(rank))
        strides: dict[str, list[Operand]] = {
            o: [*(f.args.size(f"{o}{axis}") for axis in range(rank - 2)), 0, 0] for o in "xy"
        }
        x_step, y_step = f.args.size(f"x{rank - 1}"), f.args.size(f"y{rank - 2}")
        counts = [*outer, pieces(f, rows, block), pieces(f, columns, block)]
        begin, end = f.share(product(f, counts))

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            x, y = (f.gep(word, f.args.pointer(o), offsets[o]) for o in "xy")
            first = (coordinates[-2] * block, rows), (coordinates[-1] * block, columns)
            _transpose_block(f, (x, x_step), (y, y_step), *first, word.vector(lanes))

        emit_loop_nest(f, counts, strides, begin, end, body)
    return signature


def _transpose_block(
    f: Function,
    x: tuple[Value, Value],
    y: tuple[Value, Value],
    rows: tuple[Value, Value],
    columns: tuple[Value, Value],
    vector: Type,
) -> None:
    """Transpose one block; rows and columns are (start, size), x and y are (pointer, stride).

    If both axes are at least as long as a tile, the last tile of an axis ends at the axis' end and
    overlaps the tile before it.
    """
    lanes, word = vector.lanes, vector.scalar
    stops = [f.min(start + BLOCK, size) for start, size in (rows, columns)]
    with f.if_(f.and_(f.ge(rows[1], lanes), f.ge(columns[1], lanes))) as tiles:
        first, second = (f.min(start, size - lanes) for start, size in (rows, columns))
        # inner loop along the target: consecutive tiles complete a cache line
        with f.loop(first, stops[0], lanes, nonempty=True) as outer:
            row = f.min(outer.index, stops[0] - lanes)
            with f.loop(second, stops[1], lanes, nonempty=True) as inner:
                column = f.min(inner.index, stops[1] - lanes)
                _transpose_tile(f, x, y, row, column, vector)
    with tiles.else_():
        # the longer axis is the inner loop
        swap = f.lt(rows[1], columns[1])
        starts = [f.select(swap, b, a) for a, b in ((rows[0], columns[0]), (columns[0], rows[0]))]
        ends = [f.select(swap, b, a) for a, b in ((stops[0], stops[1]), (stops[1], stops[0]))]
        x_steps = [f.select(swap, x[1], 1), f.select(swap, 1, x[1])]
        y_steps = [f.select(swap, 1, y[1]), f.select(swap, y[1], 1)]
        with f.loop(starts[1], ends[1]) as outer:
            x_row = f.gep(word, x[0], outer.index * x_steps[1] + starts[0] * x_steps[0])
            y_row = f.gep(word, y[0], outer.index * y_steps[1] + starts[0] * y_steps[0])
            copy_strided(f, word, (x_row, x_steps[0]), (y_row, y_steps[0]), ends[0] - starts[0])


def _transpose_tile(
    f: Function,
    x: tuple[Value, Value],
    y: tuple[Value, Value],
    row: Value,
    column: Value,
    vector: Type,
) -> None:
    lanes = vector.lanes
    x_start = f.gep(vector, x[0], column * x[1] + row)
    y_start = f.gep(vector, y[0], row * y[1] + column)
    if vector.bytes > 1:  # rows of single bytes share cache lines with the next tiles
        ahead = f.offset(y_start, AHEAD_BYTES)
        for turn in range(lanes):
            f.prefetch(f.gep(vector, ahead, y[1] * turn) if turn else ahead, write=True)
    loaded = [f.load(vector, x_start, x[1] * turn if turn else 0) for turn in range(lanes)]
    for turn, value in enumerate(transposed(f, loaded)):
        f.store(value, y_start, y[1] * turn if turn else 0)
