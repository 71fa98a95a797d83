"""A loop over an index space in row-major order, with an incremental offset per operand.

    emit_loop_nest(f, (n0, n1), {"x": (s0, s1)}, begin, end, body)

calls `body(coordinates, offsets)` for the flat positions begin … end - 1 of a space of n0 x n1,
with offsets["x"] = c0 * s0 + c1 * s1. Only the first position is computed by division; then the
last coordinate increments, and carries into the others when it wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bitwright.backends.cpu.codegen.emit import Function, Operand, Value

Body = Callable[[tuple[Value, ...], Mapping[str, Value]], None]


def emit_loop_nest(
    f: Function,
    sizes: Sequence[Value],
    strides: Mapping[str, Sequence[Operand]],
    begin: Value,
    end: Value,
    body: Body,
) -> None:
    """Emit the loop; an empty range executes no division."""
    names, steps = tuple(strides), tuple(strides.values())
    rank = len(sizes)
    with f.if_(f.lt(begin, end)):
        coordinates = position(f, sizes, begin)
        offsets = [dot(f, coordinates, step) for step in steps]
        with f.loop(begin, end, carry=(*coordinates, *offsets), nonempty=True) as loop:
            here = loop.carried
            body(here[:rank], dict(zip(names, here[rank:], strict=True)))
            loop.next(*_advance(f, sizes, steps, here, rank - 1))


def position(f: Function, sizes: Sequence[Value], flat: Value) -> tuple[Value, ...]:
    """The coordinates of a flat position; sizes must not be 0."""
    found: list[Value] = []
    for size in reversed(sizes[1:]):
        found.append(f.urem(flat, size))
        flat = f.udiv(flat, size)
    return (*([flat] if sizes else []), *reversed(found))


def dot(f: Function, coordinates: Sequence[Value], strides: Sequence[Operand]) -> Value:
    """The sum of products, as an i64."""
    total: Operand = 0
    for coordinate, stride in zip(coordinates, strides, strict=True):
        if isinstance(stride, Value) or stride:
            total = f.mul(coordinate, stride) + total
    return f.index(total)


def product(f: Function, sizes: Sequence[Operand]) -> Value:
    total: Operand = 1
    for size in sizes:
        total = f.index(size) if not isinstance(total, Value) and total == 1 else total * size
    return f.index(total)


def pieces(f: Function, count: Operand, size: int) -> Value:
    """The number of pieces of `size` that cover `count`, rounded up."""
    return f.udiv(f.add(f.index(count), size - 1), size)


def _advance(
    f: Function,
    sizes: Sequence[Value],
    steps: Sequence[Sequence[Operand]],
    here: Sequence[Value],
    axis: int,
) -> tuple[Value, ...]:
    """Coordinates and offsets after one increment on `axis`."""
    if axis < 0:
        return tuple(here)
    outer, count = here[:axis], here[axis] + 1
    inner, offsets = here[axis + 1 : len(here) - len(steps)], here[len(here) - len(steps) :]
    moved = tuple(f.add(o, s[axis]) for o, s in zip(offsets, steps, strict=True))
    if axis == 0:
        return (count, *inner, *moved)
    with f.if_(f.ge(count, sizes[axis]), carry=(*outer, count, *moved)) as branch:
        back = [f.sub(o, f.mul(sizes[axis], s[axis])) for o, s in zip(moved, steps, strict=True)]
        carried = _advance(f, sizes, steps, (*outer, *back), axis - 1)
        branch.next(*carried[:axis], f.index(0), *carried[axis:])
    results = branch.results
    return (*results[: axis + 1], *inner, *results[axis + 1 :])
