"""Lowering of standalone elementwise regions and casts, in the memory order of a dense operand."""

from __future__ import annotations

import numpy as np

from bitwright.backends.cpu.codegen.expression import Expression
from bitwright.backends.cpu.kernels.elementwise.lower_elementwise import as_body, leading_order
from bitwright.backends.cpu.lowering.region import broadcast
from bitwright.backends.gpu.codegen.expression import why_not_render
from bitwright.backends.gpu.codegen.source import KernelSource
from bitwright.backends.gpu.kernels.elementwise.elementwise import (
    FLAT,
    elementwise_source,
    flat,
    flat_grid,
)
from bitwright.backends.gpu.lowering.context import (
    COPY,
    LOWERINGS,
    GpuLowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.errors import CompileError
from bitwright.ir.dtype import DType, bf16, bool_, f8e4m3fn, f8e5m2, f16, f32, i8, i16, i32, i64
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View
from bitwright.ops.core.registry import all_ops
from bitwright.ops.math.cast import cast
from bitwright.passes.fuse.fuse_regions import COMPUTED

_BY_BYTES = {1: i8, 2: i16, 4: i32, 8: i64}


@lowers("elementwise")
def lower_elementwise(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    body = node.attrs["body"] if node.op == "fused" else as_body(node)
    operands = list(node.operands)
    if node.op != "fused":
        operands = [v for v in dict.fromkeys(operands) if not _is_scalar(v)]
    result = node.outputs[0]
    ctx.require(result.dtype, *(v.dtype for v in operands))
    try:
        expression = Expression.of(body)
    except CompileError as error:
        raise NoKernelError(str(error)) from None
    if reason := why_not_render(expression):
        raise NoKernelError(reason)
    views = [ctx.view(v) for v in operands]
    order = leading_order(views, result.shape)
    y = ctx.output(result, order)
    ones = tuple(axis for axis in order if result.shape[axis] == 1)  # no axis for the columns
    order = (*ones, *(axis for axis in order if axis not in ones))
    names = {f"x{n}": broadcast(v, result.shape).transpose(order) for n, v in enumerate(views)}
    op = expression.steps[0].op if len(expression.steps) == 1 else "elementwise"
    _launch(ctx, node, f"{op}_{result.dtype}", expression, names, y.transpose(order))


@lowers("cast")
def lower_cast(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    """Types of one byte without arithmetic are converted by a table that the reference fills."""
    (x,) = node.operands
    to = node.attrs["to"]
    if {x.dtype, to} <= COMPUTED:
        lower_elementwise(ctx, node, region)
    elif x.dtype in (f32, f16, bf16) and to in (f8e4m3fn, f8e5m2) and ctx.machine.has_f8:
        if not node.attrs.get("saturate", True):
            raise NoKernelError("the GPU converts to 8-bit floats with saturation only")
        lower_elementwise(ctx, node, region)
    elif x.dtype.numpy.itemsize == 1 and x.dtype != bool_:
        values = np.arange(256, dtype=np.uint8).view(x.dtype.numpy)
        how = node.attrs.get("saturate", True), node.attrs.get("round_mode", "up")
        with np.errstate(all="ignore"):
            table = ctx.constant(cast(values, to, *how), f"{x.dtype}.to.{to}")
        table_lookup(ctx, node, ctx.contiguous(x), table, ctx.output(node.outputs[0]))
    else:
        raise NoKernelError(f"there is no kernel for casts from {x.dtype} to {to}")


def table_lookup(ctx: GpuLowering, node: Node, x: View, table: View, y: View) -> None:
    """Append a call that reads an entry for every byte of x; the table stays in the cache."""
    element = word_type(y.dtype)
    body = (
        f"{flat()}\n"
        "bits = tl.load(x + i, mask, other=0).to(tl.int32) & 255\n"
        "tl.store(y + i, tl.load(entries + bits, mask, other=0), mask)"
    )
    types = {"x": i8, "entries": element, "y": element}
    source = KernelSource(f"lookup_table_{element.bits}", body, types, ("count",), FLAT, flat_grid)
    ctx.call(ctx.kernel(source), node, {"x": x, "entries": table, "y": y}, {"count": y.count})


def copy_view(ctx: GpuLowering, source: View, target: View, name: str) -> None:
    """Append a kernel call that copies the bytes of `source` to `target`."""
    width = source.dtype.numpy.itemsize
    if len(source.shape) != len(target.shape) or width != target.dtype.numpy.itemsize:
        raise CompileError("a copy needs two views of one type", expected=target, found=source)
    element = word_type(source.dtype)
    expression = Expression((element,), (), (0,))
    _launch(ctx, name, f"copy_{width * 8}", expression, {"x0": source}, target, element)


def word_type(element: DType) -> DType:
    """The integer type that elements are moved as."""
    width = element.numpy.itemsize
    if width not in _BY_BYTES:
        raise NoKernelError(f"the GPU backend has no element type {element}")
    return _BY_BYTES[width]


def _launch(
    ctx: GpuLowering,
    node: Node | str,
    family: str,
    expression: Expression,
    operands: dict[str, View],
    y: View,
    element: DType | None = None,
) -> None:
    views = {**operands, "y": y}
    if not y.shape:
        views = {n: View(v.buffer, v.offset, (1,), (1,)) for n, v in views.items()}
    y = views.pop("y")
    source, grouped, sizes = elementwise_source(family, expression, views, {"y": y}, element)
    ctx.call(source, node, grouped, sizes, writes=("y",))


def _is_scalar(value: Value) -> bool:
    return value.is_constant and bool(value.node.attrs["value"].size == 1)


COPY.append(copy_view)
for _name, _op in all_ops().items():
    if _op.scalar is not None and _name not in LOWERINGS:
        LOWERINGS[_name] = lower_elementwise
