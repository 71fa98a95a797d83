"""Float kernels next to quantization have the bits of ONNX Runtime on every target with fma."""

from dataclasses import replace

import numpy as np
import pytest
from emitted import lanewise
from run_kernel import TARGETS, Run, assert_same, run_op

import bitwright as bw
from bitwright.backends.cpu.codegen import math
from bitwright.export.onnx import export_onnx
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite.trace import Trace
from bitwright.target import host, named

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def four_lanes():
    """x86 with fma but without vectors of 8 lanes."""
    base = named("sse2")
    features = base.features | {"avx", "fma"}
    text = ",".join(f"+{feature}" for feature in sorted(features))
    return replace(base, features=features, llvm_features=text)


# with vectors of 16, 8 and 4 lanes, as far as they run here
FUSING = [
    target
    for target in (*map(named, TARGETS), four_lanes())
    if target.has_fma and target.runs_here()
]
# ONNX Runtime has other kernels on other architectures
pytestmark = pytest.mark.skipif(not named("avx2").runs_here(), reason="no x86 with AVX2")


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def model_of(steps, names, constants=(), opset=20, shape=None):
    """A file of nodes (op, inputs, output, attributes), the last of which gives y."""
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [make.make_node(op, ins, [out], **attrs) for op, ins, out, attrs in steps]
    inputs = [make.make_tensor_value_info(name, kind, shape) for name in names]
    outputs = [make.make_tensor_value_info("y", kind, None)]
    held = [onnx.numpy_helper.from_array(np.float32(v), name) for name, v in constants]
    graph = make.make_graph(nodes, "g", inputs, outputs, held)
    opsets = [make.make_opsetid("", opset)]
    return make.make_model(graph, opset_imports=opsets, ir_version=10)


def run_onnx(model, feeds):
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)
    return session.run(None, feeds)[0]


@pytest.mark.parametrize(
    ("op", "onnx_op", "bias"),
    [
        ("layer_norm", "LayerNormalization", True),
        ("layer_norm", "LayerNormalization", False),
        ("rms_norm", "RMSNormalization", False),
    ],
)
def test_norms(op, onnx_op, bias):
    """Alone and after a residual sum."""
    names = ["x", "r", "w", *(["b"] if bias else [])]
    steps = [
        ("Sum", ["x", "r"], "v", {}),
        (onnx_op, ["v", *names[2:]], "y", {"epsilon": 1e-5, "axis": -1}),
    ]
    model = model_of(steps, names, opset=23)
    for columns in (16, 17, 20, 35, 64, 71, 100, 384, 768, 1000, 1005):
        x, r = 3 * draw(13, columns) + 1, draw(13, columns, seed=1)
        weights = [draw(columns, seed=seed) for seed in (2, 3)[: 1 + bias]]
        feeds = dict(zip(names, (x, r, *weights), strict=True))
        expected = run_onnx(model, feeds)
        b = Builder("g")
        values = [b.input(name, f"f32{list(array.shape)}") for name, array in feeds.items()]
        graph = b.build(b.op(op, b.add(*values[:2]), *values[2:], eps=1e-5))
        fused = fuse_regions(graph, Trace())
        for target in FUSING:
            (found,) = Run(fused, feeds, target, 3).outputs.values()
            assert_same(found, expected)
            plain = run_op(op, x + r, *weights, target=target, threads=1, eps=1e-5)
            assert_same(plain, expected)


def test_large_means_lose_no_accuracy():
    """The mean has full f32 accuracy, and the variance uses distances from it."""
    x = 1000 + draw(5, 384)
    wide = x.astype(np.float64)
    spread = np.sqrt(wide.var(axis=1, keepdims=True))
    expected = (wide - wide.mean(axis=1, keepdims=True)) / spread
    for target in FUSING:
        found = run_op("layer_norm", x, target=target, eps=1e-12)
        assert np.max(np.abs(found - expected)) < 1000 * 2.0**-24 * 1.01


SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, 3.925, 0.921875], "f4")


def test_erf():
    x = np.concatenate([np.linspace(-6, 6, 400_003, dtype=np.float32), SPECIAL])
    expected = run_onnx(model_of([("Erf", ["x"], "y", {})], ["x"]), {"x": x})
    for target in FUSING:
        lanes = target.lanes(32)
        found = lanewise(target, lambda f, v: math.erf(f, v), x, lanes=lanes)
        np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))


def test_gelu():
    x = np.concatenate([np.linspace(-9, 9, 100_003, dtype=np.float32), SPECIAL[:3]])
    expected = run_onnx(model_of([("Gelu", ["x"], "y", {})], ["x"]), {"x": x})
    for target in FUSING:
        assert_same(run_op("gelu", x, target=target, threads=2), expected)


def test_exp():
    """For normal results; others may be rounded twice."""
    x = np.linspace(-87.3, 88.7, 400_003, dtype=np.float32)
    x = np.concatenate([x, np.array([0, -0.0, np.inf, np.nan, 89, 1e30], np.float32)])
    expected = run_onnx(model_of([("Exp", ["x"], "y", {})], ["x"]), {"x": x})
    for target in FUSING:
        found = lanewise(target, lambda f, v: math.exp(f, v), x, lanes=target.lanes(32))
        assert_same(found, expected)


CONSTANTS = (("root", 2**0.5), ("one", 1), ("half", 0.5))
# as most tools write it, which ONNX Runtime fuses
GELU = [
    ("Div", ["v", "root"], "scaled", {}),
    ("Erf", ["scaled"], "gate", {}),
    ("Add", ["gate", "one"], "share", {}),
    ("Mul", ["v", "share"], "product", {}),
    ("Mul", ["product", "half"], "y", {}),
]


@pytest.mark.skipif(not host().has_fma, reason="bits are those of fused multiply-add")
def test_gelu_of_a_file_in_steps(tmp_path):
    """With a preceding bias, which ONNX Runtime fuses as well."""
    bias = draw(333, seed=1)
    constants = (*CONSTANTS, ("b", bias))
    steps = [("Add", ["x", "b"], "v", {}), *GELU]
    model = model_of(steps, ["x"], constants, opset=13, shape=["n", 333])
    x = 4 * draw(40, 333)
    onnx.save(model, tmp_path / "gelu.onnx")
    found = bw.compile(tmp_path / "gelu.onnx").run({"x": x})["y"]
    assert_same(found, run_onnx(model, {"x": x}))


def test_gelu_after_an_int8_product():
    rng, b = np.random.default_rng(0), Builder("g")
    w = b.constant(rng.integers(-128, 128, (37, 90)).astype(np.int8))
    factor, bias = rng.uniform(1e-4, 2e-4, 90).astype(np.float32), draw(90)
    total = b.integer_matmul(b.input("x", "u8[n, 37]"), w, b.constant(np.uint8(7)))
    scaled = b.mul(b.cast(total, to="f32"), b.constant(factor))
    graph = b.build(b.gelu(b.add(scaled, b.constant(bias))))
    fused = fuse_regions(graph, Trace())
    assert sum(n.op == "fused" for n in fused.nodes) == 1
    x = rng.integers(0, 256, (21, 37)).astype(np.uint8)
    sums = (x.astype(np.int32) - 7) @ np.asarray(w.node.attrs["value"], np.int32)
    v = sums.astype(np.float32) * factor + bias
    expected = run_onnx(model_of(GELU, ["v"], CONSTANTS, opset=13), {"v": v})
    for target in FUSING:
        (found,) = Run(fused, {"x": x}, target, 3).outputs.values()
        assert_same(found, expected)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("opset", [17, 23])
@pytest.mark.parametrize("bias", [False, True])
def test_norms_without_a_scale(op, opset, bias):
    """The exported scale is ones, because ONNX Runtime does not fuse a norm without scale."""
    b = Builder("g")
    given = (None, draw(35, seed=1)) if bias else ()
    graph = b.build(y=b.op(op, b.input("x", "f32[n, 35]"), *given))
    x = 3 * draw(13, 35) + 1
    expected = run_onnx(export_onnx(graph, opset=opset), {"x": x})
    for target in FUSING:
        assert_same(Run(graph, {"x": x}, target, 2).outputs["y"], expected)
