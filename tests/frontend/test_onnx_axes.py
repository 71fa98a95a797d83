"""Axes that are an input of the model give the same as constant axes."""

import numpy as np
import pytest
from onnx import parser

import bitwright as bw
from bitwright.errors import RunError

X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)


def compiled(text):
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 18]>\n' + text)
    executable = bw.compile(bw.load(model))
    assert not list(executable.engine.fallbacks)
    return lambda x, *axes: executable.run({"x": x, "axes": np.array(axes, np.int64)})["y"]


@pytest.mark.parametrize("op", ["Sum", "Mean", "Max", "L2", "LogSumExp"])
def test_reductions_over_one_axis(op):
    y = compiled(f"m (float[A, 3, C] x, int64[1] axes) => (float[P, Q] y) "
                 f"{{ y = Reduce{op} <keepdims = 0>(x, axes) }}")  # fmt: skip
    wide = X.astype(np.float64)
    reduce = {
        "Sum": np.sum,
        "Mean": np.mean,
        "Max": np.max,
        "L2": lambda x, axis: np.sqrt(np.sum(x * x, axis)),
        "LogSumExp": lambda x, axis: np.log(np.sum(np.exp(x), axis)),
    }[op]
    for axis in (0, 1, 2, -1, -3):
        np.testing.assert_allclose(y(X, axis), reduce(wide, axis), rtol=1e-5)


def test_reductions_over_two_axes_in_any_order():
    y = compiled("m (float[2, 3, 4] x, int64[2] axes) => (float[P, Q, R] y) "
                 "{ y = ReduceSum <keepdims = 1>(x, axes) }")  # fmt: skip
    for axes in ((0, 1), (2, 0), (-1, 1), (1, -3)):
        np.testing.assert_allclose(y(X, *axes), X.sum(axes, keepdims=True), rtol=1e-5)
    with pytest.raises(RunError, match="the axes do not fit"):
        y(X, 1, -2)
    with pytest.raises(RunError, match="outside"):
        y(X, 0, 3)


def test_axes_of_other_ops():
    y = compiled("m (float[2, 3, 4] x, int64[1] axes) => (float[A, B, C] y) "
                 "{ y = CumSum(x, axes) }")  # fmt: skip
    for axis in (0, 1, -1):
        np.testing.assert_allclose(y(X, axis), X.cumsum(axis), rtol=1e-5)
    y = compiled("m (float[2, 3, 4] x, int64[2] axes) => (float[A, B, C, D, E] y) "
                 "{ y = Unsqueeze(x, axes) }")  # fmt: skip
    for axes in ((0, 1), (-1, 2), (4, 0)):
        np.testing.assert_array_equal(y(X, *axes), np.expand_dims(X, axes))
    y = compiled("m (float[1, 3, C] x, int64[1] axes) => (float[A, B] y) "
                 "{ y = Squeeze(x, axes) }")  # fmt: skip
    np.testing.assert_array_equal(y(X[:1], 0), X[0])
    np.testing.assert_array_equal(y(X[:1, :, :1], -1), X[:1, :, 0])


def test_few_axes_are_chosen_among():
    """Too many choices become an interpreter fallback."""
    text = ("m (float[A, B, C, D, E, F, G, H] x, int64[4] axes) => (float[P, Q, R, S] y) "
            "{ y = ReduceSum <keepdims = 0>(x, axes) }")  # fmt: skip
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 18]>\n' + text)
    assert [node.op for node in bw.load(model).nodes if not node.is_boundary] == ["host"]
