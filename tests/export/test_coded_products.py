"""Products of codes with a range for each row: one function, exact in other runtimes."""

import numpy as np
import pytest
from onnx import helper
from onnx_runs import checked, run_ort

import bitwright as bw
from bitwright.frontend.onnx import load
from bitwright.ops.builder import Builder
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE


def product(
    rows="n", width=24, columns=(7,), per_column=True, zero=False, keep=False, element="u8"
):
    """Rows coded at run time times weights in codes; all of them read the same rows."""
    rng = np.random.default_rng(0)
    b = Builder("coded")
    x = b.input("x", f"f32[2, {rows}, {width}]")
    codes, scale, offset = b.dynamic_quantize(x, to=element, per_token=True)
    real = b.dequantize(codes, scale, offset, axis=-1, block=width)
    for i, size in enumerate(columns):
        w = b.parameter(f"w{i}", rng.integers(-127, 128, (width, size)).astype(np.int8))
        steps = rng.uniform(0.01, 0.1, size if per_column else ()).astype(np.float32)
        zeros = rng.integers(-9, 9, steps.shape).astype(np.int8) if zero else None
        wide = b.dequantize(w, steps, zeros, axis=1 if per_column else None)
        b.output(f"y{i}", b.add(b.matmul(real, wide), np.float32(0.5)))
    if keep:
        b.output("real", real)
    return b.build()


def feeds(rows, width=24):
    rng = np.random.default_rng(rows)
    return {"x": (3 * rng.normal(size=(2, rows, width)) + 1).astype(np.float32)}


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize(
    "options",
    [{}, {"per_column": False}, {"zero": True}, {"zero": True, "per_column": False}, {"width": 1}],
    ids=str,
)
def test_onnx_runtime_gives_our_bits(rows, options):
    graph = product(**options)
    given = feeds(rows, options.get("width", 24))
    model = checked(graph)
    assert [f.name for f in model.functions] == ["dynamic_quantize", "coded_matmul"]
    ours = bw.compile(graph).run(given)
    np.testing.assert_array_equal(run_ort(model, given)["y0"], ours["y0"])


def test_products_of_the_same_rows_come_back_as_they_were():
    graph = product(columns=(3, 4, 5))
    again = load(checked(graph))
    count = lambda graph, op: sum(node.op == op for node in graph.nodes)
    for op in ("dynamic_quantize", "dequantize", "matmul"):
        assert count(again, op) == count(graph, op)
    assert {"w0", "w1", "w2"} <= set(again.values)
    assert [str(v.type) for _, v in again.outputs] == [str(v.type) for _, v in graph.outputs]
    given = feeds(5)
    ours, theirs = bw.compile(graph).run(given), bw.compile(again).run(given)
    for name, value in ours.items():
        np.testing.assert_array_equal(theirs[name], value)


def test_rows_that_something_else_reads_are_written_too():
    graph, given = product(keep=True), feeds(4)
    ours, theirs = bw.compile(graph).run(given), run_ort(checked(graph), given)
    np.testing.assert_array_equal(theirs["y0"], ours["y0"])
    np.testing.assert_allclose(theirs["real"], ours["real"], rtol=1e-6)


def test_a_function_of_that_name_that_does_not_fit_is_inlined():
    model = checked(product(per_column=False))
    for function in model.functions:
        if function.name == "coded_matmul":
            function.node[-1].op_type = "Div"  # a body is what a call means only in our files
    call = next(n for n in model.graph.node if n.op_type == "coded_matmul")
    del call.attribute[:]
    given = feeds(3)
    expected = run_ort(model, given)["y0"]
    np.testing.assert_allclose(bw.compile(load(model)).run(given)["y0"], expected, rtol=1e-5)


@pytest.mark.parametrize("element", ["u8", "i8"])
@pytest.mark.parametrize(
    "options",
    [{}, {"per_column": False}, {"zero": True}, {"zero": True, "per_column": False}],
    ids=str,
)
def test_what_was_inlined_is_a_product_of_codes_again(options, element):
    graph = product(columns=(3, 700), width=97, keep=True, element=element, **options)
    again = load(bw.export_onnx(graph, functions="inline"))
    assert not any(node.op == "dynamic_quantize" for node in again.nodes)
    found = [node.op for node in run_passes(again, INFERENCE).nodes]
    assert found.count("dynamic_quantize") == 1 and found.count("matmul") == 2
    assert "reduce_max" not in found and "clip" not in found
    given = feeds(5, 97)
    ours, theirs = bw.compile(graph).run(given), bw.compile(again).run(given)
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name])


def test_other_sums_than_those_of_the_weight_are_no_zero_point():
    model = bw.export_onnx(product(), functions="inline")
    (node,) = (node for node in model.graph.node if node.op_type == "ReduceSum")
    node.op_type = "ReduceMax"
    del node.input[1:]
    node.attribute.append(helper.make_attribute("axes", [0]))
    again = load(model)
    found = run_passes(again, INFERENCE)
    assert not any(node.op == "dynamic_quantize" for node in found.nodes)


def test_sums_that_stand_in_a_column_are_no_zero_point():
    rng = np.random.default_rng(4)
    w = rng.integers(-128, 128, (16, 6)).astype(np.int32)
    b = bw.Builder()
    x = b.input("x", "f32[6, 16]")
    zero, byte = np.float32(0), np.float32(255)
    top = b.relu(b.reduce_max(x, axes=(1,), keepdims=True))
    bottom = b.minimum(b.reduce_min(x, axes=(1,), keepdims=True), zero)
    spread = b.div(b.sub(top, bottom), byte)
    scale = b.where(b.eq(top, bottom), np.float32(1), spread)
    point = b.round(b.clip(b.sub(zero, b.div(bottom, scale)), zero, byte))
    codes = b.clip(b.add(b.round(b.div(x, scale)), point), zero, byte)
    sums = b.matmul(b.cast(b.cast(codes, to="u8"), to="i32"), w)
    turned = b.mul(b.cast(b.cast(point, to="u8"), to="i32"), w.sum(0).reshape(6, 1).astype("i4"))
    graph = b.build(y=b.mul(b.cast(b.sub(sums, turned), to="f32"), b.mul(scale, np.float32(0.01))))
    found = [node.op for node in run_passes(graph, INFERENCE).nodes]
    assert "dynamic_quantize" not in found
    given = {"x": rng.normal(size=(6, 16)).astype(np.float32)}
    expected = bw.compile(graph, target="reference").run(given)["y"]
    np.testing.assert_allclose(bw.compile(graph).run(given)["y"], expected, rtol=1e-5)
