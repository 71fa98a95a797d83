"""Lowering of pooling, in the layout of the operand: channels first or last.

The loop over the window is unrolled. With channels last, places are computed per pixel and loads
are 16 bytes wide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from bitwright.backends.cpu.kernels.pool.lower_pool import windows_of
from bitwright.backends.cpu.lowering.layout import image_order
from bitwright.backends.gpu.codegen.expression import as_stored, loaded
from bitwright.backends.gpu.codegen.loads import masked_load
from bitwright.backends.gpu.codegen.source import Config, KernelSource, Work, cdiv
from bitwright.backends.gpu.codegen.types import triton_type, widened
from bitwright.backends.gpu.kernels.movement.indices import decode, flat_grid, flat_index, reach
from bitwright.backends.gpu.lowering.context import (
    GpuLowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, f16, u64
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View

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
    is_last = order[-1] == 1
    form = _Pixels(view, y) if is_last else _Elements(view, y, order)
    wide = _computed(node, x.dtype)
    lines = form.head
    for axis in range(2, x.rank):
        at = axis - 2
        lines.append(f"first{axis} = p{axis} * {windows.strides[at]} - begin{axis}")
    start = {"max_pool": str(_lowest(x.dtype)), "avg_pool": "0", "lp_pool": "0"}[node.op]
    lines += [
        f"found = tl.full([{form.tile}], {start}, {wide})",
        f"count = tl.zeros([{form.places}], tl.int32)",
    ]
    for tap in itertools.product(*(range(int(size)) for size in windows.kernel)):
        lines += _tap(node, x.dtype, form, tap, windows.dilations)
    lines += _finish(node, wide, form)
    lines.append(form.store(as_stored("found", x.dtype)))
    sizes: dict[str, Size] = {f"n{axis}": size for axis, size in enumerate(y.shape)}
    sizes |= {f"x_s{axis}": stride for axis, stride in enumerate(view.strides)}
    for axis in range(2, x.rank):
        sizes |= {
            f"m{axis}": x.shape[axis],
            f"begin{axis}": windows.begins[axis - 2],
            f"end{axis}": windows.ends[axis - 2],
        }
    if is_last:  # known sizes are constants of the kernel
        constant = {name: size for name, size in sizes.items() if isinstance(size, int)}
        constant.pop("n0", None)
        lines = [*(f"{name}: tl.constexpr = {size}" for name, size in constant.items()), *lines]
        sizes = {name: size for name, size in sizes.items() if name not in constant}
    source = KernelSource(
        f"{node.op}_{x.dtype}",
        "\n".join(lines),
        {"x": x.dtype, "y": x.dtype},
        tuple(sizes),
        form.configs(x.dtype),
        form.grid,
        work=Work(lambda size: 0.0),
    )
    why = "channels last" if is_last else "channels first"
    ctx.call(ctx.kernel(source), node, {"x": view, "y": y}, sizes, why=why)


class _Elements:
    """A program computes BLOCK results in memory order."""

    tile = places = "BLOCK"
    spread = ""
    """What makes a value per place a value per result."""
    mask = "inside"

    def __init__(self, view: View, y: View, order: tuple[int, ...]) -> None:
        names = [f"n{axis}" for axis in order]  # sizes of the result in memory order
        place = {axis: f"p{at}" for at, axis in enumerate(order)}
        self.rank = len(order)
        self.grid = flat_grid(names)
        self.head = [
            flat_index(y.count, reach(view)),
            f"ok = flat < {' * '.join(names)}",
            *decode("flat", names, "p"),
            f"row = x + {place[0]} * x_s0 + {place[1]} * x_s1",
        ]

    def at(self, offset: str) -> str:
        return offset

    def store(self, value: str) -> str:
        return f"tl.store(y + flat, {value}, ok)"

    def configs(self, element: DType) -> tuple[Config, ...]:
        return tuple(Config({"BLOCK": block}, 4, 1) for block in (256, 512, 128))


class _Pixels:
    """A program computes BP pixels × BC channels; the channels of a pixel are neighbours."""

    tile, places = "BP, BC", "BP"
    spread = "[:, None]"
    mask = "inside[:, None] & (columns < n1)[None, :]"

    def __init__(self, view: View, y: View) -> None:
        axes = [0, *range(2, len(y.shape))]
        self.rank, self._axes, self._shape = len(y.shape), axes, y.shape
        names = [f"n{axis}" for axis in axes]
        places = decode("pixel", names, "q")
        index = flat_index(y.count, reach(view)).replace("flat", "pixel").replace("BLOCK", "BP")
        self.head = [
            index,
            "columns = tl.program_id(1) * BC + tl.arange(0, BC)",
            f"ok = pixel < {' * '.join(names)}",
            *places,
            *(f"p{axis} = q{at}" for at, axis in enumerate(axes)),
            "row = x + p0 * x_s0",
        ]

    def at(self, offset: str) -> str:
        return f"({offset})[:, None] + columns[None, :]"

    def store(self, value: str) -> str:
        where = "y + (pixel * n1)[:, None] + columns[None, :]"
        return f"tl.store({where}, {value}, ok[:, None] & (columns < n1)[None, :])"

    def configs(self, element: DType) -> tuple[Config, ...]:
        known = self._shape[1]
        channels = known if isinstance(known, int) else 64
        wide = min(max(1 << (channels - 1).bit_length(), 1), 128)
        shapes = ((2048, 4), (1024, 4), (4096, 4), (4096, 8))
        return tuple(
            Config({"BP": max(count // wide, 1), "BC": wide}, warps, 1) for count, warps in shapes
        )

    def grid(self, size: Mapping[str, int]) -> Sequence[int]:
        sizes = [
            known if isinstance(known, int) else size[f"n{axis}"]
            for axis, known in enumerate(self._shape)
        ]
        pixels = math.prod(sizes[axis] for axis in self._axes)
        return cdiv(pixels, size["BP"]), cdiv(sizes[1], size["BC"])


def _computed(node: Node, element: DType) -> str:
    """The type of a window's result: the maximum of f16 needs no other."""
    return triton_type(_wide(node, element))


def _wide(node: Node, element: DType) -> DType:
    return f16 if node.op == "max_pool" and element == f16 else widened(element)


def _lowest(element: DType) -> int | str:
    return 'float("-inf")' if element.is_float else int(element.min)


def _tap(
    node: Node,
    element: DType,
    form: _Elements | _Pixels,
    tap: tuple[int, ...],
    dilations: tuple[int, ...],
) -> list[str]:
    """Statements that add one pixel of the windows."""
    lines, offset, inside, padded = [], "row", ["ok"], ["ok"]
    for axis in range(2, form.rank):
        shift = tap[axis - 2] * int(dilations[axis - 2])
        lines.append(f"a{axis} = first{axis} + {shift}")
        inside.append(f"(a{axis} >= 0) & (a{axis} < m{axis})")
        padded.append(f"(a{axis} < m{axis} + end{axis})")
        offset += f" + a{axis} * x_s{axis}"
    mask = " & ".join(inside)
    nothing = "0.0" if element.is_float else 0
    other = _lowest(element) if node.op == "max_pool" else nothing
    load = masked_load(form.at(offset), form.mask, other, element)
    is_half = _wide(node, element) == f16
    lines += [f"inside = {mask}", f"v = {load if is_half else loaded(load, element)}"]
    if node.op == "max_pool":
        nan = ", propagate_nan=tl.PropagateNan.ALL" if element.is_float else ""
        return [*lines, f"found = tl.maximum(found, v{nan})"]
    if node.op == "avg_pool":
        counted = " & ".join(padded) if node.attrs["count_include_pad"] else "inside"
        return [*lines, "found += v", f"count += ({counted}).to(tl.int32)"]
    return [*lines, f"found += {'tl.abs(v)' if node.attrs['p'] == 1 else 'v * v'}"]


def _finish(node: Node, wide: str, form: _Elements | _Pixels) -> list[str]:
    if node.op == "avg_pool":
        divide = "found / pixels" if wide == "tl.float64" else "tl.div_rn(found, pixels)"
        return [
            f"pixels = tl.maximum(count, 1).to({wide}){form.spread}",
            f"found = tl.where((count > 0){form.spread}, {divide}, 0.0)",
        ]
    if node.op == "lp_pool" and node.attrs["p"] == 2:
        return [f"found = {'tl.sqrt' if wide == 'tl.float64' else 'tl.sqrt_rn'}(found)"]
    return []
