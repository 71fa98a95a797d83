"""Recurrent layers in training and their gradients: the kernels against interpreter and PyTorch."""

import warnings

import numpy as np
import pytest
from run_kernel import TARGETS, Run, assert_near, assert_same, feeds_of, graph_of, reference

import bitwright as bw
from bitwright.target import named
from bitwright.warn import BitwrightWarning

GATES = {"rnn": 1, "gru": 3, "lstm": 4}
BACKWARD = [f"{op}_backward" for op in GATES]
OPS = ["lstm_train", "gru_train", *BACKWARD]


def draw(rng, *shape, low=-1.0, high=1.0):
    return rng.uniform(low, high, shape).astype(np.float32)


def operands(op, steps, batch, hidden, *, directions=1, extras="", features=9):
    """The operands of an op; `extras` names b(ias), l(engths), i(nitial states), d(y), e(nds)."""
    layer, _, kind = op.partition("_")
    rng, gates = np.random.default_rng(hidden + 7 * batch), GATES[layer]
    state, sequence = (directions, batch, hidden), (steps, directions, batch, hidden)
    scale = max(hidden, 1) ** -0.5
    r = draw(rng, directions, gates * hidden, hidden, low=-scale, high=scale)
    lengths = rng.integers(0, steps + 1, batch).astype(np.int64) if "l" in extras else None
    initial = draw(rng, *state) if "i" in extras else None
    if kind == "train":
        w = draw(rng, directions, gates * hidden, features, low=-0.3, high=0.3)
        bias = draw(rng, directions, 2 * gates * hidden) if "b" in extras else None
        states = [initial] * (1 + (layer == "lstm"))
        return [draw(rng, steps, batch, features), w, r, bias, lengths, *states]
    kept = [draw(rng, steps, batch, directions, gates * hidden, low=0.1, high=0.9)]
    kept += [draw(rng, *sequence) for _ in range(1 + (layer == "gru"))]
    dy = draw(rng, *sequence) if "d" in extras else None
    ends = [draw(rng, *state) if "e" in extras else None for _ in range(1 + (layer == "lstm"))]
    if layer == "rnn":
        return [r, kept[1], dy, *ends, lengths]
    return [r, *kept, dy, *ends, lengths, initial]


def check(op, arrays, *, target="host", threads=(1, 2), tolerance=2e-5, **attrs):
    graph = graph_of(op, *arrays, **attrs)
    feeds = feeds_of(graph, arrays)
    found = [Run(graph, feeds, named(target), count).outputs for count in threads]
    for name, want in reference(graph, feeds).items():
        assert_near(found[0][name], want, tolerance)
        for other in found[1:]:
            assert_same(other[name], found[0][name])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPS)
def test_sizes(op, target):
    extras = "blide"
    check(op, operands(op, 3, 7, 17, extras=extras), target=target)
    check(op, operands(op, 2, 13, 33, extras=extras), target=target)


@pytest.mark.parametrize("op", OPS)
def test_more_sizes(op):
    for hidden, batch in ((1, 3), (7, 1), (7, 16), (16, 33), (127, 5)):
        check(op, operands(op, 3, batch, hidden, extras="bd"), threads=(1, 3))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
def test_directions_and_absent_operands(op, direction):
    directions = 2 if direction == "bidirectional" else 1
    for extras in ("", "l", "bide", "ble"):
        arrays = operands(op, 4, 5, 9, directions=directions, extras=extras)
        check(op, arrays, direction=direction, threads=(1, 3))


@pytest.mark.parametrize("op", ["gru_train", "gru_backward"])
def test_gru_that_resets_after_its_product(op):
    for extras in ("", "blide"):
        arrays = operands(op, 4, 5, 18, directions=2, extras=extras)
        check(op, arrays, direction="bidirectional", linear_before_reset=True)


def test_relu_layers():
    check("rnn_backward", operands("rnn_backward", 4, 5, 18, extras="de"), activation="relu")


@pytest.mark.parametrize("op", OPS)
def test_empty_axes_and_doubles(op):
    for steps, batch in ((0, 3), (3, 0), (0, 0)):
        check(op, operands(op, steps, batch, 6, extras="ide"))
    arrays = [
        x.astype(np.float64) if x is not None and x.dtype == np.float32 else x
        for x in operands(op, 3, 5, 10, extras="blide")
    ]
    check(op, arrays, tolerance=1e-12)


@pytest.mark.parametrize("op", ["lstm_train", "lstm_backward"])
def test_symbolic_steps_and_batch(op):
    arrays = operands(op, 5, 14, 19, extras="d", features=16)
    shapes = {0: "[S, B, 16]"}
    if op == "lstm_backward":
        shapes = {1: "[S, B, 1, 76]", 2: "[S, 1, B, 19]", 3: "[S, 1, B, 19]"}
    graph = graph_of(op, *arrays, shapes=shapes)
    feeds = feeds_of(graph, arrays)
    found = Run(graph, feeds, threads=2).outputs
    for name, want in reference(graph, feeds).items():
        assert_near(found[name], want, 2e-5)


@pytest.mark.parametrize("op", ["gru_train", "lstm_backward"])
def test_a_length_beyond_the_steps_is_a_fault(op):
    arrays = operands(op, 3, 2, 6, extras="ld")
    arrays[4 if op == "gru_train" else 6] = np.array([2, 4])
    graph = graph_of(op, *arrays)
    node = graph.nodes.index(graph.outputs[0][1].node)
    assert Run(graph, feeds_of(graph, arrays)).fault == (node, 4)


@pytest.mark.parametrize("op", GATES)
def test_gradients_like_pytorch(op):
    """Compiled gradients of a bidirectional layer; no step runs in the interpreter."""
    torch = pytest.importorskip("torch")
    steps, batch, features, hidden = 6, 14, 16, 20
    layer = getattr(torch.nn, op.upper())(features, hidden, bidirectional=True)
    order = {"rnn": [0], "gru": [1, 0, 2], "lstm": [0, 3, 1, 2]}[op]

    def in_order(tensors):
        """Both directions, gates in the order of ONNX."""
        parts = (t.detach().numpy().reshape(GATES[op], hidden, -1)[order] for t in tensors)
        return np.stack([part.reshape(GATES[op] * hidden, -1) for part in parts])

    def of(name):
        return [getattr(layer, f"{name}_l0{end}") for end in ("", "_reverse")]

    x = draw(np.random.default_rng(0), steps, batch, features)
    factor = draw(np.random.default_rng(1), steps, batch, 2 * hidden)
    (layer(torch.from_numpy(x))[0] * torch.from_numpy(factor)).sum().backward()

    b = bw.Builder("layer")
    biases = np.concatenate([in_order(of(n))[..., 0] for n in ("bias_ih", "bias_hh")], axis=1)
    arrays = {"w": in_order(of("weight_ih")), "r": in_order(of("weight_hh")), "bias": biases}
    weights = [b.parameter(name, array) for name, array in arrays.items()]
    attrs = {"linear_before_reset": True} if op == "gru" else {}
    given = b.input("x", "f32[S, B, 16]")
    y = b.op(op, given, *weights, direction="bidirectional", **attrs)[0]
    factors = factor.reshape(steps, batch, 2, hidden).transpose(0, 2, 1, 3)
    product = b.mul(y, b.constant(np.ascontiguousarray(factors)))
    b.output("loss", b.reduce_sum(product, axes=(0, 1, 2, 3), keepdims=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error", BitwrightWarning)  # an interpreter fallback
        exe = bw.compile(bw.grad(b.build(), loss="loss"), threads=2)
    found = exe.run({"x": x})
    wanted = {
        "w": in_order(t.grad for t in of("weight_ih")),
        "r": in_order(t.grad for t in of("weight_hh")),
        "bias": np.concatenate(
            [in_order(t.grad for t in of(n))[..., 0] for n in ("bias_ih", "bias_hh")], axis=1
        ),
    }
    for name, want in wanted.items():
        assert_near(found[f"grad.{name}"], want, 2e-5)
