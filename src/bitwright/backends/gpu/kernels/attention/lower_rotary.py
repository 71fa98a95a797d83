"""Lowering of rotary embeddings: rows of features, rotated in pairs.

    (a, b) -> (a cos - b sin, b cos + a sin)

A tile holds both halves of its rows; the features beyond the rotated ones are copied.
"""

from __future__ import annotations

from bitwright.backends.cpu.lowering.region import broadcast
from bitwright.backends.gpu.codegen.expression import as_stored, loaded
from bitwright.backends.gpu.codegen.source import Config, KernelSource, cdiv
from bitwright.backends.gpu.kernels.attention.spec import padded
from bitwright.backends.gpu.kernels.movement.indices import (
    FAULT,
    checked_index,
    decode,
    fault_operands,
    index_type,
)
from bitwright.backends.gpu.lowering.context import (
    GpuLowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node


@lowers("rotary")
def lower_rotary(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    x, cos, sin, *ids = node.operands
    ctx.require(x.dtype)
    features = x.shape[3]
    if not isinstance(features, int) or features > 1024:
        raise NoKernelError(f"rotary has no kernel for {features} features")
    rotated = node.attrs["rotary_dim"] or features
    half, wide = rotated // 2, padded(rotated // 2)
    first, second = ("2 * f", "2 * f + 1") if node.attrs["interleaved"] else ("f", f"f + {half}")
    views = {"x": ctx.view(x), "cos": ctx.view(cos), "sin": ctx.view(sin)}
    sizes: dict[str, Size] = {
        "batches": x.shape[0],
        "heads": x.shape[1],
        "positions": x.shape[2],
    }
    lines = [
        "row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]",
        "row_ok = row < batches * heads * positions",
        *decode("row", ("batches", "heads", "positions"), "p"),
        f"f = tl.arange(0, {wide})[None, :]",
        f"ok = row_ok & (f < {half})",
    ]
    pointers = {"x": x.dtype, "cos": x.dtype, "sin": x.dtype}
    if ids:
        pointers |= {"ids": index_type(ids[0]), **FAULT}
        views["ids"] = ctx.view(ids[0])
        fault, number = fault_operands(ctx, node)
        views |= fault
        sizes |= {"limit": cos.shape[0], **number}
        sizes |= {f"ids_s{axis}": views["ids"].strides[axis] for axis in range(2)}
        lines.append("place = tl.load(ids + p0 * ids_s0 + p2 * ids_s1, row_ok, other=0)")
        lines += [
            *checked_index("place", "limit", "row_ok"),
            "lost = row_ok & (tl.load(ids + p0 * ids_s0 + p2 * ids_s1, row_ok, other=0) < 0)",
            "tl.store(fault + row * 0, tl.cast(node, tl.int64) + row * 0, lost)",
        ]
        where = "place * {0}_s0 + f * {0}_s1"
        axes = 2
    else:
        for name in ("cos", "sin"):
            views[name] = broadcast(views[name], (x.shape[0], x.shape[2], half))
        where = "p0 * {0}_s0 + p2 * {0}_s1 + f * {0}_s2"
        axes = 3
    for name in ("cos", "sin"):
        sizes |= {f"{name}_s{axis}": views[name].strides[axis] for axis in range(axes)}
        load = loaded(f"tl.load({name} + {where.format(name)}, ok, other=0.0)", x.dtype)
        lines.append(f"{name}_x = {load}")
    y = ctx.output(node.outputs[0])
    views["y"], pointers["y"] = y, x.dtype
    for name in ("x", "y"):
        sizes |= {f"{name}_s{axis}": views[name].strides[axis] for axis in range(4)}
        lines.append(f"{name}_row = {name} + p0 * {name}_s0 + p1 * {name}_s1 + p2 * {name}_s2")
    for name, at in (("a", first), ("b", second)):
        load = loaded(f"tl.load(x_row + ({at}) * x_s3, ok, other=0.0)", x.dtype)
        lines.append(f"{name} = {load}")
    for value, at in (
        ("a * cos_x - b * sin_x", first),
        ("b * cos_x + a * sin_x", second),
    ):
        lines.append(f"tl.store(y_row + ({at}) * y_s3, {as_stored(f'({value})', x.dtype)}, ok)")
    if rotated < features:
        rest = padded(features - rotated)
        lines += [
            f"g = {rotated} + tl.arange(0, {rest})[None, :]",
            f"more = row_ok & (g < {features})",
            "tl.store(y_row + g * y_s3, tl.load(x_row + g * x_s3, more), more)",
        ]
    source = KernelSource(
        f"rotary_{x.dtype}",
        "\n".join(lines),
        pointers,
        tuple(sizes),
        (Config({"ROWS": 4}, 4, 1), Config({"ROWS": 1}, 1, 1), Config({"ROWS": 16}, 4, 1)),
        lambda size: (cdiv(size["batches"] * size["heads"] * size["positions"], size["ROWS"]),),
    )
    ctx.call(ctx.kernel(source), node, views, sizes, why="pairs of features in lanes")
