"""Lowering of reductions over any axes, of sums in a fixed order.

A program reduces ROWS kept positions, BLOCK reduced positions at a time; lanes are joined at the
end. If few programs would reduce many positions, they share them, and a second kernel joins their
parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.expression import Expression
from bitwright.backends.cpu.lowering.region import Part, split
from bitwright.backends.gpu.codegen.expression import as_stored
from bitwright.backends.gpu.codegen.source import Config, KernelSource, cdiv
from bitwright.backends.gpu.codegen.types import triton_type
from bitwright.backends.gpu.kernels.reduce.arranged import Arranged, split_count, tile
from bitwright.backends.gpu.lowering.context import (
    GpuLowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, bool_, f32, f64, i32, i64, u64
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View, row_major

NAMES = ("sum", "mean", "prod", "max", "min", "l1", "l2", "log_sum_exp")
_MULTIPLY = """
@triton.jit
def multiply(a, b):
    return a * b
"""


@dataclass(frozen=True)
class Form:
    """One reduction: of elements, or of parts of it (`joins`)."""

    op: str
    element: DType
    joins: bool = False

    @property
    def accumulator(self) -> DType:
        if self.element.is_float:
            return f64 if self.element == f64 else f32
        if self.op in ("l2", "log_sum_exp"):
            return f64
        return i32 if self.element == bool_ else i64

    @property
    def type_name(self) -> str:
        return triton_type(self.accumulator)

    @property
    def is_extreme(self) -> bool:
        return self.op in ("max", "min")

    @property
    def identity(self) -> str:
        if self.op == "prod":
            number: float | int = 1
        elif self.is_extreme and self.accumulator.is_float:
            sign = "-" if self.op == "max" else ""
            return f'tl.full([], float("{sign}inf"), {self.type_name})'
        elif self.is_extreme:
            number = int(self.element.min if self.op == "max" else self.element.max)
        else:
            number = 0
        return f"tl.full([], {number}, {self.type_name})"

    @property
    def value(self) -> str:
        """What is accumulated for an element x."""
        wide = f"x.to({self.type_name})"
        if self.joins:
            return wide
        return {"l1": f"tl.abs({wide})", "l2": f"{wide} * {wide}"}.get(self.op, wide)

    def join(self, a: str, b: str) -> str:
        if self.op == "prod":
            return f"{a} * {b}"
        if self.is_extreme:
            sign = ">" if self.op == "max" else "<"
            nan = f" | ({a} != {a})" if self.accumulator.is_float else ""
            return f"tl.where(({a} {sign} {b}){nan}, {a}, {b})"
        return f"{a} + {b}"

    def joined_lanes(self, name: str) -> list[str]:
        """Statements for `total` [ROWS, 1]."""
        if self.op == "prod":
            return [f"total = tl.reduce({name}, 1, multiply)[:, None]"]
        if not self.is_extreme:
            return [f"total = tl.sum({name}, axis=1)[:, None]"]
        lines = [f"total = tl.{self.op}({name}, axis=1)[:, None]"]
        if self.accumulator.is_float:
            nan = f"tl.max(({name} != {name}).to(tl.int32), axis=1)[:, None]"
            lines.append(f'total = tl.where({nan} > 0, float("nan"), total)')
        return lines

    def result(self) -> list[str]:
        """Statements that finish `total`."""
        if self.op == "mean" and self.element.is_float:
            divide = "total / {0}" if self.accumulator == f64 else "tl.div_rn(total, {0})"
            return ["total = " + divide.format(f"tl.cast(count, {self.type_name})")]
        if self.op == "mean":
            return ["total = total // count"]
        if self.op == "l2":
            return [f"total = {root(self.accumulator)}(total)"]
        return []


@lowers(*(f"reduce_{name}" for name in NAMES))
def lower_reduction(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None and anchor.inputs[0] is not None
    shape = anchor.inputs[0].shape
    axes = sorted({normalize_axis(axis, len(shape)) for axis in anchor.attrs["axes"]})
    before = split(region).before
    ctx.require(before.dtype)
    form = Form(anchor.op.removeprefix("reduce_"), before.dtype)
    if before.dtype == u64 or (form.op == "mean" and before.dtype.is_integer):
        raise NoKernelError(f"there is no kernel for the {form.op} of {before.dtype}")
    arranged = Arranged.of(ctx, region, before, shape, axes)
    y = ctx.output(node.outputs[0])
    splits = 1 if form.op == "log_sum_exp" else split_count(arranged)
    if splits == 1:
        why = "a reduced axis in lanes" if arranged.along_rows else "kept columns in lanes"
        _call(ctx, node, node.name, form, arranged, 1, y, why, arranged.reduced)
        return
    kept = arranged.kept_count
    parts = ctx.scratch(f"{node.name}.parts", form.accumulator.name, kept * splits)
    why = f"{splits} programs share the positions of a row"
    _call(ctx, node, node.name, form, arranged, splits, parts, why, arranged.reduced)
    joined = Arranged(_identity(form.accumulator), {"x0": _matrix(parts, kept, splits)}, 1)
    last = Form(form.op, form.element, joins=True)
    _call(ctx, node, f"{node.name}.join", last, joined, 1, y, "parts in order", arranged.reduced)


def root(element: DType) -> str:
    """The function of the square root, rounded to nearest."""
    return "tl.sqrt" if element == f64 else "tl.sqrt_rn"


def _identity(element: DType) -> Part:
    return Part(Expression((element,), (), (0,)), ())


def _matrix(view: View, rows: Size, columns: Size) -> View:
    return View(view.buffer, view.offset, (rows, columns), row_major((rows, columns)))


def _call(
    ctx: GpuLowering,
    node: Node,
    name: str,
    form: Form,
    arranged: Arranged,
    splits: int,
    y: View,
    why: str,
    count: Size,
) -> None:
    is_last = splits == 1
    result = y.dtype
    sizes = {**arranged.sizes, "count": count}
    loop = [
        "r = start + tl.arange(0, BLOCK)[None, :].to(tl.int64)",
        "ok = (k < kept) & (r < last)",
        *arranged.value_lines("ok"),
    ]
    lines = [
        "k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]",
        *arranged.kept_lines(),
        f"share = tl.cdiv(reduced, {splits} * BLOCK) * BLOCK",
        "first = tl.program_id(1) * share",
        "last = tl.minimum(first + share, reduced)",
    ]
    if form.op == "log_sum_exp":
        lines += _log_sum_exp(form, loop)
    else:
        lines += [
            f"sums = tl.zeros([ROWS, BLOCK], {form.type_name}) + {form.identity}",
            "for start in range(first, last, BLOCK):",
            *(f"    {line}" for line in loop),
            f"    part = tl.where(ok, {form.value}, {form.identity})",
            f"    sums = {form.join('sums', 'part')}",
            *form.joined_lanes("sums"),
        ]
    if is_last:
        lines += form.result()
        to = as_stored("total", result)
        to = to if to != "total" else f"total.to({triton_type(result)})"
        lines.append(f"tl.store(y + k, {to}, k < kept)")
    else:
        lines.append(f"tl.store(y + k * {splits} + tl.program_id(1), total, k < kept)")

    def grid(size: Mapping[str, int]) -> Sequence[int]:
        return cdiv(size["kept"], size["ROWS"]), splits

    source = KernelSource(
        f"reduce_{form.op}_{form.element}",
        "\n".join(lines),
        {**arranged.pointers, "y": y.dtype},
        tuple(sizes),
        (Config(tile(arranged), 4, 2),),
        grid,
        helpers=_MULTIPLY if form.op == "prod" else "",
    )
    place: Node | str = node if name == node.name else name
    ctx.call(ctx.kernel(source), place, {**arranged.views, "y": y}, sizes, why=why)


def _log_sum_exp(form: Form, loop: Sequence[str]) -> list[str]:
    """Two passes: the maximum, then ln of the sum of e^(x - maximum)."""
    top = Form("max", form.accumulator)
    inside = [f"    {line}" for line in loop]
    head = "for start in range(first, last, BLOCK):"
    return [
        f"tops = tl.zeros([ROWS, BLOCK], {form.type_name}) + {top.identity}",
        head,
        *inside,
        f"    part = tl.where(ok, x.to({form.type_name}), {top.identity})",
        f"    tops = {top.join('tops', 'part')}",
        *top.joined_lanes("tops"),
        'shift = tl.where(tl.abs(total) == float("inf"), 0.0, total)',
        f"sums = tl.zeros([ROWS, BLOCK], {form.type_name})",
        head,
        *inside,
        f"    sums += tl.where(ok, tl.exp(x.to({form.type_name}) - shift), 0.0)",
        "total = tl.log(tl.sum(sums, axis=1)[:, None]) + shift",
    ]
