"""Export and import: the imported graph gives the same results."""

import numpy as np
import pytest
from onnx_runs import assert_same, one_node, run_ort
from pins import NO_ONNX_FORM, RANDOM

from bitwright.export.onnx import export_onnx
from bitwright.frontend.onnx import load
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import all_ops

CASES = [
    pytest.param(op, case, id=f"{op.name}-{i}")
    for op in all_ops().values()
    if op.kind is not Kind.BOUNDARY and op.name not in {*RANDOM, *NO_ONNX_FORM, "custom"}
    for i, case in enumerate(op.samples())
    if f"{op.name}-{i}" not in NO_ONNX_FORM
]


@pytest.mark.parametrize("op, case", CASES)
def test_samples_round_trip(op, case):
    graph, feeds = one_node(op, case)
    again = load(export_onnx(graph))
    assert_same(run(again, feeds), run(graph, feeds), 2 * max(case.tolerance, 1e-5))
    assert op.name == "host" or not [n for _, n in again.walk() if n.op == "host"]


@pytest.mark.parametrize("opset", [17, 21, 23, 25, 28])
def test_later_forms_are_imported_as_the_op(opset):
    b = Builder("later")
    x = b.input("x", "f32[batch, 4, 6]")
    scale = b.parameter("scale", np.full(6, 2, np.float32))
    y = b.layer_norm(x, scale)
    if opset >= 21:
        y = b.gelu(y)
    if opset >= 23:
        y = b.rms_norm(y, scale)
        heads = b.reshape(y, shape=(x.shape[0], 4, 3, 2))
        y = b.attention(heads, heads, heads, causal=True)
    if opset >= 25:
        y = b.silu(y)
    graph = b.build(y=y)
    again = load(export_onnx(graph, opset=opset))
    kept = {"layer_norm", "gelu", "rms_norm", "attention"} & {n.op for n in graph.nodes}
    assert kept <= {n.op for n in again.nodes}
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)}
    assert_same(run(again, feeds), run(graph, feeds))


@pytest.mark.parametrize("to", ["i8", "u8", "i4", "f8e4m3fn", "i16"])
def test_quantized_graphs_round_trip(to):
    b = Builder("qdq")
    x = b.input("x", "f32[batch, 8]")
    scale, zero = b.constant(np.float32(0.25)), b.constant(np.zeros(()), to)
    xq = b.dequantize(b.quantize(x, scale, zero, to=to), scale, zero)
    w = b.parameter("w", np.ones((8, 4)).astype(zero.dtype.numpy))
    wq = b.dequantize(w, b.constant(np.full(4, 0.5, np.float32)), axis=1)
    graph = b.build(y=b.matmul(xq, wq))
    again = load(export_onnx(graph))
    computed = [n.op for n in again.nodes if not n.is_boundary]
    assert computed == ["quantize", "dequantize", "dequantize", "matmul"]
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)}
    assert_same(run(again, feeds), run(graph, feeds))


def test_names_sizes_and_parameters_round_trip():
    b = Builder("model")
    x = b.input("x", "f32[batch, 2*seq, 4]")
    w = b.parameter("layer.weight", np.ones((4, 3), np.float32))
    graph = b.build(logits=b.matmul(x, w))
    again = load(export_onnx(graph))
    assert [str(v.type) for v in again.inputs] == ["f32[batch, 2*seq, 4]"]
    assert [v.name for v in again.parameters] == ["layer.weight"]
    assert [name for name, _ in again.outputs] == ["logits"]
    assert str(again.outputs[0][1].type) == "f32[batch, 2*seq, 3]"
    assert again.meta["onnx.producer"].startswith("bitwright")


def test_external_data_round_trips(tmp_path):
    b = Builder("model")
    weights = np.arange(1200, dtype=np.float32).reshape(30, 40)
    graph = b.build(y=b.matmul(b.input("x", "f32[batch, 30]"), b.parameter("w", weights)))
    export_onnx(graph, tmp_path / "m.onnx", external_data=True)
    again = load(tmp_path / "m.onnx")
    np.testing.assert_array_equal(again.parameters[0].node.attrs["value"], weights)
    export_onnx(again, tmp_path / "m.onnx", external_data=True)  # over the file it is mapped from
    np.testing.assert_array_equal(
        load(tmp_path / "m.onnx").parameters[0].node.attrs["value"], weights
    )


@pytest.mark.parametrize("opset", [13, 17, 23])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_sum_before_a_norm_is_one_that_runtimes_do_not_fuse(norm, opset):
    """It is imported as an add; other sums, and those of a bias, are Add."""
    b = Builder("residual")
    x, r = b.input("x", "f32[batch, 5, 16]"), b.input("r", "f32[batch, 5, 16]")
    scale, bias = (b.parameter(name, np.full(16, 2, np.float32)) for name in ("scale", "bias"))
    total = b.add(b.add(x, bias), r)
    y = b.op(norm, total, scale)
    z = b.op(norm, b.add(y, bias), scale)
    graph = b.build(y=b.add(y, total), z=z)
    model = export_onnx(graph, opset=opset, rounding="onnxruntime")
    (node,) = (node for node in model.graph.node if node.op_type == "Sum")
    assert list(node.output) == [total.name]
    again = load(model)
    assert sum(n.op == "add" for n in again.nodes) >= 4
    feeds = {name: np.random.default_rng(0).normal(size=(2, 5, 16)).astype("f4") for name in "xr"}
    assert_same(run(again, feeds), run(graph, feeds))
    assert_same(run_ort(model, feeds), run(graph, feeds))
    # also for a decomposed norm
    assert [
        n.op_type for n in export_onnx(again, opset=13, rounding="onnxruntime").graph.node
    ].count("Sum") == 1


def test_sums_before_norms_of_other_types_are_added():
    """They are not quantized, and not every runtime has their Sum."""
    b = Builder("residual")
    x = b.input("x", "f16[batch, 16]")
    total = b.add(x, b.input("r", "f16[batch, 16]"))
    model = export_onnx(b.build(b.layer_norm(total, np.ones(16, np.float16))))
    assert "Sum" not in {node.op_type for node in model.graph.node}
