"""Recurrent and state-space ops, against PyTorch, ONNX Runtime and first principles."""

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import helper
from single_op import evaluate, infer

from bitwright.errors import InferenceError, RunError

RNG = np.random.default_rng(0)
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
# PyTorch's gate order, as positions in ours
ORDER = {"lstm": [0, 3, 1, 2], "gru": [1, 0, 2], "rnn": [0]}


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def operands(op, directions, lengths=None, peephole=False):
    """x, w, r, bias, lengths and initial states: 5 steps, batch 3, 2 features, 4 hidden."""
    rows = GATES[op] * 4
    found = [normal(5, 3, 2), normal(directions, rows, 2), normal(directions, rows, 4)]
    found += [normal(directions, 2 * rows), lengths, normal(directions, 3, 4)]
    if op == "lstm":
        found += [normal(directions, 3, 4), normal(directions, 12) if peephole else None]
    return found


def runtime(op, arrays, **attrs):
    """The results by ONNX Runtime."""
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(arrays)]
    results = ["y", "h", "c"][: 3 if op == "lstm" else 2]
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, arrays, strict=True)
        if n
    ]
    outputs = [helper.make_tensor_value_info(n, 1, None) for n in results]
    node = helper.make_node(op.upper(), names, results, hidden_size=4, **attrs)
    model = helper.make_model(
        helper.make_graph([node], "g", infos, outputs),
        opset_imports=[helper.make_opsetid("", 14)],
        ir_version=8,
    )
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {n: x for n, x in zip(names, arrays, strict=True) if n})


def equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("lengths", [None, [5, 2, 3], [5, 0, 1]])
def test_agrees_with_onnxruntime(op, direction, lengths):
    given = None if lengths is None else np.array(lengths, np.int32)
    arrays = operands(op, 1 + (direction == "bidirectional"), given)
    found = evaluate(op, *arrays, direction=direction, hidden=4)
    equal(found, runtime(op, arrays, direction=direction))


@pytest.mark.parametrize(
    "op, attrs",
    [
        ("lstm", {"clip": 0.5}),
        ("gru", {"clip": 0.5}),
        ("lstm", {"input_forget": True}),
        ("gru", {"linear_before_reset": True}),
        ("rnn", {"activations": ["LeakyRelu"], "alpha": [0.3]}),
        ("rnn", {"activations": ["Affine"], "alpha": [0.5], "beta": [0.1]}),
        ("rnn", {"activations": ["HardSigmoid"]}),
        ("rnn", {"activations": ["Elu"]}),
        ("rnn", {"activations": ["ThresholdedRelu"], "alpha": [0.2]}),
        ("rnn", {"activations": ["ScaledTanh"], "alpha": [1.1], "beta": [0.7]}),
        ("rnn", {"activations": ["Softplus"]}),
        ("rnn", {"activations": ["Softsign"]}),
        ("gru", {"activations": ["HardSigmoid", "LeakyRelu"], "alpha": [0.3, 0.2]}),
        ("lstm", {"activations": ["Sigmoid", "Elu", "ScaledTanh"], "alpha": [0.3, 0.8]}),
    ],
)
def test_attributes_agree_with_onnxruntime(op, attrs):
    arrays = operands(op, 1, peephole=op == "lstm")
    beta = {} if "alpha" not in attrs else {"beta": [0.4]}
    attrs = {**beta, **attrs}
    names = {"alpha": "activation_alpha", "beta": "activation_beta"}
    onnx_attrs = {names.get(k, k): int(v) if isinstance(v, bool) else v for k, v in attrs.items()}
    equal(evaluate(op, *arrays, hidden=4, **attrs), runtime(op, arrays, **onnx_attrs))


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("packed", [False, True])
def test_agrees_with_torch(op, packed):
    module = getattr(torch.nn, op.upper())(2, 4, bidirectional=True)
    x, lengths = torch.randn(5, 3, 2), torch.tensor([5, 3, 1])

    def gates(name):
        parts = getattr(module, name).detach().numpy()
        return np.concatenate([np.split(parts, GATES[op])[i] for i in ORDER[op]])

    sides = "", "_reverse"
    w = np.stack([gates(f"weight_ih_l0{s}") for s in sides])
    r = np.stack([gates(f"weight_hh_l0{s}") for s in sides])
    bias = [np.concatenate([gates(f"bias_ih_l0{s}"), gates(f"bias_hh_l0{s}")]) for s in sides]
    if packed:
        y, last = module(torch.nn.utils.rnn.pack_padded_sequence(x, lengths))
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(y)
    else:
        y, last = module(x)
    attrs = {"linear_before_reset": True} if op == "gru" else {}
    found = evaluate(
        op,
        x.numpy(),
        w,
        r,
        np.stack(bias),
        lengths.numpy() if packed else None,
        direction="bidirectional",
        **attrs,
    )
    outputs = found[0].transpose(0, 2, 1, 3).reshape(5, 3, 8)
    states = last if isinstance(last, tuple) else (last,)
    equal([outputs, *found[1:]], [t.detach().numpy() for t in (y, *states)])


def test_recurrent_sizes_stay_symbolic():
    x, w, r = "f32[seq, batch, 8]", "f32[2, 64, 8]", "f32[2, 64, 16]"
    found = infer("lstm", x, w, r, hidden=16, direction="bidirectional")
    state = "f32[2, batch, 16]"
    assert list(map(str, found)) == ["f32[seq, 2, batch, 16]", state, state]


@pytest.mark.parametrize(
    "types, attrs, message",
    [
        (["f32[5, 3, 2]", "f32[1, 16, 2]", "f32[1, 16, 5]"], {"hidden": 4}, "axis 2 of r"),
        (["f32[5, 3, 2]", "f32[1, 15, 2]", "f32[1, 16, 4]"], {"hidden": 4}, "axis 1 of w"),
        (["f32[5, 3, 2]", "f32[1, 16, 2]", "f32[1, 16, n]"], {}, "'hidden' is missing"),
        (
            ["f32[5, 3, 2]", "f32[1, 16, 2]", "f32[1, 16, 4]"],
            {"direction": "bidirectional"},
            "axis 0 of w",
        ),
        (
            ["f32[5, 3, 2]", "f32[1, 16, 2]", "f32[1, 16, 4]"],
            {"activations": ["Tanh"]},
            "number of activations; expected 3, found 1",
        ),
        (
            ["f32[5, 3, 2]", "f32[1, 16, 2]", "f32[1, 16, 4]"],
            {"activations": ["Tanh", "Tanh", "Sine"]},
            "no activation is named 'Sine'",
        ),
        (["f32[5, 3, 2]", "f64[1, 16, 2]", "f32[1, 16, 4]"], {}, "different element types"),
    ],
)
def test_recurrent_faults(types, attrs, message):
    with pytest.raises(InferenceError, match=message):
        infer("lstm", *types, **attrs)


def test_a_length_beyond_the_sequence_is_an_error():
    arrays = operands("rnn", 1, np.array([5, 6, 1], np.int32))
    with pytest.raises(RunError, match="0 to 5"):
        evaluate("rnn", *arrays)


def test_selective_scan_with_constant_parameters_is_a_linear_recurrence():
    length, decay = 6, 0.5
    x = normal(1, length, 1)
    ones = np.ones((1, length, 1), np.float32)
    a = np.full((1, 1), np.log(decay), np.float32)
    y, state = evaluate("selective_scan", x, ones, a, ones, ones, np.array([3], np.float32))
    powers = decay ** np.arange(length)
    hidden = [sum(powers[t - s] * x[0, s, 0] for s in range(t + 1)) for t in range(length)]
    np.testing.assert_allclose(y[0, :, 0], np.array(hidden) + 3 * x[0, :, 0], rtol=1e-5)
    np.testing.assert_allclose(state[0, 0, 0], hidden[-1], rtol=1e-5)


def test_a_scan_continues_from_its_state():
    x, delta, a = normal(2, 7, 3), abs(normal(2, 7, 3)), -abs(normal(3, 4))
    b, c = normal(2, 7, 4), normal(2, 7, 4)
    whole, last = evaluate("selective_scan", x, delta, a, b, c)
    head, state = evaluate("selective_scan", x[:, :3], delta[:, :3], a, b[:, :3], c[:, :3])
    rest = (x[:, 3:], delta[:, 3:], a, b[:, 3:], c[:, 3:])
    tail, end = evaluate("selective_scan", *rest, None, state)
    equal([np.concatenate([head, tail], axis=1), end], [whole, last])


def test_gated_delta_recalls_what_it_stored():
    """With orthonormal keys, no decay and rate 1, a query equal to a key reads its value."""
    keys = np.eye(4, dtype=np.float32)[None, None]
    v = normal(1, 1, 4, 6)
    g, beta = np.zeros((1, 1, 4), np.float32), np.ones((1, 1, 4), np.float32)
    y, state = evaluate("gated_delta", keys, keys, v, g, beta, scale=1.0)
    equal([y, state], [v, v])
    again = normal(1, 1, 4, 6)
    _, replaced = evaluate("gated_delta", keys, keys, again, g, beta, state, scale=1.0)
    equal([replaced], [again])


def test_gated_delta_step_by_step():
    q, k, v = normal(2, 3, 5, 4), normal(2, 3, 5, 4), normal(2, 3, 5, 6)
    g, beta = -abs(normal(2, 3, 5)), abs(normal(2, 3, 5))
    y, state = evaluate("gated_delta", q, k, v, g, beta)
    for i, j in np.ndindex(2, 3):
        memory = np.zeros((4, 6))
        for t in range(5):
            memory = memory * np.exp(g[i, j, t])
            error = v[i, j, t] - memory.T @ k[i, j, t]
            memory += np.outer(k[i, j, t], beta[i, j, t] * error)
            np.testing.assert_allclose(y[i, j, t], memory.T @ q[i, j, t] / 2, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(state[i, j], memory, rtol=1e-3, atol=1e-4)
