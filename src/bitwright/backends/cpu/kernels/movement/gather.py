"""Gathers slices or elements by an index tensor.

    gather           y[b, m, :] = x[b, indices[b, m], :], with one index or a tuple of indices
    gather_elements  y[…, j] = x[…, j] with the coordinate on one axis replaced by indices[…, j]

Slices are copied as bytes; slices of one element are copied as elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Operand, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import storage_type
from bitwright.backends.cpu.kernels.elementwise.loop_nest import emit_loop_nest, pieces, product
from bitwright.backends.cpu.kernels.movement.copy import PIECE_BYTES, WORD, copy_bytes
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, checked_index, unless_empty
from bitwright.ir.dtype import DType

PIECE = 1024
"""Elements per piece of work."""


class IndexTuples:
    """IndexTuples of indices on `count` axes; axis j has size n{j} and stride s{j}."""

    def __init__(self, count: int, index: DType) -> None:
        self.count, self.index = count, index
        self.slots = tuple(f"{letter}{j}" for letter in "ns" for j in range(count))

    def offset(self, f: Kernel, address: Value) -> Value:
        """The offset that the tuple at this address selects, in units of the strides."""
        total: Operand = 0
        for j in range(self.count):
            index = f.load(storage_type(self.index), address, j)
            place = checked_index(f, index, f.args.size(f"n{j}"), self.index.is_signed)
            total = place * f.args.size(f"s{j}") + total
        return f.index(total)

    def position_count(self, f: Kernel) -> Value:
        """The number of addressable positions."""
        return product(f, [f.args.size(f"n{j}") for j in range(self.count)])


def emit_gather(module: Module, name: str, count: int, index: DType, width: int) -> Signature:
    """Slots: b batches of m tuples; batch strides x_b and i_b; the bytes of a slice.

    The tuples of a batch and the slices of the result are contiguous. `width` is the element size
    if a slice is one element, else 0; strides of x are then in elements, else in bytes.
    """
    tuples = IndexTuples(count, index)
    sizes = ("b", "m", "x_b", "i_b", *tuples.slots, *(() if width else ("bytes",)), *FAULT_SLOTS)
    signature = Signature(("x", "i", "y", "fault"), sizes)
    with module.kernel(name, signature) as f:
        batches, rows = f.args.size("b"), f.args.size("m")
        inner = PIECE if width else 1
        counts = [batches, pieces(f, rows, inner)]
        if not width:
            counts.append(pieces(f, f.args.size("bytes"), PIECE_BYTES))
        rest = [0] * (len(counts) - 2)
        steps: dict[str, list[Operand]] = {
            "x": [f.args.size("x_b"), 0, *rest],
            "i": [f.args.size("i_b"), inner * count, *rest],
            "y": [rows, inner, *rest],
        }
        begin, end = f.share(product(f, counts))

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            tuple_address = f.gep(storage_type(index), f.args.pointer("i"), offsets["i"])
            if width:
                _elements(f, tuples, tuple_address, coordinates[1], offsets, width)
            else:
                _slice(f, tuples, tuple_address, coordinates[2], offsets)

        unless_empty(
            f,
            tuples.position_count(f),
            begin,
            end,
            lambda: emit_loop_nest(f, counts, steps, begin, end, body),
        )
    return signature


def _elements(
    f: Kernel,
    tuples: IndexTuples,
    address: Value,
    piece: Value,
    offsets: Mapping[str, Value],
    width: int,
) -> None:
    word = WORD[width]
    x = f.gep(word, f.args.pointer("x"), offsets["x"])
    y = f.gep(word, f.args.pointer("y"), offsets["y"])
    with f.loop(0, f.min(f.args.size("m") - piece * PIECE, PIECE)) as loop:
        row = f.gep(storage_type(tuples.index), address, loop.index * tuples.count)
        f.store(f.load(word, x, tuples.offset(f, row)), y, loop.index)


def _slice(
    f: Kernel, tuples: IndexTuples, address: Value, piece: Value, offsets: Mapping[str, Value]
) -> None:
    size = f.args.size("bytes")
    start = piece * PIECE_BYTES
    x = f.offset(f.args.pointer("x"), offsets["x"] + tuples.offset(f, address) + start)
    y = f.offset(f.args.pointer("y"), offsets["y"] * size + start)
    copy_bytes(f, x, y, f.min(size - start, PIECE_BYTES))


def emit_gather_elements(
    module: Module, name: str, rank: int, index: DType, width: int
) -> Signature:
    """Slots: sizes n of the indices; strides x, i, y; size and stride of the axis in x.

    The stride of x is 0 on the axis that the indices replace.
    """
    slots = [f"{letter}{axis}" for letter in "nxiy" for axis in range(rank)]
    signature = Signature(("x", "i", "y", "fault"), (*slots, "size", "stride", *FAULT_SLOTS))
    word = WORD[width]
    with module.kernel(name, signature) as f:
        sizes = [f.args.size(f"n{axis}") for axis in range(rank)]
        strides = {o: [f.args.size(f"{o}{axis}") for axis in range(rank)] for o in "xiy"}
        steps = {o: [*strides[o][:-1], strides[o][-1] * PIECE] for o in "xiy"}
        counts = [*sizes[:-1], pieces(f, sizes[-1], PIECE)]
        begin, end = f.share(product(f, counts))
        size, stride = f.args.size("size"), f.args.size("stride")

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            i = f.gep(storage_type(index), f.args.pointer("i"), offsets["i"])
            x, y = (f.gep(word, f.args.pointer(o), offsets[o]) for o in "xy")
            with f.loop(0, f.min(sizes[-1] - coordinates[-1] * PIECE, PIECE)) as loop:
                found = f.load(storage_type(index), i, loop.index * strides["i"][-1])
                place = checked_index(f, found, size, index.is_signed)
                value = f.load(word, x, loop.index * strides["x"][-1] + place * stride)
                f.store(value, y, loop.index * strides["y"][-1])

        unless_empty(
            f, size, begin, end, lambda: emit_loop_nest(f, counts, steps, begin, end, body)
        )
    return signature
