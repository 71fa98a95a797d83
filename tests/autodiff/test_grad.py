"""`bw.grad`: what can be differentiated by what, custom ops, and error messages."""

import numpy as np
import pytest
import torch

import bitwright as bw
from bitwright.errors import GraphError
from bitwright.ops.control.custom import custom, custom_attributes, register_custom
from bitwright.ops.core.interpret import run


def total(b, x):
    return b.reduce_sum(x, axes=tuple(range(x.rank)), keepdims=False)


def network():
    b = bw.Builder("net")
    x, w = b.input("x", "f32[n, 3]"), b.parameter("w", np.ones((3, 2), np.float32))
    b.parameter("unused", np.ones(2, np.float32), trainable=False)
    h = b.tanh(b.matmul(x, w), name="hidden")
    index = b.argmax(h, axis=1, name="index")
    return b.build(
        loss=total(b, b.mul(h, h)),
        rows=h,
        index=index,
        kept=b.reduce_sum(h, axes=(0, 1), keepdims=True),
        by_index=total(b, b.cast(index, to="f32")),
        positive=total(b, b.cast(b.gt(h, 0.0), to="f32")),
        hard=total(b, b.hardmax(h, axis=1)),
        rounded=total(b, b.round(h)),
    )


def rows(count=4):
    return np.random.default_rng(0).standard_normal((count, 3)).astype(np.float32)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss": "los"}, "has no output 'los' to be the loss; expected loss or rows.*'loss'?"),
        ({"loss": "rows"}, r"the loss 'rows' is not one number; found %hidden: f32\[n, 2\]"),
        ({"loss": "index"}, "the loss 'index' is not a real number"),
        ({"loss": "loss", "wrt": ["hiden"]}, "has no value 'hiden'. Did you mean 'hidden'?"),
        ({"loss": "loss", "wrt": ["index"]}, r"%index has no gradient: its type is i64"),
        ({"loss": "loss", "wrt": ["unused"]}, "the loss 'loss' does not depend on 'unused'"),
        ({"loss": "by_index"},
         "argmax %index: the loss 'by_index' depends on 'w' only through argmax, which has no "
         "gradient: an index is piecewise constant in x. Choose another loss"),
        ({"loss": "hard"},
         "hardmax %hardmax: the gradient of hardmax is asked for, and it has none: "
         "it is piecewise constant in x"),
    ],
)  # fmt: skip
def test_what_has_no_gradient_is_a_clear_error(options, message):
    with pytest.raises(GraphError, match=message):
        bw.grad(network(), **options)


def test_an_error_names_the_line_of_the_model():
    b = bw.Builder("net")
    x = b.input("x", "f32[3]")
    with b.at("model.py:7"):
        y = b.hardmax(x)
    with pytest.raises(GraphError, match=r"hardmax.*from model.py:7"):
        bw.grad(b.build(loss=total(b, y)), "loss", wrt=["x"])


def test_no_trainable_parameter_is_an_error():
    b = bw.Builder("net")
    graph = b.build(loss=total(b, b.input("x", "f32[3]")))
    with pytest.raises(GraphError, match=r"has no trainable parameter.*wrt="):
        bw.grad(graph, "loss")


def test_any_named_value_has_a_gradient():
    """Inputs, parameters, values in between and the loss itself; one name may be a string."""
    names = ["x", "w", "hidden", dict(network().outputs)["loss"].name]
    backward = bw.grad(network(), "loss", wrt=names)
    assert [name for name, _ in backward.outputs][-4:] == [f"grad.{name}" for name in names]
    x = torch.tensor(rows(), requires_grad=True)
    w = torch.ones(3, 2, requires_grad=True)
    hidden = torch.tanh(x @ w)
    loss = (hidden**2).sum()
    expected = torch.autograd.grad(loss, [x, w, hidden, loss])
    for found in (run(backward, {"x": rows()}), bw.compile(backward).run({"x": rows()})):
        for name, want in zip(names, expected, strict=True):
            np.testing.assert_allclose(found[f"grad.{name}"], want.numpy(), rtol=1e-5, atol=1e-6)
    (_, one), *_ = reversed(bw.grad(network(), "loss", wrt="hidden").outputs)
    assert one.shape == backward.value("hidden").shape


def test_a_loss_may_have_axes_of_size_1():
    found = run(bw.grad(network(), "kept"), {"x": rows()})["grad.w"]
    x, w = torch.tensor(rows()), torch.ones(3, 2, requires_grad=True)
    torch.tanh(x @ w).sum().backward()
    np.testing.assert_allclose(found, w.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["rounded", "positive"])
def test_steps_have_a_gradient_of_zero(loss):
    found = run(bw.grad(network(), loss), {"x": rows()})["grad.w"]
    np.testing.assert_array_equal(found, np.zeros((3, 2)))


def test_an_empty_batch_has_gradients_of_zero():
    backward = bw.grad(network(), "loss", wrt=["x", "w"])
    for found in (run(backward, {"x": rows(0)}), bw.compile(backward).run({"x": rows(0)})):
        assert found["grad.x"].shape == (0, 3)
        np.testing.assert_array_equal(found["grad.w"], np.zeros((3, 2)))


def cubes():
    """A custom op with its gradient by other ops: factor * x³ and its slope."""

    def slope(b, node, dys):
        (x,), factor = node.operands, custom_attributes(node)["factor"]
        return [b.mul(b.mul(dys[0], b.mul(x, x)), 3 * factor)]

    register_custom(
        "test.cube",
        infer=lambda x, factor: x,
        reference=lambda x, factor: (factor * x**3).astype(x.dtype),
        grad=slope,
        replace=True,
    )


@pytest.mark.parametrize("checkpoint", [None, ["cube"]])
def test_gradient_of_a_custom_op(checkpoint):
    cubes()
    b = bw.Builder("m")
    x = b.input("x", "f64[n]")
    y = b.identity(custom(b, "test.cube", b.sin(x), factor=2.0), name="cube")
    graph = b.build(loss=total(b, b.mul(y, y)))
    given = {"x": np.linspace(-1, 1, 5)}
    s, c = np.sin(given["x"]), np.cos(given["x"])
    backward = bw.grad(graph, "loss", wrt=["x"], checkpoint=checkpoint)
    for found in (run(backward, given), bw.compile(backward).run(given)):
        np.testing.assert_allclose(found["grad.x"], 24 * s**5 * c, rtol=1e-9, atol=1e-12)
    tangent = {"tangent.x": np.ones(5)}
    moved = run(bw.jvp(graph, ["x"]), {**given, **tangent})
    np.testing.assert_allclose(moved["tangent.loss"], (24 * s**5 * c).sum(), atol=1e-12)
    bent = run(bw.hvp(graph, "loss", ["x"]), {**given, **tangent})
    np.testing.assert_allclose(bent["hvp.x"], 120 * s**4 * c**2 - 24 * s**6, atol=1e-12)


@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda b, node, dys: [dys[0], dys[0]], "the gradient of custom gives 2 values.*at most 1"),
        (lambda b, node, dys: [total(b, dys[0])],
         r"the gradient of custom has another type than its operand; expected %x: f32\[3\]"),
        (lambda b, node, dys: [b.cast(dys[0], to="f64")], "has another type than its operand"),
    ],
)  # fmt: skip
def test_a_wrong_rule_of_a_custom_op_is_an_error(answer, message):
    register_custom(
        "test.wrong", infer=lambda x: x, reference=lambda x: x, grad=answer, replace=True
    )
    b = bw.Builder("m")
    y = custom(b, "test.wrong", b.input("x", "f32[3]"))
    with pytest.raises(GraphError, match=message):
        bw.grad(b.build(loss=total(b, y)), "loss", wrt=["x"])


@pytest.mark.parametrize("rms", [0.1, 1.0, 5.0])
def test_rms_norm_agrees_with_differences(rms):
    """In f64: a wrong power of the rate is right only where the rms is 1."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 7))
    x *= rms / np.sqrt((x**2).mean(axis=1, keepdims=True))
    b = bw.Builder("norm")
    scale, bias = (b.input(name, "f64[7]") for name in ("scale", "bias"))
    y = b.rms_norm(b.input("x", "f64[3, 7]"), scale, bias, eps=1e-6)
    graph = b.build(loss=total(b, b.mul(y, rng.standard_normal((3, 7)))))
    given = {"x": x, "scale": rng.standard_normal(7), "bias": rng.standard_normal(7)}
    found = run(bw.grad(graph, "loss", wrt=list(given)), given)
    for name, array in given.items():
        for at in np.ndindex(array.shape):
            step = np.zeros_like(array)
            step[at] = 1e-5 * rms
            ends = [run(graph, {**given, name: array + sign * step})["loss"] for sign in (1, -1)]
            expected = (ends[0] - ends[1]) / (2e-5 * rms)
            assert abs(found[f"grad.{name}"][at] - expected) <= 1e-6 * max(abs(expected), 1 / rms)
