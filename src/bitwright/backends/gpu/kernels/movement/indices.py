"""Index checks: an index outside is replaced by 0, and a fault is recorded for the host.

A kernel that uses this has the pointers `FAULT` and the size `node` (`Lowering.number`). Of several
faults any one remains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bitwright.backends.gpu.codegen.source import cdiv
from bitwright.backends.gpu.lowering.context import GpuLowering, NoKernelError
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, dtype, i64
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View, row_major

FAULT = {"fault": i64}


def checked_index(name: str, size: str, mask: str) -> list[str]:
    """Statements that count a negative index from the end and check it."""
    return [
        f"{name} = {name}.to(tl.int64)",
        f"{name}_place = tl.where({name} < 0, {name} + {size}, {name})",
        f"{name}_wrong = ({mask}) & (({name}_place < 0) | ({name}_place >= {size}))",
        f"tl.store(fault + 1 + {name} * 0, {name}, {name}_wrong)",
        f"tl.store(fault + {name} * 0, tl.cast(node, tl.int64) + {name} * 0, {name}_wrong)",
        f"{name} = tl.where({name}_wrong, 0, {name}_place)",
    ]


def index_type(value: Value) -> DType:
    """The element type of indices."""
    if not value.dtype.is_integer or value.dtype.bits < 8:
        raise NoKernelError(f"indices of type {value.dtype}")
    return value.dtype


def word(element: DType) -> DType:
    """The signed integer type of an element's width, for kernels that only copy."""
    width = element.numpy.itemsize
    if width not in (1, 2, 4, 8):
        raise NoKernelError(f"elements of type {element} are wider than a register")
    return dtype(f"i{8 * width}")


def grouped(ctx: GpuLowering, value: Value, shape: Sequence[Size]) -> View:
    """The value with merged axes; copied if its strides do not allow it."""
    view = ctx.view(value).reshape(tuple(shape))
    if view is not None:
        return view
    found = ctx.contiguous(value)
    return View(found.buffer, found.offset, tuple(shape), row_major(tuple(shape)))


def fault_operands(
    ctx: GpuLowering, node: Node, indexed: Value | None = None
) -> tuple[dict[str, View], dict[str, Size]]:
    """The fault buffer, and the number that names the node in it."""
    return {"fault": ctx.fault()}, {"node": ctx.number(node, indexed)}


def decode(index: str, sizes: Sequence[str], prefix: str) -> list[str]:
    """Statements that split a flat row-major index into `{prefix}0`, `{prefix}1`, ..."""
    lines, left = [], index
    for axis in range(len(sizes) - 1, 0, -1):
        lines.append(f"{prefix}{axis} = ({left}) % {sizes[axis]}")
        lines.append(f"{prefix}_left{axis} = ({left}) // {sizes[axis]}")
        left = f"{prefix}_left{axis}"
    return [*lines, f"{prefix}0 = {left}"]


def flat_index(*counts: Size) -> str:
    """The flat index of a program's elements; 32 bits where all counts are known to fit, because
    division of 64 bits is slow."""
    fits = all(isinstance(count, int) and count < 2**31 - 2**16 for count in counts)
    wide = "" if fits else ".to(tl.int64)"
    return f"flat = tl.program_id(0){wide} * BLOCK + tl.arange(0, BLOCK)"


def reach(view: View) -> Size:
    """The elements between the first and the last one of a view."""
    found: Size = 1
    for size, stride in zip(view.shape, view.strides, strict=True):
        found = found + size * (abs(stride) if isinstance(stride, int) else stride)
    return found


def flat_grid(names: Sequence[str]) -> Callable[[Mapping[str, int]], Sequence[int]]:
    """The grid over the product of sizes, BLOCK elements per program."""

    def grid(size: Mapping[str, int]) -> Sequence[int]:
        count = 1
        for name in names:
            count *= size[name]
        return (cdiv(count, size["BLOCK"]),)

    return grid
