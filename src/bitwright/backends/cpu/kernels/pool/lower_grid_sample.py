"""Lowering of grid_sample: contiguous images and grid, all positions of an image as one axis."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.pool.grid_sample import Sampling, emit_grid_sample
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node
from bitwright.ops.core.registry import get

MAX_AXES = 3


@lowers("grid_sample")
def lower_grid_sample(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, grid = node.operands
    require_elements(x.dtype, grid.dtype)
    if not x.dtype.is_float:
        raise NoKernelError(f"grid_sample has no kernel for {x.dtype}")
    axes, attrs = x.rank - 2, get(node.op).call_attrs(node.attrs)
    if axes > MAX_AXES:
        raise NoKernelError(f"grid_sample has no kernel for {axes} spatial axes")
    how = attrs["mode"], attrs["padding_mode"], bool(attrs["align_corners"])
    kernel = Sampling(x.dtype, grid.dtype, axes, *how)
    family = f"grid_sample_{kernel.mode}_{x.dtype}"
    code = ctx.kernel(family, kernel, lambda m, name: emit_grid_sample(m, name, kernel))
    sizes: dict[str, Size] = {
        "batch": x.shape[0],
        "channels": x.shape[1],
        "positions": product(grid.shape[1:-1]),
        **{f"d{axis}": size for axis, size in enumerate(x.shape[2:])},
        "node": ctx.number(node),
    }
    pointers = {
        "x": ctx.contiguous(x),
        "grid": ctx.contiguous(grid),
        "y": ctx.output(node.outputs[0]),
        "fault": ctx.fault(),
    }
    ctx.call(code, node, pointers, sizes)
