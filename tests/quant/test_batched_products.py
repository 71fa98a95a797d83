"""Products with several matrices: einsum, batched matmul, weights of experts."""

import warnings

import numpy as np
import pytest

import bitwright as bw
from bitwright.passes.manager import run_passes
from bitwright.pipeline import CPU, INFERENCE
from bitwright.quant.model.points import find_points
from bitwright.warn import BitwrightWarning, forget
from other_runtimes import onnxruntime_is_exact

TENSORS = {"schemes": {"*": "dynamic_per_tensor"}}


def draw(*shape, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)


def sqnr(exact, found):
    return 10 * np.log10((exact**2).sum() / max(((exact - found) ** 2).sum(), 1e-30))


def experts():
    """All tokens through all experts, then each expert's rows through its second matrix."""
    b = bw.Builder("experts")
    up = b.einsum(b.input("x", "f32[n, 6, 32]"), draw(4, 32, 48), equation="btd,edf->ebtf")
    y = b.einsum(b.relu(up), draw(4, 48, 32), equation="ebtf,efd->ebtd")
    return b.build(y=b.reduce_sum(y, axes=[0], keepdims=False)), (3, 6, 32)


def batched():
    b = bw.Builder("batched")
    y = b.add(b.matmul(b.input("x", "f32[4, n, 32]"), draw(4, 32, 48)), draw(4, 1, 48))
    return b.build(y=b.matmul(b.gelu(y), draw(4, 48, 16))), (4, 7, 32)


def heads():
    """Projections of heads as exporters of JAX models write them; the weight may come first."""
    b = bw.Builder("heads")
    y = b.einsum(b.input("x", "f32[n, 5, 32]"), draw(32, 4, 8), equation="ntd,dhk->nhtk")
    y = b.einsum(b.constant(draw(4, 8, 32)), y, equation="hkd,nhtk->ntd")
    return b.build(y=y), (3, 5, 32)


def one_matrix():
    b = bw.Builder("one")
    return b.build(y=b.matmul(b.input("x", "f32[n, 32]"), draw(1, 32, 24))), (9, 32)


def grouped():
    b = bw.Builder("grouped")
    x, counts = b.input("x", "f32[n, 32]"), b.constant(np.array([3, 0, 6]))
    return b.build(y=b.grouped_matmul(x, draw(3, 32, 24), counts)), (9, 32)


MODELS = [experts, batched, heads, one_matrix, grouped]


def batches(shape, count=8, seed=1):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=shape).astype(np.float32)} for _ in range(count)]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("recipe", ["int8", "int8-static", "int8-dynamic", TENSORS], ids=str)
@pytest.mark.filterwarnings("ignore::bitwright.warn.BitwrightWarning")
def test_they_run_as_integer_kernels_and_in_onnx_runtime(make, recipe, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    graph, shape = make()
    q = bw.quantize(graph, batches(shape), recipe)
    assert q.report.int8_mac_fraction == 1
    assert sum(layer.multiply_adds for layer in q.report.layers) > 0
    lowered = run_passes(q.graph, (*INFERENCE, *CPU[:3]))
    products = {node.op for _, node in lowered.walk() if "matmul" in node.op}
    assert products <= {"integer_matmul", "integer_grouped_matmul"}
    (test,) = batches(shape, 1, seed=2)
    exact = bw.compile(graph, target="reference").run(test)["y"]
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error", BitwrightWarning)  # no part of it is interpreted
        found = bw.compile(q).run(test)["y"]
    assert sqnr(exact, found) > 34
    q.save(tmp_path / "q.onnx")
    np.testing.assert_array_equal(bw.compile(tmp_path / "q.onnx").run(test)["y"], found)
    if onnxruntime_is_exact():
        (theirs,) = onnxruntime.InferenceSession(tmp_path / "q.onnx").run(None, test)
        assert sqnr(found, theirs) > 40


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("recipe", ["w8", "w4", "mxfp8"])
@pytest.mark.filterwarnings("ignore::bitwright.warn.BitwrightWarning")
def test_weight_only(make, recipe, tmp_path):
    graph, shape = make()
    q = bw.quantize(graph, batches(shape), recipe)
    assert {layer.scheme for layer in q.report.layers} == {"weight_only"}
    assert q.report.quantized_bytes < 0.36 * q.report.float_bytes
    (test,) = batches(shape, 1, seed=2)
    found = bw.compile(q).run(test)["y"]
    assert sqnr(bw.compile(graph, target="reference").run(test)["y"], found) > 15
    q.save(tmp_path / "q.onnx")
    np.testing.assert_array_equal(bw.compile(tmp_path / "q.onnx").run(test)["y"], found)


def test_products_of_values_count_as_work_and_stay_float():
    """Scores as an einsum: 2 * 6 * 6 * 32 multiply-adds, all in float."""
    b = bw.Builder("scores")
    x = b.input("x", "f32[n, 6, 32]")
    q = b.matmul(x, draw(32, 32), name="q")
    graph = b.build(y=b.einsum(q, x, equation="btd,bsd->bts", name="scores"))
    report = bw.quantize(graph, batches((2, 6, 32))).report
    work = {layer.name: (layer.scheme, layer.multiply_adds) for layer in report.layers}
    assert work == {
        "q": ("dynamic_per_token", 2 * 6 * 32 * 32),
        "scores": ("float", 2 * 6 * 6 * 32),
    }
    assert report.int8_mac_fraction == pytest.approx(32 / 38)


@pytest.mark.parametrize(
    "x_shape, w_shape, groups",
    [
        ((5, 3, 7, 8), (3, 8, 4), 3),
        ((7, 8), (3, 8, 4), 1),
        ((5, 1, 7, 8), (3, 8, 4), 1),
        ((2, 3, 7, 8), (2, 1, 8, 4), 2),
        ((2, 1, 7, 8), (2, 3, 8, 4), 2),
    ],
)
def test_rows_times_matrix_is_the_product(x_shape, w_shape, groups):
    w = draw(*w_shape)
    b = bw.Builder("batched")
    graph = b.build(y=b.matmul(b.input("x", f"f32{list(x_shape)}"), w))
    ((product,),) = (point.products for point in find_points(graph))
    assert product.groups == groups
    np.testing.assert_array_equal(product.as_weight(product.matrix), w)
    (batch,) = batches(x_shape, 1)
    rows = product.rows(batch["x"], 10**6, np.random.default_rng(0))
    found = np.einsum("rgk,gnk->rgn", rows, product.matrix)
    expected = batch["x"].astype(np.float64) @ w
    np.testing.assert_allclose(np.sort(found.reshape(-1)), np.sort(expected.reshape(-1)), atol=1e-5)
    some = product.rows(batch["x"], 2, np.random.default_rng(0))
    assert some.shape == (2, groups, 8)


def test_bias_correction_folds_into_an_existing_addition():
    graph, shape = batched()
    made = bw.quantize(graph, batches(shape), "int8-dynamic").graph
    count = sum(node.op == "add" for node in made.nodes)
    assert count == 2  # that of the model, and one behind the last product


@pytest.mark.filterwarnings("ignore::bitwright.warn.BitwrightWarning")
def test_experts_of_microsoft(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    helper = pytest.importorskip("onnx.helper")
    from onnx import TensorProto, numpy_helper

    weights = {"fc1": draw(4, 64, 32), "fc2": draw(4, 32, 64), "router": 4 * draw(32, 4)}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "router"], ["routed"]),
            helper.make_node(
                *("MoE", ["x", "routed", "fc1", "", "fc2", ""], ["y"]),
                domain="com.microsoft", k=2, activation_type="relu", normalize_routing_weights=1,
            ),
        ],
        "moe",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    q = bw.quantize(model, batches((24, 32)), {"ignore": ["router"]})
    assert q.report.int8_mac_fraction > 0.98
    (test,) = batches((24, 32), 1, seed=2)
    exact = onnxruntime.InferenceSession(model).run(None, test)[0]
    found = bw.compile(q).run(test)["y"]
    assert sqnr(exact, found) > 35
    q.save(tmp_path / "q.onnx")
    np.testing.assert_array_equal(bw.compile(tmp_path / "q.onnx").run(test)["y"], found)
    theirs = onnxruntime.InferenceSession(tmp_path / "q.onnx").run(None, test)[0]
    assert sqnr(found, theirs) > 40
