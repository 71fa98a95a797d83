"""Matrix products: plain, with a low-rank update, and per expert.

    matmul           x @ w, as numpy.matmul
    lora_matmul      x @ w + scale * (x @ a) @ b + bias
    grouped_matmul   rows of x, sorted by expert, times the w of their expert

Integers are summed exactly: up to 8 bits give i32, 16 bits give i64, wider types stay as they are.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import DType, dtype, i32, i64
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType, broadcast_shapes
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import conjugate
from bitwright.ops.core.gradients import sum_to
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import composed
from bitwright.ops.shape.gather import check_shape

EXACT_IN_F64 = 2**53


def product_dtype(x: TensorType, w: TensorType) -> DType:
    """The element type of sums of products of x and w."""
    for what, type_ in (("x", x), ("w", w)):
        expect.number(what, type_)
    bits = max(x.dtype.bits, w.dtype.bits)
    if x.dtype.is_integer and w.dtype.is_integer and bits <= 16:
        return i32 if bits <= 8 else i64
    return expect.same_dtype(x, w)


def product_operands(x: Array, w: Array, terms: int) -> tuple[Array, Array]:
    """Both arrays in the type in which sums of `terms` products are computed.

    Integers use f64 if all sums are exact in f64, because BLAS is much faster than integer loops.
    """
    if not (dtype(x.dtype).is_integer and dtype(w.dtype).is_integer):
        return wide(x), wide(w)
    if _magnitude(x) * _magnitude(w) * terms < EXACT_IN_F64:
        return wide(x).astype(np.float64), wide(w).astype(np.float64)
    signed = x.dtype != np.uint64 or w.dtype != np.uint64
    return (wide(x).astype(np.int64), wide(w).astype(np.int64)) if signed else (x, w)


def _magnitude(x: Array) -> int:
    if not x.size:
        return 0
    whole = wide(x)
    return max(abs(int(whole.max())), abs(int(whole.min())))


def product_result(y: Array, x: Array) -> Array:
    """The result as i64 if x is an integer array."""
    return y.astype(np.int64) if dtype(x.dtype).is_integer and y.dtype == np.float64 else y


def multiply(x: Array, w: Array) -> Array:
    """x @ w in the wide type."""
    y = np.matmul(*product_operands(x, w, x.shape[-1]))
    return np.asarray(product_result(y, x))


def infer_matmul(x: TensorType, w: TensorType) -> TensorType:
    if not x.rank or not w.rank:
        raise InferenceError("a scalar has no matrix product", expected="rank 1 or more", found=x)
    element = product_dtype(x, w)
    expect.size("the contracted axis of w", w.shape[max(w.rank - 2, 0)], x.shape[-1])
    batch = broadcast_shapes(x.shape[:-2], w.shape[:-2])
    rows = x.shape[-2:-1]
    columns = w.shape[-1:] if w.rank > 1 else ()
    return TensorType(element, (*batch, *rows, *columns))


def add_bias(y: Array, bias: Array | None) -> Array:
    if bias is None:
        return y
    check_shape("bias", bias.shape, y.shape[-1:])
    return np.asarray(y + wide(bias))


def require_bias(bias: TensorType | None, element: DType, size: Size) -> None:
    if bias is not None:
        expect.rank("bias", bias, 1)
        expect.element("bias", bias, element)
        expect.size("bias", bias.shape[0], size)


def _infer_lora(
    x: TensorType,
    w: TensorType,
    a: TensorType,
    b: TensorType,
    bias: TensorType | None,
    scale: float,
) -> TensorType:
    for what, type_ in (("w", w), ("a", a), ("b", b)):
        expect.rank(what, type_, 2)
    expect.floating("x", x)
    y = infer_matmul(x, w)
    update = infer_matmul(infer_matmul(x, a), b)
    expect.same_dtype(y, update)
    expect.size("the last axis of b", update.shape[-1], y.shape[-1])
    require_bias(bias, y.dtype, y.shape[-1])
    return y


def _lora(x: Array, w: Array, a: Array, b: Array, bias: Array | None, scale: float) -> Array:
    return add_bias(multiply(x, w) + scale * (multiply(x, a) @ wide(b)), bias)


def _infer_grouped(x: TensorType, w: TensorType, counts: TensorType) -> TensorType:
    expect.rank("x", x, 2)
    expect.rank("w", w, 3)
    require_counts(counts, w.shape[0])
    expect.size("axis 1 of w", w.shape[1], x.shape[1])
    return TensorType(product_dtype(x, w), (x.shape[0], w.shape[2]))


def require_counts(counts: TensorType, experts: Size) -> None:
    expect.rank("counts", counts, 1)
    expect.element("counts", counts, i64)
    expect.size("counts", counts.shape[0], experts)


def multiply_grouped(x: Array, w: Array, counts: Array) -> Array:
    check_shape("counts", counts.shape, w.shape[:1])
    return np.concatenate(
        [multiply(rows, w[expert]) for expert, rows in enumerate(split_rows(x, counts))]
        or [np.zeros((0, w.shape[2]))]
    )


def split_rows(x: Array, counts: Array) -> list[Array]:
    if (counts < 0).any() or int(counts.sum()) != len(x):
        raise RunError(
            "the counts do not divide the rows of x",
            expected=f"counts of at least 0 that sum to {len(x)}",
            found=counts.tolist(),
        )
    ends = np.cumsum(counts)
    return [x[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _matmul_samples() -> list[Sample]:
    return [
        sample(draw(3, 5), draw(5, 4, seed=1)),
        sample(draw(2, 1, 3, 5), draw(4, 5, 6, seed=1)),
        sample(draw(5), draw(5, seed=1)),
        sample(draw(5), draw(2, 5, 3, seed=1)),
        sample(draw(2, 3, 5), draw(5, seed=1)),
        sample(draw(2, 0), draw(0, 3)),
        sample(draw(0, 4), draw(4, 3)),
        sample(draw(3, 5, dtype="f64"), draw(5, 4, dtype="f64", seed=1)),
        sample(draw(3, 5, dtype="bf16"), draw(5, 4, dtype="bf16", seed=1), tolerance=2e-2),
        sample(draw(3, 5, dtype="c64"), draw(5, 4, dtype="c64", seed=1)),
        sample(
            draw(3, 5, dtype="u8", low=0, high=255),
            draw(5, 4, dtype="i8", seed=1, low=-128, high=127),
        ),
        sample(draw(3, 5, dtype="i4", low=-8, high=7), draw(5, 4, dtype="u4", seed=1, high=15)),
        sample(draw(3, 5, dtype="i16", low=-9, high=9), draw(5, 4, dtype="i16", seed=1)),
        sample(draw(3, 5, dtype="i64", low=-9, high=9), draw(5, 4, dtype="i64", seed=1)),
    ]


def _lora_samples() -> list[Sample]:
    parts = draw(5, 4, seed=1), draw(5, 2, seed=2), draw(2, 4, seed=3)
    return [
        sample(draw(3, 5), *parts),
        sample(draw(2, 3, 5), *parts, draw(4, seed=4), scale=0.5),
        sample(draw(5), *parts, scale=2.0),
    ]


def _grouped_samples() -> list[Sample]:
    return [
        sample(draw(6, 5), draw(3, 5, 4, seed=1), np.array([2, 0, 4])),
        sample(draw(0, 5), draw(2, 5, 4, seed=1), np.array([0, 0])),
        sample(
            draw(3, 5, dtype="u8", high=255, low=0),
            draw(2, 5, 4, dtype="i8", seed=1, low=-128, high=127),
            np.array([1, 2]),
        ),
    ]


def _low_rank_flops(xs: Any, ys: Any) -> Any:
    rank = xs[2].shape[-1]
    return 2 * rank * (xs[0].count + ys[0].count)


def _op(name: str, inputs: str, **rest: Any) -> OpDef:
    return OpDef(name, Kind.COMPUTE, inputs, **rest)


def _grad_matmul(b: Builder, node: Node, dys: list[Any]) -> list[Any]:
    """dx = dy @ w^H, dw = x^H @ dy, summed over broadcast batches."""
    x, w = node.operands
    dy = dys[0]
    if x.rank == 1:
        dy, x = b.reshape(dy, shape=(*dy.shape[: w.rank - 2], 1, *w.shape[1:][-1:])), as_row(b, x)
    if w.rank == 1:
        dy, w = b.reshape(dy, shape=(*dy.shape, 1)), as_column(b, w)
    dx = sum_to(b, b.matmul(dy, conjugate(b, swap_last(b, w))), x)
    if w.rank == 2 and x.rank > 2:  # one product over all rows
        x, dy = (b.reshape(v, shape=(product(v.shape[:-1]), v.shape[-1])) for v in (x, dy))
    dw = sum_to(b, b.matmul(conjugate(b, swap_last(b, x)), dy), w)
    return [
        b.reshape(found, shape=given.shape) if given.rank == 1 else found
        for found, given in zip((dx, dw), node.operands, strict=True)
    ]


def _compose_lora(
    b: Builder, x: Value, w: Value, down: Value, up: Value, bias: Value | None, scale: float
) -> Any:
    update = b.matmul(b.matmul(x, down), up)
    y = b.add(b.matmul(x, w), update if scale == 1 else b.mul(update, scale))
    return y if bias is None else b.add(y, bias)


def _grad_grouped(b: Builder, node: Node, dys: list[Any]) -> list[Any]:
    x, w, counts = node.operands
    dx = b.grouped_matmul(dys[0], conjugate(b, swap_last(b, w)), counts)
    return [dx, b.grouped_matmul_backward_weight(dys[0], x, counts)]


def as_row(b: Builder, x: Value) -> Value:
    return cast(Value, b.reshape(x, shape=(1, *x.shape)))


def as_column(b: Builder, x: Value) -> Value:
    return cast(Value, b.reshape(x, shape=(*x.shape, 1)))


def swap_last(b: Builder, x: Value) -> Value:
    """The transpose of each matrix."""
    axes = range(x.rank)
    return cast(Value, b.transpose(x, perm=(*axes[:-2], x.rank - 1, x.rank - 2)))


OPDEFS = [
    _op(
        "matmul",
        "x, w",
        infer=infer_matmul,
        reference=multiply,
        flops=lambda xs, ys, attrs: 2 * ys[0].count * xs[0].shape[-1],
        samples=_matmul_samples,
        grad=_grad_matmul,
        takes_epilogue=True,
        onnx="MatMul",
        doc="x @ w as numpy.matmul; integers of up to 8 bits give i32, of 16 bits i64.",
    ),
    _op(
        "lora_matmul",
        "x, w, a, b, bias?",
        infer=_infer_lora,
        reference=_lora,
        flops=lambda xs, ys, attrs: 2 * ys[0].count * xs[0].shape[-1] + _low_rank_flops(xs, ys),
        samples=_lora_samples,
        grad=composed(_compose_lora),
        attrs={"scale": Attr("float", 1.0)},
        doc="x @ w + scale * (x @ a) @ b + bias, the product with a low-rank update of w.",
    ),
    _op(
        "grouped_matmul",
        "x, w, counts",
        infer=_infer_grouped,
        reference=multiply_grouped,
        flops=lambda xs, ys, attrs: 2 * ys[0].count * xs[0].shape[-1],
        samples=_grouped_samples,
        grad=_grad_grouped,
        doc="Rows of x are sorted by expert: the next counts[e] rows are multiplied by w[e].",
    ),
]
