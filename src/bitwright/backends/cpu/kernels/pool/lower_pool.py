"""Lowering of pooling, in the layout of the operand: channels first or last."""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import computed
from bitwright.backends.cpu.kernels.pool.pool import Pool, emit_pool
from bitwright.backends.cpu.lowering.artifact import KernelCode
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.layout import channels_last, image_order
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node, Value
from bitwright.ops.nn.windows import Windows, make_windows

MAX_PLACE = 1 << 30
"""The largest position in 32-bit lanes: a sum of two fits."""


@lowers("max_pool", "avg_pool", "lp_pool")
def lower_pool(ctx: Lowering, node: Node, region: RegionView) -> None:
    (x,) = node.operands
    y = node.outputs[0]
    require_elements(x.dtype)
    windows = windows_of(node, x.rank - 2)
    order = image_order(ctx.view(x))
    is_last = order == channels_last(x.rank)
    pool = Pool(
        _kind(node),
        x.dtype,
        windows.kernel,
        windows.strides,
        windows.dilations,
        is_last,
        lanes_along(ctx, y, is_last),
        node.attrs.get("p", 2),
    )
    pointers = {"x": ctx.ordered(x, order), "y": ctx.output(y, order)}
    family = f"{node.op}_{x.dtype}"
    kernel = ctx.kernel(family, pool, lambda module, name: emit_pool(module, name, pool))
    ctx.call(kernel, node, pointers, sizes_of(kernel, windows, x, y, is_last))


def windows_of(node: Node, rank: int) -> Windows:
    """The windows of a node; a `NoKernelError` unless the kernels can count their pixels."""
    attrs = node.attrs
    windows = make_windows(
        rank, attrs["kernel"], attrs.get("strides"), attrs.get("pads"), attrs.get("dilations")
    )
    if not all(isinstance(size, int) for size in windows.kernel):
        raise NoKernelError("the window has no fixed size")
    numbers = (*windows.extents, *windows.strides, *windows.begins, *windows.ends)
    if any(isinstance(number, int) and number > MAX_PLACE for number in numbers):
        raise NoKernelError("positions in the windows do not fit 32 bits")
    return windows


def sizes_of(
    kernel: KernelCode, windows: Windows, x: Value, y: Value, is_last: bool
) -> dict[str, Size]:
    """The sizes that a kernel asks for: x is what is pooled, y the result."""
    sizes: dict[str, Size] = {"images": x.shape[0] * (1 if is_last else x.shape[1])}
    sizes["channels"] = x.shape[1]
    named = {"in": x.shape[2:], "out": y.shape[2:], "begin": windows.begins, "end": windows.ends}
    sizes |= {
        f"{name}{axis}": size for name, all_ in named.items() for axis, size in enumerate(all_)
    }
    wanted = {slot.name for slot in kernel.signature.slots}
    return {name: size for name, size in sizes.items() if name in wanted}


def _kind(node: Node) -> str:
    if node.op == "avg_pool" and node.attrs["count_include_pad"]:
        return "avg_padded"
    return node.op.removesuffix("_pool")


def lanes_along(ctx: Lowering, y: Value, is_last: bool) -> int:
    """Lanes of a vector, fewer if their axis of the result is known to be short."""
    lanes = ctx.target.lanes(max(computed(y.dtype).bits, 32))
    along = y.shape[1] if is_last else y.shape[-1]
    while isinstance(along, int) and 1 < along < lanes:
        lanes //= 2
    return lanes
