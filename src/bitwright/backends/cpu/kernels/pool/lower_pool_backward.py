"""Lowering of the gradients of pooling, in the layout of the forward operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bitwright.backends.cpu.codegen.emit import Module, Signature, computed
from bitwright.backends.cpu.kernels.pool import pool_backward
from bitwright.backends.cpu.kernels.pool.lower_pool import lanes_along, sizes_of, windows_of
from bitwright.backends.cpu.kernels.pool.pool import Pool
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.layout import channels_last, image_order
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.dim import product
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View

MAX_PIXELS = 1 << 31
"""Places in a plane are i32."""
Emit = Callable[[Module, str, Pool], Signature]


@lowers("max_pool_backward")
def lower_max_pool_backward(ctx: Lowering, node: Node, region: RegionView) -> None:
    dy, x = node.operands
    pixels = product(x.shape[2:])
    if isinstance(pixels, int) and pixels >= MAX_PIXELS:
        raise NoKernelError("places in a plane do not fit 32 bits")
    order = image_order(ctx.view(x))
    call = _Calls(ctx, node, "max", x, dy, order)
    places = ctx.scratch(f"{node.name}.places", "i32", dy.tensor.count)
    views = {"x": ctx.ordered(x, order), "y": places}
    call("max_pool_places", pool_backward.emit_places, dy, views, "y")
    views = {"dy": ctx.ordered(dy, order), "places": places}
    views["dx"] = ctx.output(node.outputs[0], order)
    if call.is_last:
        call(node.op, pool_backward.emit_sums_channels_last, x, views, "dx")
        return
    is_wide = computed(x.dtype).bits > x.dtype.bits
    if is_wide:
        views["sums"] = ctx.scratch(f"{node.name}.sums", "f32", x.tensor.count)
    key = x.dtype, is_wide
    kernel = ctx.kernel(
        f"max_pool_backward_planes_{x.dtype}",
        key,
        lambda module, name: pool_backward.emit_scatter(module, name, *key),
    )
    sizes = {"planes": x.shape[0] * x.shape[1], "pixels": pixels, "windows": product(dy.shape[2:])}
    writes = ("dx", "sums") if is_wide else ("dx",)
    ctx.call(kernel, node, views, sizes, writes=writes, why="windows added to their maxima")


@lowers("avg_pool_backward")
def lower_avg_pool_backward(ctx: Lowering, node: Node, region: RegionView) -> None:
    (dy,) = node.operands
    dx = node.outputs[0]
    order = image_order(ctx.view(dy))
    if all(size == 1 for size in dy.shape[2:]):  # either order; convolutions write channels last
        order = channels_last(dy.rank)
    kind = "avg_padded" if node.attrs["count_include_pad"] else "avg"
    call = _Calls(ctx, node, kind, dx, dy, order)
    first, last = pool_backward.emit_means_channels_first, pool_backward.emit_sums_channels_last
    views = {"dy": ctx.ordered(dy, order), "dx": ctx.output(dx, order)}
    call(node.op, last if call.is_last else first, dx, views, "dx")


class _Calls:
    """Calls of the kernels of one node: x is what was pooled, y has the shape of the result."""

    def __init__(
        self, ctx: Lowering, node: Node, kind: str, x: Value, y: Value, order: tuple[int, ...]
    ) -> None:
        require_elements(x.dtype)
        self.ctx, self.node, self.kind, self.x, self.y = ctx, node, kind, x, y
        self.windows = windows_of(node, x.rank - 2)
        self.is_last = order == channels_last(x.rank)

    def __call__(
        self, family: str, emit: Emit, result: Value, views: Mapping[str, View], written: str
    ) -> None:
        """Append a call; vectors run along an axis of `result`."""
        ctx, windows = self.ctx, self.windows
        pool = Pool(
            self.kind,
            self.x.dtype,
            windows.kernel,
            windows.strides,
            windows.dilations,
            self.is_last,
            lanes_along(ctx, result, self.is_last),
        )
        kernel = ctx.kernel(
            f"{family}_{self.x.dtype}", pool, lambda module, name: emit(module, name, pool)
        )
        sizes = sizes_of(kernel, windows, self.x, self.y, self.is_last)
        layout = "last" if self.is_last else "first"
        ctx.call(kernel, self.node, views, sizes, writes=(written,), why=f"channels {layout}")
