"""Lowering of pooling, in the layout of the operand: channels first or last.

A program computes BLOCK results in memory order; the loop over the window is unrolled.
"""

from __future__ import annotations

import itertools
import math

from bitwright.backends.cpu.kernels.pool.lower_pool import windows_of
from bitwright.backends.cpu.lowering.layout import image_order
from bitwright.backends.gpu.codegen.expression import as_stored, loaded
from bitwright.backends.gpu.codegen.loads import masked_load
from bitwright.backends.gpu.codegen.source import Config, KernelSource, Work
from bitwright.backends.gpu.codegen.types import triton_type, widened
from bitwright.backends.gpu.kernels.movement.indices import decode, flat_grid, flat_index
from bitwright.backends.gpu.lowering.context import (
    GpuLowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, u64
from bitwright.ir.graph import Node

MAX_TAPS = 121
"""The largest window that is unrolled."""


@lowers("max_pool", "avg_pool", "lp_pool")
def lower_pool(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    (x,) = node.operands
    ctx.require(x.dtype)
    windows = windows_of(node, x.rank - 2)
    taps = math.prod(int(size) for size in windows.kernel)
    if taps > MAX_TAPS:
        raise NoKernelError(f"a window of {taps} pixels is not unrolled")
    if x.dtype == u64 or (node.op == "lp_pool" and node.attrs["p"] not in (1, 2)):
        raise NoKernelError(f"there is no kernel for this pooling of {x.dtype}")
    order = image_order(ctx.view(x))
    view, y = ctx.ordered(x, order), ctx.output(node.outputs[0], order)
    rank = x.rank
    names = [f"n{axis}" for axis in order]  # sizes of the result in memory order
    place = {axis: f"p{at}" for at, axis in enumerate(order)}
    wide = triton_type(widened(x.dtype))
    lines = [
        flat_index(y.count, view.count),
        f"ok = flat < {' * '.join(names)}",
        *decode("flat", names, "p"),
        f"row = x + {place[0]} * x_s0 + {place[1]} * x_s1",
    ]
    for axis in range(2, rank):
        at = axis - 2
        lines.append(f"first{axis} = {place[axis]} * {windows.strides[at]} - begin{axis}")
    start = {"max_pool": str(_lowest(x.dtype)), "avg_pool": "0", "lp_pool": "0"}[node.op]
    lines += [
        f"found = tl.full([BLOCK], {start}, {wide})",
        "count = tl.zeros([BLOCK], tl.int32)",
    ]
    for tap in itertools.product(*(range(int(size)) for size in windows.kernel)):
        lines += _tap(node, x.dtype, rank, tap, windows.dilations, wide)
    lines += _finish(node, wide)
    stored = as_stored("found", x.dtype)
    lines.append(f"tl.store(y + flat, {stored}, ok)")
    sizes: dict[str, Size] = {f"n{axis}": size for axis, size in enumerate(y.shape)}
    sizes |= {f"x_s{axis}": stride for axis, stride in enumerate(view.strides)}
    for axis in range(2, rank):
        sizes |= {
            f"m{axis}": x.shape[axis],
            f"begin{axis}": windows.begins[axis - 2],
            f"end{axis}": windows.ends[axis - 2],
        }
    source = KernelSource(
        f"{node.op}_{x.dtype}",
        "\n".join(lines),
        {"x": x.dtype, "y": x.dtype},
        tuple(sizes),
        (Config({"BLOCK": 256}, 4, 1), Config({"BLOCK": 512}, 4, 1), Config({"BLOCK": 128}, 4, 1)),
        flat_grid(names),
        work=Work(lambda size: 0.0),
    )
    why = "channels last" if order[-1] == 1 else "channels first"
    ctx.call(ctx.kernel(source), node, {"x": view, "y": y}, sizes, why=why)


def _lowest(element: DType) -> int | str:
    return 'float("-inf")' if element.is_float else int(element.min)


def _tap(
    node: Node,
    element: DType,
    rank: int,
    tap: tuple[int, ...],
    dilations: tuple[int, ...],
    wide: str,
) -> list[str]:
    """Statements that add one pixel of the windows."""
    lines, offset, inside, padded = [], "row", ["ok"], ["ok"]
    for axis in range(2, rank):
        shift = tap[axis - 2] * int(dilations[axis - 2])
        lines.append(f"a{axis} = first{axis} + {shift}")
        inside.append(f"(a{axis} >= 0) & (a{axis} < m{axis})")
        padded.append(f"(a{axis} < m{axis} + end{axis})")
        offset += f" + a{axis} * x_s{axis}"
    mask = " & ".join(inside)
    fill = _lowest(element) if node.op == "max_pool" else "0.0" if element.is_float else 0
    lines += [
        f"inside = {mask}",
        f"v = {loaded(masked_load(offset, 'inside', fill, element), element)}",
    ]
    if node.op == "max_pool":
        nan = " | (v != v)" if element.is_float else ""
        return [*lines, f"found = tl.where((v > found){nan}, v, found)"]
    if node.op == "avg_pool":
        counted = " & ".join(padded) if node.attrs["count_include_pad"] else "inside"
        return [*lines, "found += v", f"count += ({counted}).to(tl.int32)"]
    return [*lines, f"found += {'tl.abs(v)' if node.attrs['p'] == 1 else 'v * v'}"]


def _finish(node: Node, wide: str) -> list[str]:
    if node.op == "avg_pool":
        divide = "found / pixels" if wide == "tl.float64" else "tl.div_rn(found, pixels)"
        return [
            f"pixels = tl.maximum(count, 1).to({wide})",
            f"found = tl.where(count > 0, {divide}, 0.0)",
        ]
    if node.op == "lp_pool" and node.attrs["p"] == 2:
        return [f"found = {'tl.sqrt' if wide == 'tl.float64' else 'tl.sqrt_rn'}(found)"]
    return []
