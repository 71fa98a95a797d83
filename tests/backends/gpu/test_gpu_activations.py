"""Closed forms of activation functions: their accuracy, and which results are short."""

import math

import ml_dtypes
import numpy as np
import pytest
from on_gpu import compiled, node_graph

import bitwright as bw
from bitwright.backends.cpu.codegen.expression import Expression, Step, ValueRef
from bitwright.backends.gpu.codegen.activations import short_steps
from bitwright.ir.dtype import bf16, f32, i8, i16

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
X = np.concatenate([np.linspace(-12, 12, 4001), [0.0, 1e-6, -1e-6, 30.0, -30.0, 88.0, -200.0]])
normal = np.vectorize(lambda x: math.erfc(-x / math.sqrt(2)) / 2)


def exact(op, x, **attrs):
    with np.errstate(over="ignore"):
        if op == "tanh":
            return np.tanh(x)
        if op == "gelu" and attrs:
            return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        if op == "gelu":
            return x * normal(x)
        gate = 1 / (1 + np.exp(-x * attrs.get("alpha", 1)))
        return gate if op == "sigmoid" else x * gate


def test_gelu_in_f32_is_closer_than_the_formula():
    x = X.astype(np.float32)
    got = compiled(node_graph("gelu", x)).run({"x0": x})["y0"].astype(np.float64)
    want = exact("gelu", x.astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=1.2e-6, atol=2.5e-7)
    large = np.abs(want) > 1e-4
    np.testing.assert_allclose(got[large], want[large], rtol=1e-5)


@pytest.mark.parametrize(
    "op, attrs",
    [
        ("gelu", {}),
        ("gelu", {"approximate": "tanh"}),
        ("sigmoid", {}),
        ("silu", {}),
        ("swish", {"alpha": 1.5}),
        ("tanh", {}),
    ],
    ids=str,
)
def test_short_forms(op, attrs):
    """bf16 results are those of the exact function, or the next ones where it is near a tie."""
    x = X.astype(ml_dtypes.bfloat16)
    got = compiled(node_graph(op, x, **attrs)).run({"x0": x})["y0"].astype(np.float64)
    want = exact(op, x.astype(np.float64), **attrs)
    np.testing.assert_allclose(got, want, rtol=2.0**-8 + 3e-4, atol=1e-6)


def test_requantized_activations_differ_by_at_most_one():
    x = X.astype(np.float32)
    b = bw.Builder("short")
    y = b.gelu(b.input("x", f"f32[{len(x)}]"))
    exe = compiled(b.build(y=b.requantize(b.mul(y, np.float32(20)), to="i8")))
    want = np.clip(np.round(20 * exact("gelu", X)), -128, 127)
    assert np.abs(exe.run({"x": x})["y"] - want).max() <= 1


@pytest.mark.parametrize("op", ["gelu", "sigmoid", "silu", "tanh"])
def test_infinities_and_nan(op):
    x = np.array([np.inf, -np.inf, np.nan], ml_dtypes.bfloat16)
    graph = node_graph(op, x)
    with np.errstate(all="ignore"):
        want = bw.compile(graph, target="reference").run({"x0": x})["y0"]
    got = compiled(graph).run({"x0": x})["y0"]
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_short_steps():
    x = ValueRef(0)

    def found(*steps, inputs=(f32,)):
        return short_steps(Expression(inputs, steps, (len(steps),)))

    gelu, scaled = Step("gelu", (x,), (), f32), Step("mul", (ValueRef(1), 20.0), (), f32)
    whole = Step("requantize", (ValueRef(2),), (("to", i8),), i8)
    assert found(gelu, scaled) == [False, False]
    assert found(gelu, scaled, whole) == [True, True, True]
    fine = Step("requantize", (ValueRef(2),), (("to", i16),), i16)
    assert found(gelu, scaled, fine) == [False, False, False]
    assert found(gelu, Step("add", (ValueRef(1), x), (), f32), whole) == [False, True, True]
    assert found(Step("gelu", (x,), (), bf16), inputs=(bf16,)) == [True]
    assert found(gelu, Step("cast", (ValueRef(1),), (("to", bf16),), bf16)) == [True, True]
