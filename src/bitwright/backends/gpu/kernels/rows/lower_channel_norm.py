"""Lowering of group norm and instance norm: one program per image and group.

    y = (x - mean) * rstd * scale[channel] + bias[channel]

over the channels of a group and all pixels.
The group is read three times: for the mean, for the variance, and for the result.
"""

from __future__ import annotations

from bitwright.backends.cpu.lowering.region import split
from bitwright.backends.gpu.codegen.expression import loaded
from bitwright.backends.gpu.codegen.source import Config, KernelSource
from bitwright.backends.gpu.kernels.rows.formulas import Pass, norm_formula
from bitwright.backends.gpu.lowering.context import GpuLowering, RegionView, lowers
from bitwright.backends.gpu.lowering.operands import At, Tail
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import DType, f64
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View

BLOCK = 1024


@lowers("group_norm", "instance_norm")
def lower_group_norm(ctx: GpuLowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    x, *_ = (region.outer(value) for value in anchor.operands)
    weights = dict(zip(("scale", "bias"), anchor.inputs[1:], strict=False))
    given = {name: region.outer(value) for name, value in weights.items() if value is not None}
    ctx.require(x.dtype, *(value.dtype for value in given.values()))
    channels = x.shape[1]
    groups: Size = anchor.attrs.get("groups", channels)
    y = ctx.output(node.outputs[0])
    tail = Tail.of(ctx, region, split(region).after, y)
    views: dict[str, View] = {"x": ctx.contiguous(x)}
    views |= {name: ctx.contiguous(value) for name, value in given.items()}
    sizes: dict[str, Size] = {
        "programs": x.shape[0] * groups,
        "groups": groups,
        "per_group": channels // groups,
        "pixels": product(x.shape[2:]),
        "width": x.shape[-1],
    }
    formula = norm_formula("layer_norm", anchor.attrs["eps"], x.dtype)
    load = f"x = {loaded('tl.load(x_in + group * columns + at, ok, other=0.0)', x.dtype)}"
    lines = ["group = tl.program_id(0).to(tl.int64)", "columns = per_group * pixels"]
    for number, one in enumerate(formula.passes):
        lines += _pass(one, number, load, x.dtype)
    inside = [
        load,
        f"n = {formula.result}",
        "channel = (group % groups) * per_group + at // pixels",
    ]
    for name, sign in (("scale", "*"), ("bias", "+")):
        if name in given:
            weight = loaded(f"tl.load({name} + channel, ok, other=0.0)", given[name].dtype)
            inside.append(f"n = n {sign} {weight}")
    inside.append("flat = group * columns + at")
    place = At("(flat // width)", "(flat % width)", "ok", "")
    inside += tail.text("n", place, 0).split("\n")
    lines += _loop(inside)
    pointers: dict[str, DType] = {"x_in": x.dtype}
    pointers |= {name: value.dtype for name, value in given.items()}
    views["x_in"] = views.pop("x")
    source = KernelSource(
        f"group_norm_{x.dtype}",
        "\n".join(lines),
        {**pointers, **tail.pointers},
        (*sizes, *tail.sizes),
        (Config({"BLOCK": BLOCK}, 4, 1),),
        lambda size: (size["programs"],),
    )
    ctx.call(ctx.kernel(source), node, {**views, **tail.views}, {**sizes, **tail.values})


def _pass(one: Pass, number: int, load: str, element: DType) -> list[str]:
    name, type_ = f"sums{number}", "tl.float64" if element == f64 else "tl.float32"
    return [
        f"{name} = tl.zeros([1, BLOCK], {type_})",
        *_loop([load, f"{name} += tl.where(ok, {one.value}, 0.0)"]),
        f"total = tl.sum({name}, axis=1)[:, None]",
        *one.after,
    ]


def _loop(lines: list[str]) -> list[str]:
    head = ("at = start + tl.arange(0, BLOCK)[None, :]", "ok = at < columns")
    return ["for start in range(0, columns, BLOCK):", *(f"    {line}" for line in (*head, *lines))]
