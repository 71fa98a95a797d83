"""Random numbers, sampling, and non-maximum suppression."""

from __future__ import annotations

from typing import Any

from bitwright.export.onnx.forms import as_scalar, reduce, slice_axis, squeeze, unsqueeze
from bitwright.export.onnx.mapping import Ref, Scope, exports, no_form
from bitwright.export.onnx.sizes import size_vector, sizes_tensor
from bitwright.ir.dim import Dim, Size, min_size
from bitwright.ir.dtype import DType, f32, f64, i64
from bitwright.ir.types import Shape


def _random(op: str, op_type: str) -> None:
    @exports(op, widens=False)
    def write(
        e: Scope, like: Ref | None, shape: Shape | None, dtype: DType | None, **attrs: Any
    ) -> Ref:
        if like is None and not any(isinstance(size, Dim) for size in shape or ()):
            element = dtype or f32
            attrs = {**attrs, "dtype": element, "shape": list(shape or ())}
            return e.emit(op_type, [], attrs, dtypes=[element])[0]
        if like is None:
            like = e.ConstantOfShape(sizes_tensor(e, shape or ()), dtypes=[f32])
        element = dtype or like.element
        attrs = {**attrs, "dtype": element}
        return e.emit(f"{op_type}Like", [like], attrs, dtypes=[element])[0]


_random("random_uniform", "RandomUniform")
_random("random_normal", "RandomNormal")


@exports("bernoulli", widens=False)
def bernoulli(e: Scope, x: Ref, dtype: DType | None, seed: float | None) -> Ref:
    element = dtype or x.element
    return e.emit("Bernoulli", [x], {"dtype": element, "seed": seed}, dtypes=[element])[0]


@exports("multinomial", widens=False)
def multinomial(e: Scope, x: Ref, sample_size: Size, dtype: DType, seed: float | None) -> Ref:
    if isinstance(sample_size, Dim):
        raise e.reject("Multinomial takes no symbolic number of samples")
    attrs = {"sample_size": sample_size, "dtype": dtype, "seed": seed}
    return e.emit("Multinomial", [x], attrs, dtypes=[dtype])[0]


@exports("sample", widens=False)
def sample(
    e: Scope, logits: Ref, uniform: Ref, temperature: float, top_k: int, top_p: float
) -> Ref:
    """Sampling in order of falling score, in f64, so that a draw near an edge gives the same."""
    if temperature == 0:
        return e.ArgMax(logits, axis=1, keepdims=0)
    count = logits.shape[1]
    kept = min_size(top_k, count) if top_k else count
    wide = e.cast(logits, f64)
    scores, order = e.emit("TopK", [wide, size_vector(e, kept)], {"axis": 1}, results=2)
    if temperature != 1:
        scores = e.Div(scores, e.scalar(temperature, scores))
    chances = e.Softmax(scores, axis=1)
    axis = e.constant(1, i64)
    if top_p < 1:
        before = e.Sub(e.CumSum(chances, axis), chances)
        stays = e.Less(before, e.scalar(top_p, before))
        chances = e.Where(stays, chances, e.scalar(0, chances))
    edges = e.CumSum(chances, axis)
    mark = e.Mul(unsqueeze(e, e.cast(uniform, f64), 1), slice_axis(e, edges, 1, -1))
    passed = reduce(e, "ReduceSum", e.cast(e.LessOrEqual(edges, mark), i64), [1])
    possible = e.cast(e.Greater(chances, e.scalar(0, chances)), i64)
    last = e.Sub(reduce(e, "ReduceSum", possible, [1]), e.constant(1, i64))
    return squeeze(e, e.GatherElements(order, e.Min(passed, last), axis=1), 1)


@exports("non_max_suppression", widens=False)
def non_max_suppression(
    e: Scope,
    boxes: Ref,
    scores: Ref,
    max_output: Ref | None,
    iou_threshold: Ref | None,
    score_threshold: Ref | None,
    center_point_box: bool,
) -> Ref:
    def limit(x: Ref | None, element: DType) -> Ref | None:
        return None if x is None else as_scalar(e, e.cast(x, element))

    return e.NonMaxSuppression(
        e.cast(boxes, f32),
        e.cast(scores, f32),
        limit(max_output, i64),
        limit(iou_threshold, f32),
        limit(score_threshold, f32),
        center_point_box=center_point_box,
    )


no_form("dropout", reason="ONNX draws other masks; save the model in evaluation form (eval_mode)")
