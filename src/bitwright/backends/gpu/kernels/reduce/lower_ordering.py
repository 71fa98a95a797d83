"""Lowering of argmax, argmin, top_k, cumsum and cumprod along one axis.

argmax   lanes keep their best value and its index; the best lane is joined at the end
top_k    rows are sorted as 64-bit keys, the ordered bits of the value above the index
cumsum   blocks of a row are scanned, and the last sum is carried on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from bitwright.ir.dtype import DType, f32, f64, i32, i64, u64
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View, row_major

MAX_SORTED = 4096
_FAR = 1 << 62


def _operand(ctx: GpuLowering, region: RegionView) -> tuple[Arranged, DType, int]:
    """The prologue's operands with the axis last, and its element type."""
    anchor = region.anchor
    assert anchor is not None and anchor.inputs[0] is not None
    before = split(region).before
    ctx.require(before.dtype)
    if before.dtype == u64:
        raise NoKernelError("there is no kernel for u64")
    shape = anchor.inputs[0].shape
    axis = normalize_axis(anchor.attrs["axis"], len(shape))
    return Arranged.of(ctx, region, before, shape, [axis]), before.dtype, axis


def _computed(element: DType) -> DType:
    """The type that values are compared in."""
    if element.is_float:
        return f64 if element == f64 else f32
    return i64 if element.bits > 31 else i32


@lowers("argmax", "argmin")
def lower_arg_reduction(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    arranged, element, _ = _operand(ctx, region)
    assert region.anchor is not None
    is_last = region.anchor.attrs["select_last"]
    op, wide = region.anchor.op, _computed(element)
    y = ctx.output(node.outputs[0])
    splits = split_count(arranged)
    if splits == 1:
        _arg_call(ctx, node, node.name, (op, is_last, wide), arranged, None, 1, {"y": y})
        return
    kept = arranged.kept_count
    tops = ctx.scratch(f"{node.name}.tops", wide.name, kept * splits)
    places = ctx.scratch(f"{node.name}.places", "i64", kept * splits)
    parts = {"tops": tops, "y": places}
    _arg_call(ctx, node, node.name, (op, is_last, wide), arranged, None, splits, parts)
    shape = (kept, splits)
    views = [View(v.buffer, v.offset, shape, row_major(shape)) for v in (tops, places)]
    joined = Arranged(Part(Expression((wide,), (), (0,)), ()), {"x0": views[0]}, 1)
    name = f"{node.name}.join"
    _arg_call(ctx, node, name, (op, is_last, wide), joined, views[1], 1, {"y": y})


def _arg_call(
    ctx: GpuLowering,
    node: Node,
    name: str,
    form: tuple[str, bool, DType],
    arranged: Arranged,
    places: View | None,
    splits: int,
    results: dict[str, View],
) -> None:
    """`places` are the indices of the values, if these are parts; else their positions count."""
    op, is_last, wide = form
    type_ = triton_type(wide)
    worst = {"argmax": '-float("inf")', "argmin": 'float("inf")'}[op]
    if wide.is_integer:
        worst = str(int(wide.min if op == "argmax" else wide.max))
    far = -1 if is_last else _FAR
    sign = (">" if op == "argmax" else "<") + ("=" if is_last else "")
    better = f"(x {sign} best) | (seen == {far})"
    if wide.is_float:
        nan = "(x != x)" if is_last else "(x != x) & (best == best)"
        better = f"((({better}) & (best == best)) | ({nan}))"
    side = "max" if op == "argmax" else "min"
    index = "tl.load(places + k * reduced + r, ok, other=0)" if places is not None else "r"
    lines = [
        "k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]",
        *arranged.kept_lines(),
        f"share = tl.cdiv(reduced, {splits} * BLOCK) * BLOCK",
        "first = tl.program_id(1) * share",
        "last = tl.minimum(first + share, reduced)",
        f"best = tl.full([ROWS, BLOCK], {worst}, {type_})",
        f"seen = tl.full([ROWS, BLOCK], {far}, tl.int64)",
        "for start in range(first, last, BLOCK):",
        "    r = start + tl.arange(0, BLOCK)[None, :].to(tl.int64)",
        "    ok = (k < kept) & (r < last)",
        *(f"    {line}" for line in arranged.value_lines("ok")),
        f"    x = x.to({type_})",
        f"    better = ok & ({better})",
        "    best = tl.where(better, x, best)",
        f"    seen = tl.where(better, {index}, seen)",
        f"top = tl.{side}(tl.where(best == best, best, {worst}), axis=1)[:, None]",
        f"chosen = (best == top) & (seen != {far})",
    ]
    if wide.is_float:
        lines += [
            "is_nan = (best != best).to(tl.int32)",
            "any_nan = tl.max(is_nan, axis=1)[:, None]",
            "chosen = tl.where(any_nan > 0, is_nan > 0, chosen)",
            'top = tl.where(any_nan > 0, float("nan"), top)',
        ]
    pick = "max" if is_last else "min"
    lines.append(f"found = tl.{pick}(tl.where(chosen, seen, {far}), axis=1)[:, None]")
    spot = "k" if splits == 1 else f"k * {splits} + tl.program_id(1)"
    lines.append(f"tl.store(y + {spot}, found, k < kept)")
    if "tops" in results:
        lines.append(f"tl.store(tops + {spot}, top, k < kept)")

    def grid(size: Mapping[str, int]) -> Sequence[int]:
        return cdiv(size["kept"], size["ROWS"]), splits

    views = {**arranged.views, **results}
    if places is not None:
        views["places"] = places
    pointers = {n: v.dtype for n, v in views.items()}
    source = KernelSource(
        f"{op}_{wide}",
        "\n".join(lines),
        pointers,
        tuple(arranged.sizes),
        (Config(tile(arranged), 4, 2),),
        grid,
    )
    place: Node | str = node if name == node.name else name
    ctx.call(ctx.kernel(source), place, views, arranged.sizes, writes=tuple(results))


@lowers("cumsum", "cumprod")
def lower_scan(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    arranged, element, axis = _operand(ctx, region)
    attrs = region.anchor.attrs if region.anchor is not None else node.attrs
    is_sum, reverse = node.op == "cumsum", attrs["reverse"]
    wide = i64 if element.is_integer else _computed(element)
    identity, sign = ("0", "+") if is_sum else ("1", "*")
    y = ctx.output(node.outputs[0])
    order = (*(at for at in range(len(y.shape)) if at != axis), axis)
    target = y.transpose(order)
    sizes: dict[str, Size] = {**arranged.sizes, "step": target.strides[-1]}
    sizes["inner"] = target.strides[-1]
    shift = -1 if not reverse else 1
    source_at = f"(r + {shift})" if attrs["exclusive"] else "r"
    begin = "(blocks - 1 - number) * BLOCK" if reverse else "number * BLOCK"
    inside = [
        f"    start = {begin}",
        "    r = start + tl.arange(0, BLOCK)[None, :].to(tl.int64)",
        f"    from_r = {source_at}",
        "    ok = (k < kept) & (from_r >= 0) & (from_r < reduced)",
        *(f"    {line}" for line in arranged.value_lines("ok", "from_r")),
        f"    x = tl.where(ok, x.to({triton_type(wide)}), {identity})",
        f"    part = tl.{node.op}(x, axis=1, reverse={reverse}) {sign} carry",
        f"    edge = {'0' if reverse else 'BLOCK - 1'}",
        "    lane = tl.arange(0, BLOCK)[None, :]",
        "    carry = tl.sum(tl.where(lane == edge, part, 0), axis=1)[:, None]"
        f".to({triton_type(wide)})",
        "    tl.store(y + outer + r * step, "
        f"{_stored('part', y.dtype)}, (k < kept) & (r < reduced))",
    ]
    lines = [
        "k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]",
        *arranged.kept_lines(),
        # positions of the result: the kept axes around the scanned one
        "outer = (k // inner) * inner * reduced + k % inner",
        "blocks = tl.cdiv(reduced, BLOCK)",
        f"carry = tl.full([ROWS, 1], {identity}, {triton_type(wide)})",
        "for number in range(0, blocks):",
        *inside,
    ]
    source = KernelSource(
        f"{node.op}_{element}",
        "\n".join(lines),
        {**arranged.pointers, "y": y.dtype},
        tuple(sizes),
        (Config({"ROWS": 4, "BLOCK": 256}, 4, 1),),
        lambda size: (cdiv(size["kept"], size["ROWS"]),),
    )
    ctx.call(ctx.kernel(source), node, {**arranged.views, "y": y}, sizes, why="blocks of a row")


def _stored(text: str, element: DType) -> str:
    found = as_stored(text, element)
    return found if found != text else f"{text}.to({triton_type(element)})"


@lowers("top_k")
def lower_top_k(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    arranged, element, axis = _operand(ctx, region)
    assert region.anchor is not None
    count, largest = region.anchor.attrs.get("k"), region.anchor.attrs["largest"]
    columns = arranged.reduced
    if count is None or not isinstance(columns, int) or columns > MAX_SORTED:
        raise NoKernelError(f"rows of {columns} values are not sorted by one program")
    wide = _computed(element)
    if wide.bits > 32:
        raise NoKernelError(f"there is no kernel that sorts {element}")
    width = max(16, 1 << max(columns - 1, 0).bit_length())
    values, places = (ctx.output(value) for value in node.outputs)
    inner = values.transpose((*(a for a in range(len(values.shape)) if a != axis), axis)).strides[
        -1
    ]
    lines = [
        "k = tl.program_id(0).to(tl.int64) + tl.zeros([1, 1], tl.int64)",
        *arranged.kept_lines(),
        "r = tl.arange(0, BLOCK)[None, :].to(tl.int64)",
        "ok = r < reduced",
        *arranged.value_lines("ok"),
    ]
    if wide.is_float:
        lines += [
            'x = tl.where(x != x, float("nan"), x.to(tl.float32))',
            "x = tl.where(x == 0, 0.0, x)",
            "bits = x.to(tl.int32, bitcast=True)",
            "bits = tl.where(bits < 0, bits ^ 2147483647, bits).to(tl.int64)",
            "bits = tl.where(x != x, 2147483647, bits)",
        ]
    else:
        lines.append("bits = x.to(tl.int64)")
    key = f"({'-' if largest else ''}bits * 4294967296) + r"
    lines += [
        f"key = tl.where(ok, {key}, 9223372036854775807)",
        "key = tl.sort(key, dim=1)",
        "place = key & 4294967295",
        "inside = (r < top_count) & ok",
        "outer = (k // inner) * inner * top_count + k % inner + r * inner",
        "tl.store(places + outer, place, inside)",
        *arranged.value_lines("inside", "tl.where(inside, place, 0)"),
        f"tl.store(values + outer, {_stored('x', values.dtype)}, inside)",
    ]
    sizes: dict[str, Size] = {**arranged.sizes, "top_count": count, "inner": inner}
    source = KernelSource(
        f"top_k_{element}",
        "\n".join(lines),
        {**arranged.pointers, "values": values.dtype, "places": i64},
        tuple(sizes),
        (Config({"BLOCK": width}, 4 if width <= 1024 else 8, 1),),
        lambda size: (size["kept"],),
    )
    views = {**arranged.views, "values": values, "places": places}
    ctx.call(ctx.kernel(source), node, views, sizes, writes=("values", "places"), why="sorted rows")
