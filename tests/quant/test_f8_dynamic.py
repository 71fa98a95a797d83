"""The recipe f8-dynamic: float8 activations and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import BitwrightError
from bitwright.ir.graph import Graph
from bitwright.ops.core.interpret import run
from bitwright.passes.lower_integer.lower_f8 import lower_f8
from bitwright.passes.manager import run_passes

F8 = ml_dtypes.float8_e4m3fn
SCHEMES = ("dynamic_per_token", "static", "dynamic_per_tensor")


def model(seed: int = 0) -> Graph:
    rng = np.random.default_rng(seed)
    b = bw.Builder("layers")
    x = b.input("x", "f32[batch, 33]")
    weights = [rng.standard_normal(s).astype(np.float32) for s in ((33, 48), (48, 17))]
    bias = rng.standard_normal(48).astype(np.float32)
    h = b.relu(b.add(b.matmul(x, b.parameter("w1", weights[0])), b.parameter("b1", bias)))
    return b.build(y=b.matmul(h, b.parameter("w2", weights[1])))


def batches(count: int = 5) -> list[dict[str, Any]]:
    rng = np.random.default_rng(7)
    return [{"x": rng.standard_normal((16, 33)).astype(np.float32)} for _ in range(count)]


def relative(found: Any, exact: Any) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(scheme: str, tmp_path: Path) -> None:
    """Compiled, lowered to f8_matmul, exported and read back: the same results."""
    graph, data = model(), batches()
    recipe = {"base": "f8-dynamic", "schemes": {"*": scheme}}
    quantized = bw.quantize(graph, data=data, recipe=recipe)
    assert [layer.scheme for layer in quantized.report.layers] == [scheme] * 2
    want = run(quantized.graph, data[0])["y"]
    assert relative(want, run(graph, data[0])["y"]) < 0.06
    executable = bw.compile(quantized)
    assert not list(executable.engine.fallbacks)  # type: ignore[attr-defined]
    np.testing.assert_allclose(executable.run(data[0])["y"], want, rtol=1e-4, atol=1e-4)
    lowered = run_passes(quantized.graph, (lower_f8,))
    assert [node.op for node in lowered.nodes].count("f8_matmul") == 2
    np.testing.assert_allclose(run(lowered, data[0])["y"], want, rtol=1e-4, atol=1e-4)
    quantized.save(tmp_path / "q.onnx")
    again = bw.load(tmp_path / "q.onnx")
    ops = [node.op for node in quantized.graph.nodes if not node.is_boundary]
    assert [node.op for node in again.nodes if not node.is_boundary] == ops
    np.testing.assert_array_equal(run(again, data[0])["y"], want)
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(str(tmp_path / "q.onnx"), providers=["CPUExecutionProvider"])
    assert relative(session.run(None, data[0])[0], want) < 1e-3


def test_weights_and_operands() -> None:
    quantized = bw.quantize(model(), data=batches(), recipe="f8-dynamic").graph
    constants = [
        n for n in quantized.nodes if n.op == "constant" and n.outputs[0].dtype.name[0] == "f"
    ]
    assert sum(node.outputs[0].dtype.numpy == F8 for node in constants) == 2
    for node in (n for n in quantized.nodes if n.op in ("quantize", "dynamic_quantize")):
        assert node.outputs[0].dtype.numpy == F8


def test_per_token_is_measured_against_static() -> None:
    """The report says what was measured, also for rows of very different sizes."""
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.integers(-14, 0, (16, 1)))
    data = [{"x": (b["x"] * sizes).astype(np.float32)} for b in batches()]
    for given in (data, batches()):
        report = bw.quantize(model(), data=given, recipe="f8-dynamic").report
        assert {layer.scheme for layer in report.layers} <= {"dynamic_per_token", "static"}
        assert all(" dB at the products" in layer.reason for layer in report.layers)


def test_static_range_has_headroom() -> None:
    """Inputs half as large again as those of calibration do not clip."""
    recipe = {"base": "f8-dynamic", "schemes": {"*": "static"}}
    graph = bw.quantize(model(), data=batches(), recipe=recipe).graph
    feeds = {"x": batches()[0]["x"] * 1.5}
    assert relative(run(graph, feeds)["y"], run(model(), feeds)["y"]) < 0.06


def test_config() -> None:
    config = bw.QuantConfig(weight_dtype="f8", activations="dynamic", ignore=("w1",))
    report = bw.quantize(model(), batches(), config).report
    assert next(layer.scheme for layer in report.layers) == "float"


def test_refuses() -> None:
    for wrong, text in (
        ({"base": "int8", "activation_format": "f8"}, "need f8 weights"),
        ({"base": "f8-dynamic", "activation_format": "f4"}, "activation format"),
        ({"base": "f8-dynamic", "consumer": "onnxruntime"}, "no product of float8"),
    ):
        with pytest.raises(BitwrightError, match=text):
            bw.quantize(model(), data=batches(), recipe=wrong)


def test_zero_rows_and_peaks() -> None:
    """A row of zeros stays zero; the largest value of a row is exact up to its rounding."""
    b = bw.Builder("rows")
    q, scale, zero = b.dynamic_quantize(b.input("x", "f32[n, 5]"), to="f8e4m3fn", per_token=True)
    graph = b.build(y=b.dequantize(q, scale, zero, axis=-1, block=5), zero=b.cast(zero, to="f32"))
    x = np.array([[0] * 5, [1e-30, 0, 0, 0, -1e-30], [448, -1, 2, 3, 5]], np.float32)
    for found in (run(graph, {"x": x}), bw.compile(graph).run({"x": x})):
        np.testing.assert_allclose(found["y"], x, rtol=0.07)
        assert not found["zero"].any()
