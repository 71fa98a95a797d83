"""`bw.check_file`: predictions against ONNX Runtime and OpenVINO, and repairs."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import bitwright as bw
from bitwright.cli import main
from bitwright.deploy.repair import repair
from bitwright.deploy.truth import PACKAGES, compare_with_runtime
from bitwright.proof.saturation import pair_bound
from bitwright.target import machine
from other_runtimes import onnxruntime_is_exact
from quantized_kinds import KINDS, Draw

x86 = pytest.mark.skipif(not machine().is_x86, reason="the rules are those of x86")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Ten small files: kinds of layers, recipes, consumers."""
    folder = tmp_path_factory.mktemp("files")
    cases = [
        ("dense", "int8-static", {}),
        ("dense", "int8-static", {"weight_type": "i8"}),
        ("dense", "int8-dynamic", {"consumer": "onnxruntime"}),
        ("conv", "int8-static", {}),
        ("conv", "int8-static", {"consumer": "openvino"}),
        ("encoder", "int8", {}),
        ("encoder", "int8-static", {"weight_type": "i8"}),
        ("dense", "w8", {"weights": "dequantize"}),
        ("dense", "w4", {"consumer": "onnxruntime"}),
        ("conv", "w8", {}),
    ]
    made, models = [], {}
    for number, (kind, recipe, options) in enumerate(cases):
        if (kind, recipe) not in models:
            graph, feeds = KINDS[kind](Draw())
            models[kind, recipe] = bw.quantize(graph, [feeds() for _ in range(4)], recipe=recipe)
        made.append(folder / f"{number}-{kind}-{recipe}.onnx")
        models[kind, recipe].save(made[-1], proof=False, **options)
    return made


@x86
@pytest.mark.parametrize("target", PACKAGES)
def test_predictions_agree_with_the_runtime(files, target):
    pytest.importorskip(PACKAGES[target])
    total = 0
    for path in files:
        found = compare_with_runtime(path, target)
        assert not found.wrong, (path.name, found.wrong)
        total += found.nodes
    assert total > 20


def test_statuses_and_exit_codes(files):
    unsigned, signed = files[0], files[1]
    (safe,) = bw.check_file(unsigned)
    assert safe.is_ok and "unsafe" not in safe.counts
    (tensorrt,) = bw.check_file(unsigned, "tensorrt")
    assert not tensorrt.is_ok and "not tested" in tensorrt.summary()
    result = CliRunner().invoke(main, ["check", str(files[6]), "--for", "onnxruntime-cpu"])
    assert result.exit_code == 1 and "saturates on x86 without VNNI" in result.stdout
    with pytest.raises(bw.BitwrightError, match="there is no target"):
        bw.check_file(signed, "tflite")
    assert CliRunner().invoke(main, ["check", "missing.onnx"]).exit_code == 2


def run(path, feeds):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def test_a_repaired_file_is_safe_and_computes_the_same(files, tmp_path):
    path = tmp_path / "fixed.onnx"
    arguments = ["check", str(files[6]), "--for", "onnxruntime-cpu", "--fix", str(path), "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.stdout
    found = json.loads(result.stdout)
    assert found["changes"] and found["targets"][0]["is_ok"]
    feeds = KINDS["encoder"](Draw())[1]()
    exact = bw.compile(files[6]).run(feeds)
    repaired = bw.compile(path).run(feeds)
    for name, array in exact.items():
        np.testing.assert_array_equal(array, repaired[name])
    if onnxruntime_is_exact():
        np.testing.assert_allclose(run(files[6], feeds), run(path, feeds), rtol=1e-5, atol=1e-5)


def integer_model(weight):
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], name="quantize"),
        helper.make_node("MatMulInteger", ["q", "w", "z"], ["y"], name="product"),
    ]
    graph = helper.make_graph(
        nodes,
        "integer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", weight.shape[0]])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, ["n", weight.shape[1]])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_files_of_other_tools(tmp_path):
    large = integer_model(np.full((6, 3), 127, np.int8))
    (found,) = bw.check_file(large)
    assert found.counts == {"unsafe": 1}
    assert repair(large, tmp_path / "fixed.onnx") == [
        "product: weight 'w' as u8 with zero point 128"
    ]
    (found,) = bw.check_file(tmp_path / "fixed.onnx")
    assert found.counts == {"fused": 1}
    x = np.linspace(-1, 2, 12, dtype=np.float32).reshape(2, 6)
    fixed = run(tmp_path / "fixed.onnx", {"x": x})
    np.testing.assert_array_equal(fixed, bw.compile(large).run({"x": x})["y"])
    (small,) = bw.check_file(integer_model(np.full((6, 3), 60, np.int8)))
    assert small.counts == {"fused": 1}
    onnx.checker.check_model(onnx.load(tmp_path / "fixed.onnx"))


def test_the_bound_is_that_of_the_instruction():
    rng = np.random.default_rng(0)
    for _ in range(200):
        w = rng.integers(-128, 128, (2, 1))
        x = np.array([0, 255])
        sums = [a * w[0, 0] + b * w[1, 0] for a in x for b in x]
        saturates = max(sums) > 32767 or min(sums) < -32768
        assert pair_bound(w.astype(np.int8)).saturating == saturates
    odd = pair_bound(np.full((3, 2), 100, np.int8))
    assert (odd.pairs, odd.saturating, odd.channels) == (4, 2, 2)
