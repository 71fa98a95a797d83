"""Recurrent layers: the kernels against the interpreter, ONNX Runtime and PyTorch."""

import numpy as np
import pytest
from run_kernel import TARGETS, Run, assert_near, assert_same, feeds_of, graph_of, reference

from bitwright.target import named

GATES = {"rnn": 1, "gru": 3, "lstm": 4}


def draw(rng, *shape, scale=0.5):
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def operands(op, steps, batch, features, hidden, *, directions=1, extras="", dtype=np.float32):
    """x, w, r and what `extras` names of: b(ias), l(engths), h(0), c(0), p(eephole)."""
    rng, gates = np.random.default_rng(hidden + 7 * batch), GATES[op]
    lengths = rng.integers(0, steps + 1, batch).astype(np.int32)
    found = [
        draw(rng, steps, batch, features, scale=1.0),
        draw(rng, directions, gates * hidden, features, scale=max(features, 1) ** -0.5),
        draw(rng, directions, gates * hidden, hidden, scale=max(hidden, 1) ** -0.5),
        draw(rng, directions, 2 * gates * hidden) if "b" in extras else None,
        lengths if "l" in extras else None,
        draw(rng, directions, batch, hidden) if "h" in extras else None,
    ]
    if op == "lstm":
        found.append(draw(rng, directions, batch, hidden) if "c" in extras else None)
        found.append(draw(rng, directions, 3 * hidden) if "p" in extras else None)
    return [x.astype(dtype) if x is not None and x.dtype != np.int32 else x for x in found]


def check(op, arrays, *, target="host", threads=(1, 3), constants=(), **attrs):
    graph = graph_of(op, *arrays, constants=constants, **attrs)
    feeds = feeds_of(graph, arrays)
    expected = reference(graph, feeds)
    found = [Run(graph, feeds, named(target), count).outputs for count in threads]
    for name, want in expected.items():
        assert_near(found[0][name], want, 2e-5)
        for other in found[1:]:
            assert_same(other[name], found[0][name])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("hidden, batch", [(1, 1), (7, 3), (17, 1), (33, 5), (64, 2)])
def test_sizes(op, hidden, batch, target):
    check(op, operands(op, 4, batch, 5, hidden, extras="b"), target=target, constants=(1, 2, 3))


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("extras", ["", "blh", "lhc", "bhcp", "blcp"])
def test_operands(op, direction, extras):
    directions = 2 if direction == "bidirectional" else 1
    arrays = operands(op, 5, 4, 3, 18, directions=directions, extras=extras)
    check(op, arrays, direction=direction)
    check(op, arrays, direction=direction, constants=(1, 2), clip=0.4)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_gru_resets_before_or_after_its_product(late, threads):
    for hidden in (16, 40):
        arrays = operands("gru", 6, 3, 4, hidden, directions=2, extras="blh")
        check(
            "gru",
            arrays,
            threads=(threads, 1),
            direction="bidirectional",
            linear_before_reset=late,
            constants=(1, 2),
        )


def test_coupled_gates():
    check("lstm", operands("lstm", 4, 2, 3, 9, extras="bp"), input_forget=True)


@pytest.mark.parametrize(
    "name",
    [
        *("Relu", "Softsign", "Softplus", "Affine", "LeakyRelu", "ThresholdedRelu"),
        *("ScaledTanh", "HardSigmoid", "Elu"),
    ],
)
def test_activations(name):
    arrays = operands("rnn", 3, 2, 4, 19, directions=2)
    check("rnn", arrays, direction="bidirectional", activations=[name, "Tanh"], alpha=[0.6])


@pytest.mark.parametrize("op", GATES)
def test_empty_and_wide(op):
    check(op, operands(op, 0, 3, 4, 6))
    check(op, operands(op, 3, 0, 4, 6))
    check(op, operands(op, 3, 2, 0, 6), constants=(1, 2))
    check(op, operands(op, 3, 2, 4, 6, dtype=np.float64, extras="bl"))
    check(op, operands(op, 3, 11, 4, 35, extras="bl"), threads=(1, 2, 4), constants=(1, 2))


def test_symbolic_steps_and_batch():
    arrays = operands("lstm", 6, 3, 4, 10, extras="b")
    graph = graph_of("lstm", *arrays, shapes={0: "[S, B, 4]"}, constants=(1, 2, 3))
    feeds = feeds_of(graph, arrays)
    found = Run(graph, feeds, threads=2).outputs
    for name, want in reference(graph, feeds).items():
        assert_near(found[name], want, 2e-5)


def test_a_length_beyond_the_steps_is_a_fault():
    arrays = operands("gru", 3, 2, 4, 6, extras="l")
    arrays[4] = np.array([2, 4], np.int32)
    graph = graph_of("gru", *arrays)
    node = graph.nodes.index(graph.outputs[0][1].node)
    assert Run(graph, feeds_of(graph, arrays)).fault == (node, 4)


@pytest.mark.parametrize("op", GATES)
def test_like_pytorch(op):
    torch = pytest.importorskip("torch")
    layer = getattr(torch.nn, op.upper())(5, 19, bidirectional=True)
    order = {"rnn": [0], "gru": [1, 0, 2], "lstm": [0, 3, 1, 2]}[op]

    def gates(name):
        """Both directions, gates in the order of ONNX."""
        found = []
        for suffix in ("", "_reverse"):
            parts = getattr(layer, f"{name}_l0{suffix}").detach().numpy()
            parts = parts.reshape(GATES[op], 19, *parts.shape[1:])
            found.append(parts[order].reshape(-1, *parts.shape[2:]))
        return np.stack(found)

    x = draw(np.random.default_rng(0), 7, 3, 5)
    bias = np.concatenate([gates("bias_ih"), gates("bias_hh")], axis=1)
    arrays = [x, gates("weight_ih"), gates("weight_hh"), bias]
    attrs = {"linear_before_reset": True} if op == "gru" else {}
    graph = graph_of(op, *arrays, constants=(1, 2, 3), direction="bidirectional", **attrs)
    y, last, *_ = Run(graph, feeds_of(graph, arrays), threads=2).outputs.values()
    with torch.no_grad():
        want, states = layer(torch.from_numpy(x))
    assert_near(np.concatenate([y[:, 0], y[:, 1]], axis=-1), want.numpy(), 2e-5)
    assert_near(last, (states[0] if op == "lstm" else states).numpy(), 2e-5)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (7, 3, 5, 17), (4, 9, 16, 33)])
def test_like_onnx_runtime(op, sizes):
    onnxruntime = pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper, numpy_helper

    import bitwright as bw

    x, *rest = operands(op, *sizes, directions=2, extras="blhcp")
    names = ["w", "r", "b", "lengths", "h0", "c0", "p"][: len(rest)]
    attrs = {"linear_before_reset": 1} if op == "gru" else {}
    node = helper.make_node(
        op.upper(), ["x", *names], ["y"], hidden_size=sizes[3], direction="bidirectional", **attrs
    )
    graph = helper.make_graph(
        [node],
        "recurrent",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (sizes[0], 2, *sizes[1::2]))],
        [numpy_helper.from_array(array, name) for name, array in zip(names, rest, strict=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    for threads in (1, 3):
        assert_near(bw.compile(bw.load(model), threads=threads).run({"x": x})["y"], want, 2e-5)


def quantized_operands(op, steps, batch, hidden, *, directions=1, extras=""):
    """p, quantized R and its scales, and the remaining `operands`."""
    _, _, r, *rest = operands(op, steps, batch, 3, hidden, directions=directions, extras=extras)
    p = draw(np.random.default_rng(hidden), steps, batch, r.shape[0] * r.shape[1], scale=1.0)
    scale = (np.abs(r).max(axis=2, initial=1e-6) / 127).astype(np.float32)
    return [p, np.rint(r / scale[..., None]).astype(np.int8), scale, *rest]


def check_quantized(op, arrays, *, target="host", threads=(1, 3), **attrs):
    """A state halfway between two quantized values may round either way: a step of 1/127 or two."""
    graph = graph_of(f"integer_{op}", *arrays, constants=(1, 2), **attrs)
    feeds = feeds_of(graph, arrays)
    expected = reference(graph, feeds)
    found = [Run(graph, feeds, named(target), count).outputs for count in threads]
    for name, want in expected.items():
        assert_near(found[0][name], want, 2 / 127)
        if want.size:
            assert np.median(np.abs(found[0][name] - want)) < 1e-4
        for other in found[1:]:
            assert_same(other[name], found[0][name])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("hidden, batch", [(1, 1), (7, 3), (17, 1), (33, 5), (127, 2)])
def test_int8_sizes(op, hidden, batch, target):
    check_quantized(op, quantized_operands(op, 4, batch, hidden, extras="b"), target=target)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("extras", ["", "blh", "lhc", "bhcp"])
def test_int8_operands(op, extras):
    arrays = quantized_operands(op, 5, 4, 18, directions=2, extras=extras)
    check_quantized(op, arrays, direction="bidirectional", threads=(1, 2, 7))
    check_quantized(
        op, quantized_operands(op, 3, 2, 16, extras=extras), direction="reverse", clip=0.4
    )


def test_int8_gru_that_resets_after_its_product():
    check_quantized(
        "gru", quantized_operands("gru", 6, 3, 40, extras="blh"), linear_before_reset=True
    )


def test_int8_zero_states():
    """States that are all zero have an empty range; a layer without bias stays at zero."""
    p, *rest = quantized_operands("rnn", 4, 2, 9)
    check_quantized("rnn", [np.zeros_like(p), *rest])
    check_quantized("rnn", [p[:0], *rest])
    check_quantized("rnn", [p[:, :0], *rest])
