"""Coordinates of nonzero elements: counted per chunk, then written once the total is known.

count   counts[chunk] = number of nonzero elements of the chunk
write   y[axis, k] = coordinate of the k-th such element, in row-major order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value, i64, storage_type
from bitwright.backends.cpu.kernels.elementwise.loop_nest import emit_loop_nest
from bitwright.ir.dtype import DType

CHUNK = 4096
"""Elements per chunk."""


def _is_set(f: Kernel, element: DType, place: Value, lanes: int = 1) -> Value:
    value = f.load(storage_type(element).vector(lanes), f.args.pointer("x"), place)
    return f.ne(value, 0.0 if element.is_float else 0)


def emit_count(module: Module, name: str, element: DType) -> Signature:
    signature = Signature(("x", "counts"), ("count", "chunks"))
    with module.kernel(name, signature) as f:
        begin, end = f.share(f.args.size("chunks"))
        with f.loop(begin, end) as chunks:
            first = chunks.index * CHUNK
            last = f.min(first + CHUNK, f.args.size("count"))
            with f.loop(first, last, carry=(f.index(0),)) as loop:
                one = f.convert(_is_set(f, element, loop.index), i64, signed=False)
                loop.next(loop.carried[0] + one)
            f.store(loop.results[0], f.args.pointer("counts"), chunks.index)
    return signature


def emit_write(module: Module, name: str, element: DType, rank: int) -> Signature:
    sizes = tuple(f"n{axis}" for axis in range(rank))
    signature = Signature(("x", "counts", "y"), ("count", "chunks", "found", *sizes))
    with module.kernel(name, signature) as f:
        counts, y, found = f.args.pointer("counts"), f.args.pointer("y"), f.args.size("found")
        begin, end = f.share(f.args.size("chunks"))
        with f.loop(0, begin, carry=(f.index(0),)) as before:
            before.next(before.carried[0] + f.load(i64, counts, before.index))
        here = f.scratch(i64, 1)
        f.store(before.results[0], here)

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            with f.if_(_is_set(f, element, offsets["x"])):
                place = f.load(i64, here)
                for axis, coordinate in enumerate(coordinates):
                    f.store(coordinate, y, found * axis + place)
                f.store(place + 1, here)

        last = f.min(end * CHUNK, f.args.size("count"))
        shape = [f.args.size(size) for size in sizes]
        steps = [f.index(1)]
        for size in reversed(shape[1:]):
            steps.append(steps[-1] * size)
        emit_loop_nest(f, shape, {"x": steps[::-1]}, begin * CHUNK, last, body)
    return signature
