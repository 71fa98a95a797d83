"""Lowering of scatters: the result starts as a copy of x, or is a state that is updated in place.

A program writes the updates of its places in order, so that the last of several updates wins and
sums repeat from run to run: programs share columns, never the updates of one column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bitwright.backends.cpu.lowering.region import collapse
from bitwright.backends.gpu.codegen.expression import as_stored
from bitwright.backends.gpu.codegen.source import Config, KernelSource, cdiv
from bitwright.backends.gpu.codegen.types import triton_type, widened
from bitwright.backends.gpu.kernels.attention.rotated import Rotated
from bitwright.backends.gpu.kernels.movement.indices import (
    FAULT,
    checked_index,
    decode,
    fault_operands,
    grouped,
    index_type,
    word,
)
from bitwright.backends.gpu.lowering.context import (
    GpuLowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import DType, bool_
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View, row_major

JOIN = {
    "add": "old + new",
    "mul": "old * new",
    "max": "tl.where((old > new) | (old != old), old, new)",
    "min": "tl.where((old < new) | (old != old), old, new)",
}


def _start(ctx: GpuLowering, node: Node) -> View:
    """The result's memory, initialized with x."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    becomes = dict(ctx.graph.updates).get(x)
    if becomes is y and ctx.graph.uses[x] == 1:
        ctx.alias(y, ctx.view(x))
        return ctx.view(x)
    target = ctx.output(y)
    ctx.copy(ctx.view(x), target, node.name)
    return target


def _element(value: Value, reduction: str) -> DType:
    if reduction == "none":
        return word(value.dtype)
    if value.dtype == bool_ or value.dtype.bits < 8:
        raise NoKernelError(f"there is no kernel for reductions of {value.dtype}")
    triton_type(value.dtype)
    return value.dtype


def _write(element: DType, reduction: str, where: str, mask: str) -> list[str]:
    """Statements that join `new` with what is at a place."""
    if reduction == "none":
        return [f"tl.store({where}, new, {mask})"]
    wide = triton_type(widened(element))
    return [
        f"old = tl.load({where}, {mask}, other=0).to({wide})",
        f"new = new.to({wide})",
        f"tl.store({where}, ({JOIN[reduction]}).to({triton_type(element)}), {mask})",
    ]


@lowers("scatter_nd")
def lower_scatter_nd(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    x, indices, updates = node.operands
    reduction, count = node.attrs["reduction"], int(indices.shape[-1])
    index, element = index_type(indices), _element(x, reduction)
    y = _start(ctx, node)
    inside = ["at = tl.zeros([1], tl.int64)"]
    for j in range(count):
        inside.append(f"i{j} = tl.load(i + t * {count} + {j} + tl.zeros([1], tl.int64))")
        inside += checked_index(f"i{j}", f"n{j}", f"i{j} == i{j}")
        inside.append(f"at += i{j} * s{j}")
    right = " & ".join(["ok", *(f"(i{j}_wrong == 0)" for j in range(count))])
    inside.append(f"good = {right}")
    inside.append("new = tl.load(u + t * columns + column, ok, other=0)")
    inside += _write(element, reduction, "y + at + column", "good")
    lines = [
        "column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "ok = column < columns",
        "for t in range(0, m):",
        *(f"    {line}" for line in inside),
    ]
    sizes: dict[str, Size] = {
        "m": product(indices.shape[:-1]),
        "columns": product(x.shape[count:]),
    }
    for j in range(count):
        sizes |= {f"n{j}": y.shape[j], f"s{j}": y.strides[j]}
    fault, number = fault_operands(ctx, node)
    sizes |= number
    views = {"y": y, "i": ctx.contiguous(indices), "u": ctx.contiguous(updates), **fault}
    source = KernelSource(
        f"scatter_nd_{reduction}_{element}",
        "\n".join(lines),
        {"y": element, "i": index, "u": element, **FAULT},
        tuple(sizes),
        (Config({"BLOCK": 256}, 4, 1),),
        lambda size: (cdiv(size["columns"], size["BLOCK"]) if size["m"] else 0,),
    )
    ctx.call(ctx.kernel(source), node, views, sizes, why="updates of a column in order")


@lowers("scatter_elements")
def lower_scatter_elements(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    x, indices, updates = node.operands
    reduction = node.attrs["reduction"]
    axis = normalize_axis(node.attrs["axis"], x.rank)
    index, element = index_type(indices), _element(x, reduction)
    y = _start(ctx, node)
    order = [*(at for at in range(x.rank) if at != axis), axis]
    views = [replace(v, shape=indices.shape) for v in (ctx.view(indices), ctx.view(updates), y)]
    views = collapse([view.transpose(order) for view in views], keep=1)
    rank = len(views[0].shape)
    names = [f"n{at}" for at in range(rank - 1)] or ["one"]
    places = [f"p{at}" for at in range(rank - 1)]

    def offset(operand: str) -> str:
        return " + ".join(f"{p} * {operand}{at}" for at, p in enumerate(places)) or "flat * 0"

    inside = [
        f"place = tl.load(i + {offset('i')} + t * i{rank - 1}, ok, other=0)",
        *checked_index("place", "size", "ok"),
        "good = ok & (place_wrong == 0)",
        f"new = tl.load(u + {offset('u')} + t * u{rank - 1}, ok, other=0)",
        *_write(element, reduction, f"y + {offset('y')} + place * y{rank - 1}", "good"),
    ]
    lines = [
        "flat = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        f"ok = flat < {' * '.join(names)}",
        *decode("flat", names, "p"),
        "for t in range(0, m):",
        *(f"    {line}" for line in inside),
    ]
    sizes: dict[str, Size] = {"m": views[0].shape[-1], "size": x.shape[axis]}
    sizes |= dict(zip(names, views[0].shape[:-1] or (1,), strict=True))
    for operand, view in zip("iuy", views, strict=True):
        sizes |= {f"{operand}{at}": stride for at, stride in enumerate(view.strides)}
    fault, number = fault_operands(ctx, node)
    sizes |= number
    source = KernelSource(
        f"scatter_elements_{reduction}_{element}",
        "\n".join(lines),
        {"i": index, "u": element, "y": element, **FAULT},
        tuple(sizes),
        (Config({"BLOCK": 256}, 4, 1),),
        _places_grid(names),
    )
    pointers = {**dict(zip("iuy", views, strict=True)), **fault}
    ctx.call(ctx.kernel(source), node, pointers, sizes, why="updates of a place in order")


def _places_grid(names: Sequence[str]) -> Callable[[Mapping[str, int]], Sequence[int]]:
    def grid(size: Mapping[str, int]) -> Sequence[int]:
        count = 1 if size["m"] else 0
        for name in names:
            count *= size[name]
        return (cdiv(count, size["BLOCK"]),)

    return grid


@lowers("tensor_scatter")
def lower_tensor_scatter(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    """Rows written into a cache, in place where the cache is a state."""
    past, update, *rest = node.operands
    axis = normalize_axis(node.attrs["axis"], past.rank)
    element = word(past.dtype)
    outer = past.shape[0], product(past.shape[1:axis])
    inner = product(past.shape[axis + 1 :])
    rotated = Rotated.of(ctx, update)
    if rotated is None:
        given = grouped(ctx, update, (*outer, update.shape[axis], inner))
    else:
        given, element = rotated.x, past.dtype
    room = (*outer, past.shape[axis], inner)
    y = replace(_start(ctx, node), shape=room, strides=row_major(room))
    lines = [
        "row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]",
        "column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]",
        "row_ok = row < n0 * n1 * count",
        *decode("row", ("n0", "n1", "count"), "p"),
    ]
    if rest:
        lines.append("begin = tl.load(i + p0, row_ok, other=0).to(tl.int64)")
    else:
        lines.append("begin = tl.zeros([ROWS, 1], tl.int64)")
    is_linear = node.attrs["mode"] == "linear"
    wrong = "(begin < 0) | (count > room)" + (" | (begin + count > room)" if is_linear else "")
    lines += [
        f"wrong = row_ok & ({wrong})",
        "tl.store(fault + 1 + row * 0, begin, wrong)",
        "tl.store(fault + row * 0, tl.cast(node, tl.int64) + row * 0, wrong)",
        "place = tl.where(wrong, 0, (begin + p2) % room)",
        "ok = row_ok & (wrong == 0) & (column < inner)",
    ]
    if rotated is None:
        lines.append("found = tl.load(u + p0 * u0 + p1 * u1 + p2 * u2 + column * u3, ok, other=0)")
    else:
        lines += rotated.lines
    result = "found" if rotated is None else as_stored("found", element)
    lines.append(f"tl.store(y + p0 * y0 + p1 * y1 + place * y2 + column * y3, {result}, ok)")
    sizes: dict[str, Size] = {
        "n0": outer[0],
        "n1": outer[1],
        "count": update.shape[axis],
        "inner": inner,
        "room": past.shape[axis],
    }
    for operand, view in (("u", given), ("y", y)):
        sizes |= {f"{operand}{at}": stride for at, stride in enumerate(view.strides)}
    fault, number = fault_operands(ctx, node)
    sizes |= number
    pointers: dict[str, DType] = {"y": element, "u": element, **FAULT}
    views = {"y": y, "u": given, **fault}
    if rest:
        pointers["i"], views["i"] = index_type(rest[0]), ctx.contiguous(rest[0])
    if rotated is not None:
        pointers |= rotated.pointers
        views |= rotated.views
        sizes |= rotated.sizes
    source = KernelSource(
        f"tensor_scatter_{'rotated_' if rotated is not None else ''}{element}",
        "\n".join(lines),
        pointers,
        tuple(sizes),
        (Config({"ROWS": 4, "COLUMNS": 128}, 4, 1), Config({"ROWS": 1, "COLUMNS": 256}, 2, 1)),
        lambda size: (
            cdiv(size["n0"] * size["n1"] * size["count"], size["ROWS"]),
            cdiv(size["inner"], size["COLUMNS"]),
        ),
    )
    why = "rows of a cache" + (", rotated inside" if rotated is not None else "")
    ctx.call(ctx.kernel(source), node, views, sizes, why=why)
