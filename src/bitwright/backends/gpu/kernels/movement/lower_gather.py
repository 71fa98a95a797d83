"""Lowering of gathers: rows of a table, or single elements. A constant index is a view.

gather            y[b, i, c] = x[b, index[i], c]
gather_nd         the same with several indices per row
gather_elements   y[p] = x[p with its axis replaced by index[p]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import bitwright.backends.cpu.kernels.movement.lower_gather as cpu
from bitwright.backends.cpu.lowering.region import collapse
from bitwright.backends.gpu.codegen.source import Config, KernelSource, cdiv
from bitwright.backends.gpu.kernels.movement.indices import (
    FAULT,
    checked_index,
    decode,
    fault_operands,
    flat_grid,
    flat_index,
    grouped,
    index_type,
    word,
)
from bitwright.backends.gpu.lowering.context import GpuLowering, RegionView, lowers
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View

assert cpu.__name__  # importing it registers the view
ROWS = (
    Config({"ROWS": 4, "COLUMNS": 256}, 4, 1),
    Config({"ROWS": 1, "COLUMNS": 1024}, 4, 1),
    Config({"ROWS": 16, "COLUMNS": 64}, 4, 1),
)
SINGLE = (Config({"ROWS": 256, "COLUMNS": 1}, 4, 1),)


@lowers("gather")
def lower_gather(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    x, indices = node.operands
    axis = normalize_axis(node.attrs["axis"], x.rank)
    batches, inner = product(x.shape[:axis]), product(x.shape[axis + 1 :])
    view = grouped(ctx, x, (batches, x.shape[axis], inner))
    _gather(ctx, node, view, indices, 1, (batches, product(indices.shape), 0), inner)


@lowers("gather_nd")
def lower_gather_nd(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    x, indices = node.operands
    first = node.attrs["batch_dims"]
    count = int(indices.shape[-1])
    inner = product(x.shape[first + count :])
    batches, rows = product(x.shape[:first]), product(indices.shape[first:-1])
    view = grouped(ctx, x, (batches, *x.shape[first : first + count], inner))
    _gather(ctx, node, view, indices, count, (batches, rows, rows * count), inner)


def _gather(
    ctx: GpuLowering,
    node: Node,
    x: View,
    indices: Value,
    count: int,
    work: tuple[Size, Size, Size],
    inner: Size,
) -> None:
    """x is [batches, one axis per index, inner]; `work` is (batches, tuples, indices per batch)."""
    index, element = index_type(indices), word(x.dtype)
    lines = [
        "row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]",
        "column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]",
        "row_ok = row < batches * tuples",
        "b = row // tuples",
        "t = row % tuples",
        "at = b * x_b",
    ]
    for j in range(count):
        lines.append(f"i{j} = tl.load(i + b * i_b + t * {count} + {j}, row_ok, other=0)")
        lines += checked_index(f"i{j}", f"n{j}", "row_ok")
        lines.append(f"at += i{j} * s{j}")
    lines += [
        "ok = row_ok & (column < inner)",
        "found = tl.load(x + at + column * x_c, ok, other=0)",
        "tl.store(y + row * inner + column, found, ok)",
    ]
    sizes: dict[str, Size] = {
        "batches": work[0],
        "tuples": work[1],
        "i_b": work[2],
        "x_b": x.strides[0],
        "x_c": x.strides[-1],
        "inner": inner,
    }
    for j in range(count):
        sizes |= {f"n{j}": x.shape[1 + j], f"s{j}": x.strides[1 + j]}
    fault, number = fault_operands(ctx, node)
    sizes |= number
    views = {"x": x, "i": ctx.contiguous(indices), "y": ctx.output(node.outputs[0]), **fault}
    source = KernelSource(
        f"gather_{element}",
        "\n".join(lines),
        {"x": element, "i": index, "y": element, **FAULT},
        tuple(sizes),
        SINGLE if inner == 1 else ROWS,
        _row_grid,
    )
    ctx.call(ctx.kernel(source), node, views, sizes, why="rows of a table")


def _row_grid(size: Mapping[str, int]) -> Sequence[int]:
    return (
        cdiv(size["batches"] * size["tuples"], size["ROWS"]),
        cdiv(size["inner"], size["COLUMNS"]),
    )


@lowers("gather_elements")
def lower_gather_elements(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    x, indices = node.operands
    index, element = index_type(indices), word(x.dtype)
    axis = normalize_axis(node.attrs["axis"], x.rank)
    source, y = ctx.view(x), ctx.output(node.outputs[0])
    strides = tuple(0 if at == axis else s for at, s in enumerate(source.strides))
    along = replace(source, shape=y.shape, strides=strides)
    x_view, i_view, y_view = collapse([along, ctx.view(indices), y], keep=1)
    names = [f"n{at}" for at in range(len(y_view.shape))]
    places = [f"p{at}" for at in range(len(names))]

    def offset(operand: str) -> str:
        return " + ".join(f"{p} * {operand}{at}" for at, p in enumerate(places))

    lines = [
        flat_index(y_view.count, x.tensor.count),
        f"ok = flat < {' * '.join(names)}",
        *decode("flat", names, "p"),
        f"place = tl.load(i + {offset('i')}, ok, other=0)",
        *checked_index("place", "size", "ok"),
        f"found = tl.load(x + {offset('x')} + place * stride, ok, other=0)",
        f"tl.store(y + {offset('y')}, found, ok)",
    ]
    sizes: dict[str, Size] = {"size": x.shape[axis], "stride": source.strides[axis]}
    sizes |= dict(zip(names, y_view.shape, strict=True))
    for operand, view in (("x", x_view), ("i", i_view), ("y", y_view)):
        sizes |= {f"{operand}{at}": stride for at, stride in enumerate(view.strides)}
    fault, number = fault_operands(ctx, node)
    sizes |= number
    kernel = KernelSource(
        f"gather_elements_{element}",
        "\n".join(lines),
        {"x": element, "i": index, "y": element, **FAULT},
        tuple(sizes),
        (Config({"BLOCK": 512}, 4, 1), Config({"BLOCK": 256}, 4, 1)),
        flat_grid(names),
    )
    views = {"x": x_view, "i": i_view, "y": y_view, **fault}
    ctx.call(ctx.kernel(kernel), node, views, sizes, why="one index per element")
