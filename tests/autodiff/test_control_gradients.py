"""Gradients through if, loop and scan, against the same computation without control flow."""

import numpy as np
import pytest

from bitwright.autodiff.grad import grad
from bitwright.compiler import compile
from bitwright.errors import GraphError
from bitwright.ops.control.custom import custom, register_custom
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run

STEPS = 4


def total(b, x):
    return b.reduce_sum(x, axes=tuple(range(x.rank)), keepdims=False)


def cell(b, h, x, w):
    return b.tanh(b.add(b.matmul(h, w), x))


def feeds(batch=3, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {
        "h": rng.standard_normal((batch, 5)).astype(dtype),
        "xs": rng.standard_normal((STEPS, batch, 5)).astype(dtype),
        "w": (rng.standard_normal((5, 5)) / 3).astype(dtype),
    }


def interface(name, dtype="f32"):
    b = Builder(name)
    h, xs = b.input("h", f"{dtype}[n, 5]"), b.input("xs", f"{dtype}[{STEPS}, n, 5]")
    return b, h, xs, b.input("w", f"{dtype}[5, 5]")


def finish(b, h, rows):
    """The loss of the last state and of all states."""
    return b.build(loss=b.add(total(b, b.mul(h, 3.0)), total(b, b.mul(rows, rows))))


def unrolled(backwards=False):
    b, h, xs, w = interface("unrolled")
    rows = []
    for i in reversed(range(STEPS)) if backwards else range(STEPS):
        h = cell(b, h, b.reshape(b.gather(xs, np.array([i]), axis=0), shape=h.shape), w)
        rows.append(b.reshape(h, shape=(1, *h.shape)))
    return finish(b, h, b.concat(*rows, axis=0))


def scanned(backwards=False, inner=None):
    body, h, _, _ = Builder("body"), None, None, None
    h, x, w = (
        body.input("h", "f32[m, 5]"),
        body.input("x", "f32[m, 5]"),
        body.input("w", "f32[5, 5]"),
    )
    new = (inner or cell)(body, h, x, w)
    attrs = {"body": body.build(h=new, row=new), "carried": 1, "scanned": 1}
    if backwards:
        attrs |= {"input_directions": [1], "output_directions": [0]}
    b, h, xs, w = interface("scanned")
    last, rows = b.node("scan", [h, xs, w], attrs, []).outputs
    return finish(b, last, rows)


def looped(condition=False):
    body = Builder("body")
    step, going = body.input("step", "i64[]"), body.input("going", "bool[]")
    h, xs = body.input("h", "f32[m, 5]"), body.input("xs", f"f32[{STEPS}, m, 5]")
    w = body.input("w", "f32[5, 5]")
    new = cell(body, h, body.gather(xs, step, axis=0), w)
    keep = body.lt(step, STEPS - 1) if condition else going
    attrs = {"body": body.build(keep=keep, h=new, row=new), "carried": 1}
    b, h, xs, w = interface("looped")
    start = [None, b.constant(np.array(True))] if condition else [b.constant(np.array(STEPS)), None]
    last, rows = b.node("loop", [*start, h, xs, w], attrs, []).outputs
    return finish(b, last, rows)


def chosen(b, h, x, w):
    """The cell inside an if that takes its first body."""

    def branch(name, factor):
        inner = Builder(name)
        h, x = inner.input("h", "f32[k, 5]"), inner.input("x", "f32[k, 5]")
        w = inner.input("w", "f32[5, 5]")
        return inner.build(y=inner.mul(cell(inner, h, x, w), factor))

    condition = b.lt(b.reduce_max(b.abs(h), axes=[0, 1], keepdims=False), 100.0)
    attrs = {"then": branch("then", 1.0), "else": branch("else", 7.0)}
    return b.node("if", [condition, h, x, w], attrs, []).outputs[0]


def nested(b, h, x, w):
    """The cell inside a loop of one iteration."""
    inner = Builder("inner")
    _, going = inner.input("step", "i64[]"), inner.input("going", "bool[]")
    g, y = inner.input("g", "f32[k, 5]"), inner.input("y", "f32[k, 5]")
    v = inner.input("v", "f32[5, 5]")
    body = inner.build(going=going, g=cell(inner, g, y, v))
    operands = [b.constant(np.array(1)), None, h, x, w]
    return b.node("loop", operands, {"body": body, "carried": 1}, []).outputs[0]


def assert_equal_gradients(graph, expected, given):
    names = ["h", "xs", "w"]
    want = run(grad(expected, "loss", wrt=names), given)
    backward = grad(graph, "loss", wrt=names)
    for found in (run(backward, given), compile(backward).run(given)):
        for name in ("loss", *(f"grad.{n}" for n in names)):
            assert found[name].shape == want[name].shape
            np.testing.assert_allclose(found[name], want[name], rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(
    "graph, expected",
    [
        (scanned, unrolled),
        (lambda: scanned(backwards=True), lambda: unrolled(backwards=True)),
        (looped, unrolled),
        (lambda: looped(condition=True), unrolled),
        (lambda: scanned(inner=chosen), unrolled),
        (lambda: scanned(inner=nested), unrolled),
    ],
    ids=["scan", "scan-backwards", "loop", "while", "if-in-scan", "loop-in-scan"],
)
def test_gradient_equals_that_of_the_unrolled_graph(graph, expected):
    assert_equal_gradients(graph(), expected(), feeds())
    assert_equal_gradients(graph(), expected(), feeds(batch=1))


@pytest.mark.parametrize("make", [scanned, looped, lambda: scanned(inner=chosen)])
def test_recomputation_keeps_gradients(make):
    """Loops and branches in a segment are computed again."""
    graph = make()
    b = Builder.of(graph)
    again = b.tanh(b.mul(graph.outputs[0][1], 0.1), name="late")
    b.outputs = {"loss": b.mul(again, again)}
    graph, given = b.build(), feeds()
    expected = run(grad(graph, "loss", wrt=["h", "xs", "w"]), given)
    backward = grad(graph, "loss", wrt=["h", "xs", "w"], checkpoint=["late"])
    assert any(node.name.startswith("again.") for node in backward.nodes)
    found = run(backward, given)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_forward_iterations_run_once():
    backward = grad(scanned(), "loss", wrt=["w"])
    assert [node.op for node in backward.nodes].count("scan") == 2


def test_operands_that_are_not_wanted_have_no_gradient_in_the_body():
    backward = grad(scanned(), "loss", wrt=["h"])
    reverse = [node for node in backward.nodes if node.op == "scan"][-1]
    assert reverse.attrs["carried"] == 1  # no sum for w
    assert len(reverse.outputs) == 1  # no rows for xs


def test_second_derivative_through_a_scan():
    def squared(graph):
        first = grad(graph, "loss", wrt=["w"])
        b = Builder.of(first)
        slope = first.value(dict(first.outputs)["grad.w"].name)
        b.outputs = {"loss": total(b, b.mul(slope, slope))}
        return grad(b.build(), "loss", wrt=["h", "w"])

    given = feeds()
    want, found = run(squared(unrolled()), given), run(squared(scanned()), given)
    for name, array in want.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-3)


def test_loop_without_iterations_passes_the_gradient_on():
    body = Builder("body")
    _, going = body.input("step", "i64[]"), body.input("going", "bool[]")
    inner = body.build(going=going, x=body.exp(body.input("x", "f32[3]")))
    b = Builder("m")
    x, count = b.input("x", "f32[3]"), b.input("count", "i64[]")
    y = b.node("loop", [count, None, x], {"body": inner, "carried": 1}, []).outputs[0]
    graph = grad(b.build(loss=total(b, y)), "loss", wrt=["x"])
    given = {"x": np.zeros(3, np.float32), "count": np.array(0)}
    for runner in (lambda f: run(graph, f), compile(graph).run):
        np.testing.assert_allclose(runner(given)["grad.x"], 1.0)
        np.testing.assert_allclose(
            runner({**given, "count": np.array(2)})["grad.x"], np.e, rtol=1e-5
        )


def test_growing_carried_value_is_an_error():
    body = Builder("body")
    _, going = body.input("step", "i64[]"), body.input("going", "bool[]")
    rows = body.input("rows", "f32[count]")
    inner = body.build(going=going, rows=body.concat(rows, rows, axis=0))
    b = Builder("m")
    x = b.input("x", "f32[3]")
    y = b.node("loop", [np.array(2), None, x], {"body": inner, "carried": 1}, []).outputs[0]
    graph = b.build(loss=total(b, y))
    with pytest.raises(GraphError, match="'rows' changes its size between iterations"):
        grad(graph, "loss", wrt=["x"])


def test_custom_op_without_a_gradient_is_an_error():
    register_custom("test.opaque", infer=lambda x: x, reference=lambda x: x, replace=True)
    b = Builder("m")
    y = custom(b, "test.opaque", b.input("x", "f32[3]"))
    graph = b.build(loss=total(b, y))
    with pytest.raises(GraphError, match=r"custom op 'test\.opaque' has no gradient"):
        grad(graph, "loss", wrt=["x"])
