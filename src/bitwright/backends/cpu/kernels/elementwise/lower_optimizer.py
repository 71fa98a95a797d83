"""Lowering of optimizer steps; states that they replace are updated in place."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.elementwise.optimizer import (
    SCALARS,
    TENSORS,
    Update,
    emit_update,
)
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.ir.dim import Size
from bitwright.ir.dtype import f32, f64
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import Storage, View
from bitwright.ops.core.registry import get


@lowers("sgd_update", "adam_update", "lion_update")
def lower_update(ctx: Lowering, node: Node, region: RegionView) -> None:
    names = [operand.name for operand in get(node.op).operands]
    given = {n: v for n, v in zip(names, node.inputs, strict=False) if v is not None}
    element = given["p"].dtype
    if element not in (f32, f64):
        raise NoKernelError(f"there is no kernel for parameters of {element}")
    scalars = SCALARS[node.op]
    if any(given[name].dtype != f32 for name in scalars):
        raise NoKernelError("there is no kernel for rates that are not f32")
    tensors = tuple(name for name in TENSORS[node.op] if name in given)
    update = Update(node.op, element, tensors, tuple(sorted(node.attrs.items())))
    family = f"{node.op}_{element}"
    kernel = ctx.kernel(family, update, lambda m, name: emit_update(m, name, update))
    pointers = {name: ctx.contiguous(given[name]) for name in (*tensors, *scalars, "apply")}
    for name, result in zip(update.results, node.outputs, strict=True):
        pointers[f"new_{name}"] = _place(ctx, node, given[name], result)
    writes = tuple(f"new_{name}" for name in update.results)
    sizes: dict[str, Size] = {"count": given["p"].tensor.count}
    if update.requires_finite:
        pointers["fault"] = ctx.fault()
        sizes["node"] = ctx.number(node, given["p"])
    ctx.call(kernel, node, pointers, sizes, writes=writes)


def _place(ctx: Lowering, node: Node, old: Value, new: Value) -> View:
    """The memory of a result: that of the state which it replaces, unless it is read later."""
    view = ctx.view(old)
    if dict(ctx.graph.updates).get(old) is new and view.buffer.storage is Storage.STATE:
        nodes = ctx.graph.nodes
        later = [v for other in nodes[nodes.index(node) + 1 :] for v in other.operands]
        if ctx.are_apart((*later, *ctx.graph.results), view.buffer):
            ctx.alias(new, view)
            return view
    return ctx.output(new)
