"""Matmuls with dynamic per-token quantization: in integers, one function that is exact in ONNX
Runtime; in float, two nodes that every runtime has."""

import numpy as np
import pytest
from onnx_runs import checked, run_ort

import bitwright as bw
from bitwright.aliases import OPS
from bitwright.frontend.onnx import load
from bitwright.ops.core.builder import Builder
from bitwright.warn import BitwrightWarning, forget
from other_runtimes import exact_onnxruntime


def product(
    rows="n", width=24, columns=(7,), per_column=True, zero=False, keep=False, element="u8"
):
    """Products of the same dynamically quantized rows with quantized weights."""
    rng = np.random.default_rng(0)
    b = Builder("quantized")
    x = b.input("x", f"f32[2, {rows}, {width}]")
    qvalues, scale, offset = b.dynamic_quantize(x, to=element, per_token=True)
    real = b.dequantize(qvalues, scale, offset, axis=-1, block=width)
    for i, size in enumerate(columns):
        w = b.parameter(f"w{i}", rng.integers(-127, 128, (width, size)).astype(np.int8))
        scales = rng.uniform(0.01, 0.1, size if per_column else ()).astype(np.float32)
        zeros = rng.integers(-9, 9, scales.shape).astype(np.int8) if zero else None
        wide = b.dequantize(w, scales, zeros, axis=1 if per_column else None)
        b.output(f"y{i}", b.add(b.matmul(real, wide), np.float32(0.5)))
    if keep:
        b.output("real", real)
    return b.build()


def feeds(rows, width=24):
    rng = np.random.default_rng(rows)
    return {"x": (3 * rng.normal(size=(2, rows, width)) + 1).astype(np.float32)}


@exact_onnxruntime
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize(
    "options",
    [{}, {"per_column": False}, {"zero": True}, {"zero": True, "per_column": False}, {"width": 1}],
    ids=str,
)
def test_onnx_runtime_is_bit_identical(rows, options):
    graph = product(**options)
    given = feeds(rows, options.get("width", 24))
    model = checked(graph, consumer="onnxruntime")
    assert [f.name for f in model.functions] == ["dynamic_quantize", "quantized_matmul"]
    ours = bw.compile(graph).run(given)
    np.testing.assert_array_equal(run_ort(model, given)["y0"], ours["y0"])


@pytest.mark.parametrize("consumer", ["any", "onnxruntime", "openvino", "bitwright"])
def test_products_of_the_same_rows_round_trip(consumer):
    graph = product(columns=(3, 4, 5))
    again = load(checked(graph, consumer=consumer))
    count = lambda graph, op: sum(node.op == op for node in graph.nodes)
    for op in ("dynamic_quantize", "dequantize", "matmul"):
        assert count(again, op) == count(graph, op)
    assert {"w0", "w1", "w2"} <= set(again.values)
    assert [str(v.type) for _, v in again.outputs] == [str(v.type) for _, v in graph.outputs]
    given = feeds(5)
    ours, theirs = bw.compile(graph).run(given), bw.compile(again).run(given)
    for name, value in ours.items():
        np.testing.assert_array_equal(theirs[name], value)


@exact_onnxruntime
def test_rows_with_other_readers_are_written_too():
    graph, given = product(keep=True), feeds(4)
    model = checked(graph, consumer="onnxruntime")
    ours, theirs = bw.compile(graph).run(given), run_ort(model, given)
    np.testing.assert_array_equal(theirs["y0"], ours["y0"])
    np.testing.assert_allclose(theirs["real"], ours["real"], rtol=1e-6)


def test_a_foreign_function_of_that_name_is_inlined():
    model = checked(product(per_column=False), functions="local", activations="integer")
    for function in model.functions:
        if function.name == "quantized_matmul":
            function.node[-1].op_type = "Div"  # a foreign function of the same name
    call = next(n for n in model.graph.node if n.op_type == "quantized_matmul")
    del call.attribute[:]
    given = feeds(3)
    expected = run_ort(model, given)["y0"]
    np.testing.assert_allclose(bw.compile(load(model)).run(given)["y0"], expected, rtol=1e-5)


@pytest.mark.parametrize("functions", ["local", "inline"])
def test_files_with_the_name_of_the_last_release_load(functions):
    model = checked(product(), functions=functions, activations="integer")
    (old,) = (old for old, new in OPS.items() if new == "quantized_matmul")
    for function in model.functions:
        function.name = function.name.replace("quantized_matmul", old)
    for node in model.graph.node:
        node.op_type = node.op_type.replace("quantized_matmul", old)
    for entry in model.metadata_props:
        entry.value = entry.value.replace("quantized_matmul", old)
    with pytest.warns(BitwrightWarning, match="use 'quantized_matmul'"):
        forget()
        again = load(model)
    assert [node.op for node in again.nodes].count("matmul") == 1
    given = feeds(3)
    ours, theirs = bw.compile(product()).run(given), bw.compile(again).run(given)
    np.testing.assert_array_equal(theirs["y0"], ours["y0"])


@pytest.mark.parametrize("activations", ["static", "integer", "float"])
@pytest.mark.parametrize("element", ["u8", "i8"])
@pytest.mark.parametrize(
    "options",
    [{}, {"per_column": False}, {"zero": True}, {"zero": True, "per_column": False}],
    ids=str,
)
def test_standard_nodes_are_imported_as_the_same_product(options, element, activations):
    graph = product(columns=(3, 700), width=97, keep=True, element=element, **options)
    model = checked(graph, activations=activations)
    assert not model.functions and {node.domain for node in model.graph.node} == {""}
    again = load(model)
    found = [node.op for node in again.nodes]
    assert found.count("dynamic_quantize") == 1 and found.count("matmul") == 2
    assert "reduce_max" not in found and "clip" not in found
    given = feeds(5, 97)
    ours, theirs = bw.compile(graph).run(given), bw.compile(again).run(given)
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name])


def test_float_rows_multiply_a_dequantized_weight():
    model = checked(product(columns=(3, 4)))
    kinds = [node.op_type for node in model.graph.node]
    assert sorted(kinds) == sorted(["DequantizeLinear", "MatMul", "Add"] * 2)
    given = feeds(6)
    theirs, ours = run_ort(model, given), bw.compile(product(columns=(3, 4))).run(given)
    for name, value in ours.items():  # rows in 8 bits: half a percent of their range
        np.testing.assert_allclose(theirs[name], value, atol=0.02 * np.abs(value).max())
