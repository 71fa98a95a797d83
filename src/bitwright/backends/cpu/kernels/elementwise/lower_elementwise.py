"""Lowering of standalone elementwise regions, in the memory order of a dense operand."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.codegen.expression import Expression
from bitwright.backends.cpu.kernels.elementwise.elementwise import (
    CONTIGUOUS,
    REPEATED,
    STRIDED,
    Layout,
    emit_elementwise,
)
from bitwright.backends.cpu.lowering.context import (
    LOWERINGS,
    Lowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.backends.cpu.lowering.region import broadcast, collapse, require_elements
from bitwright.errors import CompileError
from bitwright.ir.dim import Size
from bitwright.ir.graph import Graph, Node, Value
from bitwright.lir.buffer import View
from bitwright.ops.core.registry import all_ops


@lowers("elementwise")
def lower_elementwise(ctx: Lowering, node: Node, region: RegionView) -> None:
    body = node.attrs["body"] if node.op == "fused" else as_body(node)
    operands = list(node.operands)
    if node.op != "fused":
        operands = [v for v in dict.fromkeys(operands) if not _is_scalar(v)]
    result = node.outputs[0]
    require_elements(result.dtype, *(v.dtype for v in operands))
    try:
        expression = Expression.of(body)
    except CompileError as error:
        raise NoKernelError(str(error)) from None
    views = [ctx.view(v) for v in operands]
    order = leading_order(views, result.shape)
    y = ctx.output(result, order)
    tensors = [broadcast(view, result.shape) for view in views]
    transposed = collapse([view.transpose(order) for view in (*tensors, y)])
    if not transposed[0].shape:  # all axes have size 1
        transposed = [View(v.buffer, v.offset, (1,), (1,)) for v in transposed]
    names = [*(f"x{i}" for i in range(len(views))), "y0"]
    layout = Layout(
        len(transposed[0].shape),
        tuple(_movement(view) for view in transposed[:-1]),
        (_movement(transposed[-1]),),
    )
    op = expression.steps[0].op if len(expression.steps) == 1 else "elementwise"
    kernel = ctx.kernel(
        f"{op}_{result.dtype}",
        (expression, layout),
        lambda m, name: emit_elementwise(m, name, expression, layout),
    )
    sizes: dict[str, Size] = {f"size{axis}": s for axis, s in enumerate(transposed[0].shape)}
    for name, view in zip(names, transposed, strict=True):
        sizes |= {f"{name}_{axis}": s for axis, s in enumerate(view.strides[:-1])}
        if _movement(view) == STRIDED:
            sizes[f"{name}_inner"] = view.strides[-1]
    ctx.call(kernel, node, dict(zip(names, transposed, strict=True)), sizes, writes=("y0",))


def leading_order(views: Sequence[View], shape: Sequence[Size]) -> tuple[int, ...]:
    """The axis order of the first dense operand of full shape, else row-major.

    If symbolic sizes decide which operands are broadcast, the first dense operand that is not known
    to be broadcast determines the order.
    """
    full = [view for view in views if tuple(view.shape) == tuple(shape)]
    for view in full or [view for view in views if _may_fill(view, shape)]:
        if (order := dense_order(view)) is not None:
            return order
    return tuple(range(len(shape)))


def _may_fill(view: View, shape: Sequence[Size]) -> bool:
    """Whether a view is not known to be broadcast along any axis."""
    if len(view.shape) != len(shape):
        return False
    return all(size != 1 or whole == 1 for size, whole in zip(view.shape, shape, strict=True))


def dense_order(view: View) -> tuple[int, ...] | None:
    """The axis order, outermost first, in which a view is dense, if any."""
    left = list(range(len(view.shape)))
    inner: list[int] = []
    stride: Size = 1
    while left:
        fits = [axis for axis in reversed(left) if view.shape[axis] == 1]
        fits += [axis for axis in reversed(left) if view.strides[axis] == stride]
        if not fits:
            return None
        inner.append(fits[0])
        stride = stride * view.shape[fits[0]]
        left.remove(fits[0])
    return tuple(reversed(inner))


def _movement(view: View) -> str:
    stride = view.strides[-1]
    return REPEATED if stride == 0 else CONTIGUOUS if stride == 1 else STRIDED


def _is_scalar(value: Value) -> bool:
    return value.is_constant and value.node.attrs["value"].size == 1


def as_body(node: Node) -> Graph:
    """A single node as a region body; scalar constants stay inside."""
    entries: dict[Value, Node] = {}
    for value in node.operands:
        if value not in entries:
            kept = value.node if _is_scalar(value) else None
            entries[value] = kept or Node("input", (), {}, (value.type,), (value.name,))
    inputs = tuple(None if v is None else entries[v].outputs[0] for v in node.inputs)
    copy = node.with_(inputs=inputs)
    nodes = (*dict.fromkeys(entries.values()), copy)
    return Graph(node.name, nodes, ((node.name, copy.outputs[0]),))


def _register() -> None:
    """Register the lowering for every op with a scalar form."""
    for name, op in all_ops().items():
        if op.scalar is not None and name not in LOWERINGS:
            LOWERINGS[name] = lower_elementwise


_register()
