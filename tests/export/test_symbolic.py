"""Symbolic sizes: kept as names, and computed from shapes for attributes."""

import numpy as np
import pytest
from onnx_runs import NATIVE, assert_same, checked, element, run_ort
from pins import CRASHES_ORT, DIFFERS_IN_ORT, NO_ONNX_FORM, NO_RUNTIME, NOT_IN_ORT, RANDOM

from bitwright.errors import ExportError, GraphError, RunError
from bitwright.ir import parse_size, symbol
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import all_ops


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def dims(info):
    return [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim]


def compare(graph, *feeds, tolerance=2e-5, opset=None):
    model = checked(graph, opset=opset)
    for feed in feeds:
        assert_same(run_ort(model, feed), run(graph, feed), tolerance)
    return model


def test_sizes_keep_their_names_and_expressions():
    b = Builder("sizes")
    x = b.input("x", "f32[batch, 2*seq+1, 8]")
    y = b.slice(x, starts=[0], stops=[parse_size("2*seq")], steps=[1], axes=[1])
    graph = b.build(y=b.reshape(y, shape=(symbol("batch"), symbol("seq"), 16)))
    model = compare(graph, *({"x": normal(n, 2 * s + 1, 8)} for n, s in ((1, 1), (2, 5), (3, 0))))
    assert dims(model.graph.input[0]) == ["batch", "2*seq+1", 8]
    assert dims(model.graph.output[0]) == ["batch", "seq", 16]
    assert dims(model.graph.value_info[0]) == ["batch", "2*seq", 8]


def block(heads=4, width=32):
    """Self-attention over heads, written with reshapes as exporters do."""
    b = Builder("block")
    x = b.input("x", f"f32[batch, seq, {width}]")
    n, s = x.shape[:2]
    rng = np.random.default_rng(0)

    def project(name, value):
        w = b.parameter(name, rng.normal(size=(width, width)).astype(np.float32) / 8)
        return b.matmul(value, w)

    q, k, v = (
        b.transpose(
            b.reshape(project(name, x), shape=(n, s, heads, width // heads)), perm=(0, 2, 1, 3)
        )
        for name in ("q", "k", "v")
    )
    y = b.attention(q, k, v, causal=True)
    y = b.reshape(b.transpose(y, perm=(0, 2, 1, 3)), shape=(n, s, width))
    y = b.add(x, project("o", y))
    return b.build(y=b.layer_norm(y, b.parameter("g", np.ones(width, np.float32))))


@pytest.mark.parametrize("opset", [None, 17, 23])
def test_a_transformer_block_at_several_sizes(opset):
    sizes = ((1, 1), (2, 7), (3, 16))
    model = compare(block(), *({"x": normal(n, s, 32)} for n, s in sizes), opset=opset)
    if opset == 23:  # 0 and -1 in Reshape need no computed size
        assert "Shape" not in [node.op_type for node in model.graph.node]


def test_a_convolution_net_at_several_sizes():
    b = Builder("net")
    x = b.input("x", "f32[batch, 3, h, w]")
    y = b.conv(x, b.parameter("k", normal(8, 3, 3, 3)), strides=(2, 2), pads=(1, 1, 1, 1))
    y = b.max_pool(y, kernel=(2, 2), strides=(2, 2))
    n, c, h, w = y.shape
    y = b.resize(y, sizes=(n, c, 2 * h, 2 * w), mode="linear")
    flat = b.reshape(y, shape=(n, c, 4 * h * w))
    graph = b.build(map=y, mean=b.reduce_mean(flat, axes=[2], keepdims=False))
    compare(graph, *({"x": normal(n, 3, h, w)} for n, h, w in ((1, 8, 8), (2, 13, 21), (3, 32, 9))))


def test_padding_to_a_multiple_uses_floor_division_and_mod():
    b = Builder("pad")
    x = b.input("x", "f32[n, 2]")
    n = x.shape[0]
    up = -(-n // 4) * 4
    y = b.pad(x, pads=(0, 0, up - n, 0))
    y = b.reshape(y, shape=(up // 4, 4, 2))
    graph = b.build(y=y, odd=b.sizes(values=(n % 4, up), shape=(2,)))
    compare(graph, *({"x": normal(n, 2)} for n in (1, 4, 5, 11)))


def test_sizes_of_every_kind():
    b = Builder("functions")
    x, y = b.input("x", "f32[n, 1]"), b.input("y", "f32[m, 1]")
    n, m = x.shape[0], y.shape[0]
    texts = ["max(n, m)", "min(n, 3)", "n*m-m", "(n-5)//2", "mod(n-7, 3)", "2*n*n+1", "7"]
    values = tuple(parse_size(text) for text in texts)
    graph = b.build(
        sizes=b.sizes(values=values, shape=(len(texts),)), one=b.sizes(values=(n * m,), shape=())
    )
    compare(graph, *({"x": normal(n, 1), "y": normal(m, 1)} for n, m in ((1, 2), (6, 3), (9, 9))))


def test_a_size_of_two_broadcast_operands():
    b = Builder("broadcast")
    x, y = b.input("x", "f32[n, 3]"), b.input("y", "f32[m, 3]")
    z = b.add(x, y)
    graph = b.build(
        z=b.reshape(z, shape=(z.shape[0] * 3,)), size=b.sizes(values=z.shape, shape=(2,))
    )
    pairs = ((4, 4), (1, 5), (5, 1))
    compare(graph, *({"x": normal(n, 3), "y": normal(m, 3, seed=1)} for n, m in pairs))


def test_data_dependent_sizes():
    b = Builder("found")
    x = b.input("x", "f32[n, 4]")
    rows = b.transpose(b.nonzero(b.gt(x, 0.5)), perm=(1, 0))
    picked = b.gather_nd(x, rows)
    count = picked.shape[0]
    padded = b.reshape(picked, shape=(1, count))
    graph = b.build(
        y=b.tile(padded, repeats=(2, 1)), ones=b.expand(b.constant(1.0, "f32"), shape=(count,))
    )
    compare(graph, *({"x": normal(n, 4, seed=n)} for n in (1, 3, 9)))


def test_expansion_slices_and_ranges():
    b = Builder("mixed")
    x = b.input("x", "f32[n, 1, 4]")
    n = x.shape[0]
    wide = b.expand(x, shape=(3, n, n + 2, 4))
    last = b.slice(wide, starts=[n - 1], stops=[-1], steps=[-1], axes=[1])
    first, rest = b.split(last, axis=2, sizes=[1, n + 1])
    index = b.iota(length=n, dtype="i64")
    graph = b.build(a=first, b=b.gather(rest, index, axis=1), c=b.iota(length=2 * n, dtype="f32"))
    compare(graph, *({"x": normal(n, 1, 4)} for n in (1, 2, 5)))


def test_a_reshape_to_two_computed_sizes_allows_empty_tensors():
    b = Builder("two")
    x = b.input("x", "f32[n, 6, m]")
    n, _, m = x.shape
    graph = b.build(y=b.reshape(x, shape=(2 * n, 3 * m)))
    compare(graph, *({"x": normal(n, 6, m)} for n, m in ((1, 1), (2, 5), (0, 3))))


def test_a_size_that_nothing_binds_is_an_error():
    b = Builder("unbound")
    x = b.input("x", "f32[a*b]")
    graph = b.build(y=b.reshape(x, shape=(symbol("a"), symbol("b"))))
    with pytest.raises(ExportError, match="no input and no value before it binds the size"):
        checked(graph)


def test_one_input_binds_what_another_needs():
    b = Builder("bound")
    x, y = b.input("x", "f32[a*b]"), b.input("y", "f32[a+1]")
    graph = b.build(z=b.reshape(x, shape=(symbol("a"), symbol("b"))), w=b.neg(y))
    compare(graph, *({"x": normal(a * c), "y": normal(a + 1)} for a, c in ((2, 3), (1, 4))))


UNSTABLE = {*CRASHES_ORT, *DIFFERS_IN_ORT, *NO_RUNTIME, *NO_ONNX_FORM}
SYMBOLIC = [
    pytest.param(op, case, id=f"{op.name}-{i}")
    for op in all_ops().values()
    if op.kind is not Kind.BOUNDARY and op.name not in {*RANDOM, *NO_ONNX_FORM}
    for i, case in enumerate(op.samples())
    if i < 3 and f"{op.name}-{i}" not in UNSTABLE
]


@pytest.mark.parametrize("op, case", SYMBOLIC)
def test_samples_with_one_size_made_a_symbol(op, case):
    """Each distinct size in turn becomes a symbol in all operands."""
    sizes = {size for x in case.inputs if x is not None for size in x.shape} - {0}
    for size in sorted(sizes):
        b = Builder(op.name)
        feeds, values = {}, []
        for i, x in enumerate(case.inputs):
            if x is None or element(x).name not in NATIVE:
                values.append(None if x is None else b.constant(x))
                continue
            shape = tuple(symbol("n") if s == size else s for s in x.shape)
            feeds[f"in{i}"] = x
            values.append(b.input(f"in{i}", TensorType(element(x), shape)))
        try:
            node = b.node(op.name, values, case.attrs, [])
            graph = b.build(*node.outputs)
            expected = run(graph, feeds)
        except (GraphError, RunError):
            continue  # this op needs that size
        model = checked(graph)
        if all(v.dtype.name in NATIVE for v in node.outputs) and _is_in_ort(op, case):
            assert_same(run_ort(model, feeds), expected, 2 * max(case.tolerance, 1e-5))


def _is_in_ort(op, case):
    pinned = [name for name in NOT_IN_ORT if name.split()[0] == op.name]
    names = [element(x).name for x in case.inputs if x is not None]
    return not any(name == op.name or name.split()[-1] in names for name in pinned)
