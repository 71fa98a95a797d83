"""jvp and hvp: against finite differences, gradients and PyTorch."""

import numpy as np
import pytest
import torch
from finite_differences import random_direction

import bitwright as bw
from bitwright.errors import GraphError
from bitwright.ops.core.interpret import run


def network_of(w):
    b = bw.Builder("net")
    x, w = b.input("x", "f64[n, 4]"), b.parameter("w", w)
    y = b.softmax(b.tanh(b.matmul(x, w)), axis=-1)
    loss = b.reduce_sum(b.mul(y, b.mul(y, y)), axes=(0, 1), keepdims=False)
    return b.build(y=y, loss=loss, index=b.argmax(y, axis=1))


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((5, 4)), "w": rng.standard_normal((4, 3))}


def test_jvp_agrees_with_differences(arrays):
    direction = random_direction(arrays)
    graph = bw.jvp(network_of(arrays["w"]), ["x", "w"])
    assert [name for name, _ in graph.outputs] == [
        "y",
        "loss",
        "index",
        "tangent.y",
        "tangent.loss",
    ]
    given = {"x": arrays["x"], **{f"tangent.{n}": d for n, d in direction.items()}}
    found = run(graph, given)
    step, moved = 1e-6, {}
    for sign in (1, -1):
        at = {n: arrays[n] + sign * step * direction[n] for n in arrays}
        moved[sign] = run(network_of(at["w"]), {"x": at["x"]})
    for name in ("y", "loss"):
        expected = (moved[1][name] - moved[-1][name]) / (2 * step)
        np.testing.assert_allclose(found[f"tangent.{name}"], expected, rtol=1e-6, atol=1e-9)


def test_jvp_agrees_with_grad(arrays):
    direction = random_direction(arrays)
    graph = network_of(arrays["w"])
    slope = run(bw.grad(graph, "loss", wrt=["x", "w"]), {"x": arrays["x"]})
    given = {"x": arrays["x"], **{f"tangent.{n}": d for n, d in direction.items()}}
    along = run(bw.jvp(graph, ["x", "w"]), given)["tangent.loss"]
    expected = sum(np.sum(slope[f"grad.{n}"] * direction[n]) for n in arrays)
    np.testing.assert_allclose(along, expected, rtol=1e-10)


def test_hvp_agrees_with_pytorch(arrays):
    direction = random_direction(arrays)
    given = {"x": arrays["x"], **{f"tangent.{n}": d for n, d in direction.items()}}
    found = run(bw.hvp(network_of(arrays["w"]), "loss", ["x", "w"]), given)

    def loss(x, w):
        return (torch.softmax(torch.tanh(x @ w), -1) ** 3).sum()

    places = tuple(torch.tensor(arrays[n]) for n in ("x", "w"))
    along = tuple(torch.tensor(direction[n]) for n in ("x", "w"))
    _, expected = torch.autograd.functional.hvp(loss, places, along)
    for name, want in zip(("x", "w"), expected, strict=True):
        np.testing.assert_allclose(found[f"hvp.{name}"], want.numpy(), rtol=1e-8, atol=1e-10)


def test_an_output_that_does_not_move_has_a_zero_tangent():
    b = bw.Builder("two")
    x, z = b.input("x", "f32[3]"), b.input("z", "f32[2]")
    graph = bw.jvp(b.build(same=b.add(x, x), other=b.add(z, z)), ["x"])
    ones = {"x": np.ones(3, np.float32), "tangent.x": np.ones(3, np.float32)}
    found = bw.compile(graph).run({**ones, "z": np.ones(2, np.float32)})
    np.testing.assert_array_equal(found["tangent.same"], 2.0)
    np.testing.assert_array_equal(found["tangent.other"], 0.0)


def test_no_direction_is_an_error():
    with pytest.raises(GraphError, match="there is no direction"):
        bw.jvp(network_of(np.ones((4, 3))), [])
