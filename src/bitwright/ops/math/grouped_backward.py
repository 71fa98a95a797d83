"""The gradient of grouped_matmul's weights.

dw[e] = x_e^H @ dy_e      with the rows x_e and dy_e of expert e
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.graph import Node
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.math.matmul import require_counts, split_rows, swap_last


def _infer(dy: TensorType, x: TensorType, counts: TensorType) -> TensorType:
    for what, type_ in (("dy", dy), ("x", x)):
        expect.dtype(what, type_, lambda d: d.is_float or d.is_complex, "a floating type")
        expect.rank(what, type_, 2)
    expect.same_dtype(dy, x)
    expect.size("the rows of x", x.shape[0], dy.shape[0])
    require_counts(counts, counts.shape[0] if counts.rank else 0)
    return dy.with_shape((counts.shape[0], x.shape[1], dy.shape[1]))


def _reference(dy: Array, x: Array, counts: Array) -> Array:
    result = np.zeros((len(counts), x.shape[1], dy.shape[1]), wide(dy).dtype)
    pairs = zip(split_rows(x, counts), split_rows(dy, counts), strict=True)
    for expert, (rows, gradients) in enumerate(pairs):
        result[expert] = wide(rows).conj().T @ wide(gradients)
    return result


def _grad(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    dy, x, counts = node.operands
    dx = b.grouped_matmul(dy, swap_last(b, dys[0]), counts)
    return [b.grouped_matmul(x, dys[0], counts), dx]


def _samples() -> list[Sample]:
    return [
        sample(draw(6, 4), draw(6, 5, seed=1), np.array([2, 0, 4])),
        sample(draw(0, 4), draw(0, 5), np.array([0, 0])),
        sample(draw(7, 1, dtype="f64"), draw(7, 17, dtype="f64", seed=1), np.array([7])),
        sample(
            draw(3, 2, dtype="bf16"), draw(3, 2, dtype="bf16"), np.array([1, 2]), tolerance=2e-2
        ),
    ]


OPDEFS = [
    OpDef(
        "grouped_matmul_backward_weight",
        Kind.COMPUTE,
        "dy, x, counts",
        infer=_infer,
        reference=_reference,
        grad=_grad,
        flops=lambda xs, ys, attrs: 2 * xs[0].count * xs[1].shape[-1],
        samples=_samples,
        doc="The gradient of grouped_matmul's weights: x.T @ dy over the rows of each expert.",
    )
]
