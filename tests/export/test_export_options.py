"""Export options for other consumers, and the round trip of their files."""

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

import bitwright as bw
from bitwright.cli import main
from bitwright.cli.export import OPTIONS
from bitwright.errors import BitwrightError, ExportError
from bitwright.export.onnx.options import CHOICES, CONSUMERS, Options, options_for
from bitwright.quant.model import recipe as recipes
from bitwright.warn import BitwrightWarning, forget

QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
ROWS = 1.5
"""Decibels that rows may lose where ONNX Runtime quantizes them, by blocks and with a sign."""


def network():
    """A convolution, a depthwise one, a mean, and two products around a GELU."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
    b = bw.Builder("net")
    x = b.input("x", "f32[n, 3, 8, 8]")
    y = b.relu(b.conv(x, draw(16, 3, 3, 3), draw(16), pads=(1, 1, 1, 1), name="first"))
    y = b.conv(y, draw(16, 1, 3, 3), draw(16), pads=(1, 1, 1, 1), groups=16, name="deep")
    y = b.reduce_mean(y, axes=[2, 3], keepdims=False)
    y = b.gelu(b.add(b.matmul(y, draw(16, 40), name="up"), draw(40)))
    return b.build(logits=b.matmul(y, draw(40, 10), name="down"))


def batches(count=6, seed=1):
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(2, 3, 8, 8)).astype(np.float32)} for _ in range(count)]


def saved(path, recipe, **options):
    quantized = bw.quantize(network(), batches(), recipe=recipe)
    quantized.save(path, **options)
    return quantized, onnx.load(path)


def answers(model, data):
    exe = bw.compile(model)
    return np.concatenate([exe.run(batch)["logits"] for batch in data])


def others(path, data):
    session = onnxruntime.InferenceSession(str(path))
    return np.concatenate([session.run(None, batch)[0] for batch in data])


def sqnr(exact, found):
    return 10 * np.log10((exact**2).sum() / max(((exact - found) ** 2).sum(), 1e-30))


def constants(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize("recipe", ["int8", "int8-static", "int8-dynamic", "w8", "w4"])
def test_the_default_is_standard_ops_that_every_runtime_gets_right(recipe, tmp_path):
    path = tmp_path / "q.onnx"
    quantized, model = saved(path, recipe)
    onnx.checker.check_model(model, full_check=True)
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {""}
    data = batches(40, seed=2)
    exact, ours = answers(network(), data), answers(quantized, data)
    assert sqnr(exact, others(path, data)) > sqnr(exact, ours) - ROWS
    np.testing.assert_array_equal(answers(path, data), ours)


@pytest.mark.parametrize("recipe", ["int8", {"symmetric": True}], ids=str)
def test_the_default_multiplies_no_signed_by_unsigned_values(recipe, tmp_path):
    """Such products saturate in ONNX Runtime and OpenVINO on x86 without VNNI."""
    _, model = saved(tmp_path / "q.onnx", recipe)
    arrays = constants(model)
    zeros = {
        n.output[0]: n.input[2]
        for n in model.graph.node
        if n.op_type == "DequantizeLinear" and len(n.input) > 2
    }
    products = [n for n in model.graph.node if n.op_type in ("Conv", "MatMul")]
    assert products
    for node in products:
        for name in node.input[:2]:
            assert name not in zeros or arrays[zeros[name]].dtype == np.uint8


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("recipe", ["int8", "w4"])
def test_every_consumers_file_is_the_same_model_here(consumer, recipe, tmp_path):
    path = tmp_path / "q.onnx"
    quantized, _ = saved(path, recipe, consumer=consumer)
    data = batches(3, seed=2)
    ours = answers(quantized, data)
    if recipe == "int8" or consumer != "onnxruntime":
        np.testing.assert_array_equal(answers(path, data), ours)
    else:  # MatMulNBits has other blocks
        np.testing.assert_allclose(answers(path, data), ours, rtol=1e-3, atol=1e-3)


def test_a_consumers_options_can_be_changed_one_by_one():
    assert options_for("onnxruntime", weights="dequantize").functions == "local"
    assert options_for("any", zero_points="zero").weight_type == "i8"
    with pytest.raises(ExportError, match=r"no consumer 'tensorrt'.*'any' or 'onnxruntime'"):
        options_for("tensorrt")
    with pytest.raises(ExportError, match="no export option 'format'"):
        bw.export_onnx(network(), format="int8")
    with pytest.raises(ExportError, match="need signed weights"):
        options_for("any", zero_points="zero", weight_type="u8")


def test_all_zero_points_are_zero_and_signed(tmp_path):
    path = tmp_path / "q.onnx"
    quantized, model = saved(path, {"symmetric": True}, zero_points="zero")
    onnx.checker.check_model(model, full_check=True)
    arrays, seen = constants(model), 0
    for node in model.graph.node:
        if node.op_type in QUANTIZERS and len(node.input) > 2:
            zero = arrays[node.input[2]]
            assert zero.dtype == np.int8 and not zero.any()
            seen += 1
    assert seen and not model.functions
    data = batches(3, seed=2)
    ours = answers(quantized, data)
    assert sqnr(answers(network(), data), ours) > 25
    assert sqnr(ours, others(path, data)) > 40
    np.testing.assert_array_equal(answers(path, data), ours)  # signed values, the same sums


def test_zero_points_that_are_not_zero_are_refused_with_a_hint(tmp_path):
    quantized = bw.quantize(network(), batches(), recipe="int8-static")
    with pytest.raises(ExportError, match="zero point that is not 0") as failure:
        quantized.save(tmp_path / "q.onnx", zero_points="zero")
    assert '"symmetric": true' in str(failure.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "recipe", ["int8-dynamic", {"symmetric": True, "schemes": {"up": "dynamic_per_token"}}]
)
def test_symmetric_recipes_have_no_dynamic_quantized_values(recipe):
    chosen = {"base": recipe, "symmetric": True} if isinstance(recipe, str) else recipe
    with pytest.raises(BitwrightError, match="dynamic_per_token has zero points"):
        bw.quantize(network(), batches(), recipe=chosen)


@pytest.mark.parametrize("recipe", ["w8", "w4", {"base": "w4", "weight_bits": 2, "block": 16}])
def test_weight_only_products_as_matmul_nbits(recipe, tmp_path):
    path = tmp_path / "q.onnx"
    quantized, model = saved(path, recipe, weights="nbits")
    calls = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    assert [node.domain for node in calls] == ["com.microsoft"] * 2
    bits = {a.i for node in calls for a in node.attribute if a.name == "bits"}
    assert bits == {{"w8": 8, "w4": 4}.get(str(recipe), 2)}
    data = batches(3, seed=2)
    ours = answers(quantized, data)
    if bits != {2}:
        np.testing.assert_allclose(others(path, data), ours, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(answers(path, data), ours, rtol=1e-3, atol=1e-3)
    again = tmp_path / "again.onnx"
    bw.load(path).save(again, weights="nbits")
    assert [n.op_type for n in onnx.load(again).graph.node].count("MatMulNBits") == 2
    np.testing.assert_allclose(answers(again, data), ours, rtol=1e-3, atol=1e-3)


def test_weight_only_products_as_blocked_dequantize_linear(tmp_path):
    path = tmp_path / "q.onnx"
    quantized, model = saved(path, "w4", weights="dequantize")
    blocks = [
        {a.name: a.i for a in node.attribute}
        for node in model.graph.node
        if node.op_type == "DequantizeLinear"
    ]
    assert {"axis": 0, "block_size": 32} in blocks
    data = batches(3, seed=2)
    np.testing.assert_allclose(answers(path, data), answers(quantized, data), rtol=1e-5, atol=1e-5)


def test_biases_are_32_bit_weights_signed_and_names_kept(tmp_path):
    recipe = {"base": "int8-static", "equalize": False}  # equalization renames the constants
    _, model = saved(tmp_path / "q.onnx", recipe, consumer="onnxruntime")
    arrays = constants(model)
    made = {output for node in model.graph.node for output in node.output}
    assert {"first", "deep", "up", "logits"} <= made
    assert [v.name for v in model.graph.input] == ["x"]
    assert [v.name for v in model.graph.output] == ["logits"]
    sources = {node.output[0]: node for node in model.graph.node}
    for node in model.graph.node:
        if node.op_type == "Conv":
            weight, bias = (arrays[sources[name].input[0]] for name in node.input[1:])
            assert weight.dtype == np.int8 and bias.dtype == np.int32
            assert sources[node.input[0]].op_type == "DequantizeLinear"


def test_unknown_options_are_refused():
    with pytest.raises(ExportError, match="functions"):
        Options(functions="none")
    with pytest.raises(ExportError, match="'inline' or 'local'"):
        bw.export_onnx(network(), functions="all")


def test_the_command_line_has_the_same_options(tmp_path):
    offered = {name[2:].replace("-", "_"): choices for name, choices, _ in OPTIONS}
    assert offered == {"consumer": tuple(CONSUMERS), **CHOICES}
    network().save(tmp_path / "net.onnx")
    folder = tmp_path / "data"
    folder.mkdir()
    for i, batch in enumerate(batches(4)):
        np.savez(folder / f"{i}.npz", **batch)
    output = tmp_path / "q.onnx"
    given = ["quantize", str(tmp_path / "net.onnx"), "--data", str(folder), "-o"]
    asked = ["--zero-points", "zero", "--functions", "inline"]
    result = CliRunner().invoke(main, [*given, str(output), *asked])
    assert result.exit_code == 0, result.output
    arrays = constants(onnx.load(output))
    zeros = [
        arrays[node.input[2]]
        for node in onnx.load(output).graph.node
        if node.op_type in QUANTIZERS and len(node.input) > 2
    ]
    assert zeros and not any(zero.any() for zero in zeros)
    refused = CliRunner().invoke(main, [*given, str(tmp_path / "q.bw"), *asked])
    assert refused.exit_code and "is for ONNX files" in str(refused.output) + str(refused.exception)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4"])
def test_files_that_only_bitwright_loads_say_so(recipe, tmp_path):
    forget()
    path = tmp_path / "q.onnx"
    quantized = bw.quantize(network(), batches(), recipe=recipe)
    with pytest.warns(BitwrightWarning, match="ONNX Runtime and OpenVINO do not load them"):
        quantized.save(path)
    with pytest.raises(Exception, match=r"DequantizeLinear|NOT_IMPLEMENTED"):
        onnxruntime.InferenceSession(str(path))
    data = batches(2, seed=2)
    np.testing.assert_array_equal(answers(path, data), answers(quantized, data))


@pytest.mark.parametrize("recipe", ["f8", {"base": "w4", "weight_bits": 2, "block": 16}], ids=str)
def test_files_of_other_widths_run_elsewhere(recipe, tmp_path):
    path = tmp_path / "q.onnx"
    quantized, _ = saved(path, recipe)
    data = batches(3, seed=2)
    ours = answers(quantized, data)
    np.testing.assert_allclose(others(path, data), ours, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(answers(path, data), ours)


@pytest.mark.parametrize("recipe", ["int8", "int8-static"])
def test_convolutions_that_no_runtime_fuses_may_stay_float(recipe, tmp_path):
    path = tmp_path / "q.onnx"
    quantized, model = saved(path, recipe, activations="float")
    onnx.checker.check_model(model, full_check=True)
    read = {name for node in model.graph.node for name in node.input}
    assert {t.name for t in model.graph.initializer} <= read
    quantizers = [n.op_type for n in model.graph.node].count("QuantizeLinear")
    _, plain = saved(tmp_path / "plain.onnx", recipe)
    assert quantizers < [n.op_type for n in plain.graph.node].count("QuantizeLinear")
    data = batches(40, seed=2)
    exact, ours = answers(network(), data), answers(quantized, data)
    assert sqnr(exact, others(path, data)) > sqnr(exact, ours) - ROWS
    np.testing.assert_array_equal(answers(path, data), ours)


def test_a_recipe_made_for_onnx_runtime_keeps_its_bits_and_no_other_does(tmp_path):
    """Rounded scales, powers of two and tables in f64 are for that runtime only."""
    assert tuple(CONSUMERS) == recipes.CONSUMERS
    data = batches(6)
    plain = bw.quantize(network(), data)
    made = bw.quantize(network(), data, {"consumer": "onnxruntime"})
    assert (plain.consumer, made.consumer) == ("any", "onnxruntime")
    scales = lambda q: [
        float(np.frexp(node.inputs[1].node.attrs["value"])[0])
        for node in q.graph.nodes
        if node.op == "quantize" and node.inputs[0].name != "mul"
    ]
    assert scales(made) == [0.5]  # a power of two: ONNX Runtime may sum dequantized numbers
    assert scales(plain) != [0.5]
    path = tmp_path / "q.onnx"
    made.save(path)
    assert onnx.load(path).functions  # the default of that consumer
    with pytest.raises(BitwrightError, match="no consumer 'tensorrt'"):
        bw.quantize(network(), data, {"consumer": "tensorrt"})


@pytest.mark.parametrize("is_transposed", [False, True])
def test_views_of_weights_as_matmul_nbits(is_transposed, tmp_path):
    """A view of the shape that MatMulNBits packs may hold the other order of axes."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    b = bw.Builder("net")
    x = b.input("x", "f32[n, 64]")
    q = b.constant(rng.integers(0, 256, (4, 1, 64), dtype=np.uint8))
    if is_transposed:
        w = b.dequantize(b.reshape(q, shape=(64, 4)), b.constant(draw(4)), None, axis=1)
        y = b.matmul(x, w)
    else:
        q = b.reshape(q, shape=(4, 64))
        y = b.dequant_matmul(x, q, b.constant(draw(4, 1)), None, block=64)
    graph = b.build(y=y)
    path = tmp_path / "views.onnx"
    graph.save(path, consumer="onnxruntime")
    assert [node.op_type for node in onnx.load(path).graph.node] == ["MatMulNBits"]
    feeds = {"x": draw(3, 64)}
    expected = bw.compile(graph, target="reference").run(feeds)["y"]
    np.testing.assert_allclose(
        onnxruntime.InferenceSession(path).run(None, feeds)[0], expected, rtol=1e-4, atol=1e-2
    )
