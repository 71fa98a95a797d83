"""Matrix products, linear layers, convolutions and linear algebra."""

from __future__ import annotations

from typing import Any

from bitwright.frontend.torch.aten.create import eye
from bitwright.frontend.torch.context import Context, maps
from bitwright.ir.dtype import i32
from bitwright.ir.graph import Value


def transposed(ctx: Context, x: Value) -> Value:
    """`x` with its last two axes exchanged."""
    return ctx.transpose(x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])


@maps("matmul.default", "mm.default", "bmm.default", "mv.default", "dot.default", "vdot.default")
def matmul(ctx: Context, x: Value, w: Value) -> Value:
    return ctx.operand(ctx.b.matmul(x, w))


@maps("linear.default")
def linear(ctx: Context, x: Value, w: Value, bias: Value | None = None) -> Value:
    y = ctx.b.matmul(x, transposed(ctx, w) if w.rank > 1 else w)
    return y if bias is None else ctx.b.add(y, bias)


def _scaled(ctx: Context, x: Value, factor: Any) -> Value:
    if isinstance(factor, (int, float)) and factor == 1:
        return x
    return ctx.b.mul(x, ctx.operand(factor))


@maps("addmm.default", "addmv.default", "baddbmm.default")
def addmm(ctx: Context, x: Value, a: Value, w: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    y = _scaled(ctx, ctx.operand(ctx.b.matmul(a, w)), alpha)
    if isinstance(beta, (int, float)) and beta == 0:
        return y
    return ctx.b.add(_scaled(ctx, ctx.operand(x), beta), y)


@maps("addbmm.default")
def addbmm(ctx: Context, x: Value, a: Value, w: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    total = ctx.b.reduce_sum(ctx.b.matmul(a, w), axes=[0], keepdims=False)
    return ctx.b.add(_scaled(ctx, x, beta), _scaled(ctx, total, alpha))


@maps("einsum.default")
def einsum(ctx: Context, equation: str, xs: list[Value], path: Any = None) -> Value:
    return ctx.b.einsum(*(ctx.operand(x) for x in xs), equation=equation)


@maps("bilinear.default")
def bilinear(ctx: Context, x: Value, y: Value, w: Value, bias: Value | None = None) -> Value:
    product = ctx.b.einsum(x, w, y, equation="...i,oij,...j->...o")
    return product if bias is None else ctx.b.add(product, bias)


@maps("convolution.default")
def convolution(
    ctx: Context,
    x: Value,
    w: Value,
    bias: Value | None,
    stride: list[int],
    padding: list[Any],
    dilation: list[int],
    is_transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Value:
    rank = x.rank - 2

    def each(values: list[Any]) -> list[Any]:
        return list(values) * rank if len(values) == 1 else list(values)

    attrs = {
        "strides": ctx.static(each(stride), "the stride of a convolution"),
        "pads": each(padding) * 2,
        "dilations": ctx.static(each(dilation), "the dilation of a convolution"),
        "groups": groups,
    }
    if not is_transposed:
        return ctx.b.conv(x, w, bias, **attrs)
    attrs["output_padding"] = ctx.static(each(output_padding), "the padding of the output")
    return ctx.b.conv_transpose(x, w, bias, **attrs)


@maps("col2im.default")
def col2im(
    ctx: Context,
    x: Value,
    output_size: list[Any],
    kernel_size: list[int],
    dilation: list[int],
    padding: list[int],
    stride: list[int],
) -> Value:
    batched = x if x.rank == 3 else ctx.unsqueeze(x, 0)
    image = ctx.b.col2im(
        batched,
        image_shape=tuple(output_size),
        block_shape=kernel_size,
        dilations=dilation,
        pads=list(padding) * 2,
        strides=stride,
    )
    return image if x.rank == 3 else ctx.squeeze(image, 0)


# linear algebra


@maps("linalg_det.default", "det.default")
def det(ctx: Context, x: Value) -> Value:
    return ctx.b.det(x)


@maps("linalg_solve.default", "_linalg_solve_ex.default", "linalg_solve_ex.default")
def solve(ctx: Context, a: Value, right: Value, left: bool = True, **_: Any) -> Any:
    if not left:
        y = transposed(ctx, ctx.b.solve(transposed(ctx, a), transposed(ctx, right)))
    elif right.rank == a.rank - 1:  # a vector, or a batch of them
        y = ctx.squeeze(ctx.b.solve(a, ctx.unsqueeze(right, -1)), -1)
    else:
        y = ctx.b.solve(a, right)
    if len(ctx.results) == 1:
        return y
    return [y, *[None] * (len(ctx.results) - 2), _info(ctx, a)]


def _info(ctx: Context, x: Value) -> Value:
    """Torch's `info` of each matrix, 0; a singular matrix raises an error at run time."""
    return ctx.full(0, x.shape[:-2], i32)


@maps("linalg_inv.default", "inverse.default", "linalg_inv_ex.default")
def inverse(ctx: Context, x: Value, **_: Any) -> Any:
    identity = eye(ctx, x.shape[-1])
    y = ctx.b.solve(x, ctx.expand(identity, x.shape))
    return y if len(ctx.results) == 1 else [y, _info(ctx, x)]


@maps("_linalg_slogdet.default")
def slogdet(ctx: Context, x: Value) -> list[Value | None]:
    value = ctx.b.det(x)
    return [ctx.b.sign(value), ctx.b.log(ctx.b.abs(value)), None, None]
