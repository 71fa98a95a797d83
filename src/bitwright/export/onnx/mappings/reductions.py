"""Reductions, softmax, cumulative sums, top k and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitwright.export.onnx.bodies import scan
from bitwright.export.onnx.forms import reduce
from bitwright.export.onnx.mapping import Ref, Scope, exports
from bitwright.export.onnx.sizes import size_scalar, size_vector, sizes_tensor
from bitwright.ir.dim import Size
from bitwright.ir.dtype import bool_, f64, i64, u8
from bitwright.ir.types import normalize_axis

_REDUCTIONS = {
    "reduce_sum": "ReduceSum", "reduce_mean": "ReduceMean", "reduce_prod": "ReduceProd",
    "reduce_max": "ReduceMax", "reduce_min": "ReduceMin", "reduce_l1": "ReduceL1",
    "reduce_l2": "ReduceL2", "reduce_log_sum_exp": "ReduceLogSumExp",
}  # fmt: skip
_ON_FLOATS = ("reduce_l2", "reduce_log_sum_exp")


def _register(op: str, op_type: str) -> None:
    @exports(op)
    def write(e: Scope, x: Ref, axes: Sequence[int], keepdims: bool) -> Ref:
        if x.element == bool_:
            return e.cast(reduce(e, op_type, e.cast(x, u8), axes, keepdims), bool_)
        if x.element.is_integer and op in _ON_FLOATS:
            return e.cast(reduce(e, op_type, e.cast(x, f64), axes, keepdims), x.element)
        if x.element.is_integer and op == "reduce_mean":
            return _integer_mean(e, x, axes, keepdims)
        return reduce(e, op_type, x, axes, keepdims)


for _op, _op_type in _REDUCTIONS.items():
    _register(_op, _op_type)


def _integer_mean(e: Scope, x: Ref, axes: Sequence[int], keepdims: bool) -> Ref:
    """The sum divided with truncation; ONNX does not define the rounding of integer means."""
    count: Size = 1
    for axis in axes:
        count = count * x.shape[normalize_axis(axis, x.rank)]
    total = reduce(e, "ReduceSum", e.cast(x, i64), axes, keepdims)
    return e.cast(e.Div(total, size_scalar(e, count)), x.element)


def _same_attributes(op: str, op_type: str, **names: str) -> None:
    @exports(op)
    def write(e: Scope, x: Ref, **attrs: Any) -> Ref:
        return e.emit(op_type, [x], {names.get(name, name): v for name, v in attrs.items()})[0]


_same_attributes("softmax", "Softmax")
_same_attributes("log_softmax", "LogSoftmax")
_same_attributes("hardmax", "Hardmax")
_same_attributes("argmax", "ArgMax", select_last="select_last_index")
_same_attributes("argmin", "ArgMin", select_last="select_last_index")


@exports("top_k")
def top_k(
    e: Scope, x: Ref, count: Ref | None, k: Size | None, axis: int, largest: bool, sorted: bool
) -> tuple[Ref, ...]:
    if count is not None:
        number = count if count.rank else e.Unsqueeze(count, e.ints([0]))
    else:
        assert k is not None
        number = size_vector(e, k)
    # our op always sorts, also without `sorted`
    attrs = {"axis": axis, "largest": largest, "sorted": 1}
    return e.emit("TopK", [x, number], attrs, results=2)


@exports("cumsum")
def cumsum(e: Scope, x: Ref, axis: int, exclusive: bool, reverse: bool) -> Ref:
    return e.CumSum(x, e.constant(axis, i64), exclusive=exclusive, reverse=reverse)


@exports("cumprod")
def cumprod(e: Scope, x: Ref, axis: int, exclusive: bool, reverse: bool) -> Ref:
    """CumProd since opset 26; before, a scan that carries the product."""
    if e.fits("CumProd", [x]):
        return e.CumProd(x, e.constant(axis, i64), exclusive=exclusive, reverse=reverse)
    at = normalize_axis(axis, x.rank)
    if x.shape[at] == 0:
        return e.Identity(x)
    shape = (*x.shape[:at], *x.shape[at + 1 :])
    one = e.Expand(e.scalar(1, x), sizes_tensor(e, shape))
    row = x.element, shape

    def body(e: Scope, product: Ref, factor: Ref) -> list[Ref]:
        after = e.Mul(product, factor)
        return [after, e.Identity(product if exclusive else after)]

    return scan(e, "cumprod", one, [x], at, [row, row], row, body, reverse)[1]


@exports("cross_entropy", widens=False)
def cross_entropy(
    e: Scope,
    logits: Ref,
    labels: Ref,
    weights: Ref | None,
    ignore_index: int | None,
    reduction: str,
    from_log_probs: bool,
) -> Ref:
    op_type = "NegativeLogLikelihoodLoss" if from_log_probs else "SoftmaxCrossEntropyLoss"
    attrs = {"ignore_index": ignore_index, "reduction": reduction}
    return e.emit(op_type, [logits, labels, weights], attrs)[0]
