"""Lowering of rotary embeddings: x is read through a view with contiguous features."""

from __future__ import annotations

from collections.abc import Mapping

from bitwright.backends.cpu.kernels.attention.rotary import GRID, ROWS, TABLE, Rotary, emit_rotary
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import broadcast, close, require_elements
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View

MAX_FEATURES = 1024
"""Rows are unrolled vector by vector."""


@lowers("rotary")
def lower_rotary(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, cos, sin, *ids = node.operands
    features = _features(x)
    rotated = node.attrs["rotary_dim"] or features
    interleaved = node.attrs["interleaved"]
    tables = {"cos": close(ctx, cos), "sin": close(ctx, sin)}
    sizes: dict[str, Size] = {}
    if ids:
        kernel = Rotary(x.dtype, features, rotated, interleaved, TABLE, ids[0].dtype)
        require_elements(ids[0].dtype)
        tables |= {"ids": ctx.view(ids[0]), "fault": ctx.fault()}
        sizes = {"limit": cos.shape[0], "node": ctx.number(node)}
        sizes |= {f"ids.{axis}": tables["ids"].strides[axis] for axis in range(2)}
        sizes |= {f"{name}.0": tables[name].strides[0] for name in ("cos", "sin")}
    else:
        kernel = Rotary(x.dtype, features, rotated, interleaved, ROWS)
        for name in ("cos", "sin"):
            view = broadcast(tables[name], (x.shape[0], x.shape[2], rotated // 2))
            sizes |= {f"{name}.{axis}": view.strides[axis] for axis in range(2)}
    _call(ctx, node, x, kernel, tables, sizes)


@lowers("axial_rotary")
def lower_axial_rotary(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, *angles = node.operands
    features = _features(x)
    kernel = Rotary(x.dtype, features, features, node.attrs["interleaved"], GRID)
    tables = {name: close(ctx, v) for name, v in zip(kernel.tables, angles, strict=True)}
    sizes: dict[str, Size] = {f"{name}.0": view.strides[0] for name, view in tables.items()}
    sizes["columns"] = angles[2].shape[0]
    _call(ctx, node, x, kernel, tables, sizes)


def _features(x: Value) -> int:
    require_elements(x.dtype)
    features = x.shape[3]
    if not isinstance(features, int) or features > MAX_FEATURES:
        raise NoKernelError(f"rotary has no kernel for {features} features")
    return features


def _call(
    ctx: Lowering,
    node: Node,
    x: Value,
    kernel: Rotary,
    tables: Mapping[str, View],
    sizes: Mapping[str, Size],
) -> None:
    views = {"x": close(ctx, x), "y": ctx.output(node.outputs[0]), **tables}
    counts = {"batches": x.shape[0], "heads": x.shape[1], "positions": x.shape[2]}
    steps = {f"{n}.{axis}": views[n].strides[axis] for n in ("x", "y") for axis in range(3)}
    code = ctx.kernel(f"rotary_{x.dtype}", kernel, lambda m, name: emit_rotary(m, name, kernel))
    ctx.call(code, node, views, {**counts, **steps, **sizes})
