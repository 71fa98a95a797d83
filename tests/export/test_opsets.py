"""The opset of a model is the lowest that can represent it, or the requested one."""

import numpy as np
import onnx
import pytest
from onnx_runs import assert_same, checked, run_ort

from bitwright.errors import ExportError
from bitwright.export.onnx import export_onnx
from bitwright.frontend.load import load
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE


def opset(model):
    return next(o.version for o in model.opset_import if o.domain == "")


def ops(model):
    return [node.op_type for node in model.graph.node]


def quantized(to, axis=None, block=0, scale="f32"):
    b = Builder("q")
    x = b.input("x", f"{scale}[4, 8]")
    shape = () if axis is None else (4,) if not block else (4, 8 // block)
    scales = b.constant(np.full(shape, 0.5), scale)
    where = {"axis": axis if not block else 1, "block": block}
    qvalues = b.quantize(x, scales, to=to, **where)
    return b.build(y=b.dequantize(qvalues, scales, **where))


@pytest.mark.parametrize(
    "options, least",
    [
        ({"to": "i8"}, 13),
        ({"to": "u8"}, 13),
        ({"to": "i8", "axis": 0}, 13),
        ({"to": "i8", "scale": "f16"}, 19),
        ({"to": "f8e4m3fn"}, 19),
        ({"to": "f8e5m2", "axis": 0}, 19),
        ({"to": "i4"}, 21),
        ({"to": "u4", "axis": 0}, 21),
        ({"to": "i16"}, 21),
        ({"to": "u16"}, 21),
        ({"to": "i8", "axis": 1, "block": 4}, 21),
        ({"to": "f4e2m1", "axis": 1, "block": 4}, 23),
        ({"to": "i2"}, 25),
        ({"to": "u2", "axis": 0}, 25),
    ],
    ids=str,
)
def test_quantization_follows_the_opset_rules(options, least):
    graph = quantized(**options)
    model = checked(graph)
    assert opset(model) == least
    is_float8 = options["to"].startswith("f8")  # DequantizeLinear differs between runtimes
    assert ops(model)[0] == "QuantizeLinear"
    assert ops(model)[-1] == ("Mul" if is_float8 else "DequantizeLinear")
    assert is_float8 or len(ops(model)) == 2
    assert model.ir_version == onnx.helper.find_min_ir_version_for(list(model.opset_import))
    if least > 13:
        with pytest.raises(ExportError, match=rf"opset {least - 1} cannot represent .* {least}"):
            export_onnx(graph, opset=least - 1)
    assert opset(checked(graph, opset=28)) == 28


@pytest.mark.parametrize("dtype, least", [("f8e4m3fn", 19), ("i4", 21), ("f4e2m1", 23), ("i2", 25)])
def test_tensors_of_late_types_need_their_opset(dtype, least):
    b = Builder("weights")
    model = checked(
        b.build(y=b.cast(b.parameter("w", np.zeros(5, np.float32).astype(int)), to=dtype))
    )
    assert opset(model) == least


def test_a_weight_in_eight_bits_with_one_scale_per_row_stays_at_13():
    b = Builder("weight_only")
    x = b.input("x", "f32[2, 6]")
    q = b.parameter("q", np.arange(24, dtype=np.int8).reshape(4, 6))
    graph = b.build(y=b.dequant_matmul(x, q, b.constant(np.ones((4, 1), np.float32)), block=6))
    assert opset(checked(graph)) == 13


LATE = [
    ("gelu", {}, "Gelu", 20),
    ("gelu", {"approximate": "tanh"}, "Gelu", 20),
    ("silu", {}, "Swish", 24),
    ("mish", {}, "Mish", 18),
    ("hard_swish", {}, "HardSwish", 14),
    ("layer_norm", {}, "LayerNormalization", 17),
    ("rms_norm", {}, "RMSNormalization", 23),
    ("group_norm", {"groups": 2}, "GroupNormalization", 21),
    ("cumprod", {"axis": 1}, "CumProd", 26),
]


@pytest.mark.parametrize("op, attrs, op_type, since", LATE, ids=lambda v: str(v))
def test_composites_are_one_node_where_the_opset_has_it(op, attrs, op_type, since):
    b = Builder(op)
    x = b.input("x", "f32[batch, 4, 6]")
    operands = [b.parameter("scale", np.ones(6, np.float32))] if op.endswith("r_norm") else []
    operands = [b.parameter("scale", np.ones(6, np.float32))] if op == "rms_norm" else operands
    graph = b.build(y=b.op(op, x, *operands, **attrs))
    feeds = {"x": np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)}
    expected = run(graph, feeds)
    for asked, is_one in ((None, False), (since - 1, False), (since, True)):
        model = checked(graph, opset=asked)
        assert (op_type in ops(model)) == is_one
        assert opset(model) == asked or asked is None
        assert asked is not None or opset(model) < since
        if op_type != "Swish" or not is_one:  # ONNX Runtime has no kernel for it
            assert_same(run_ort(model, feeds), expected, 2e-5)


def attention(**attrs):
    b = Builder("attention")
    q, k, v = (b.input(n, "f32[batch, 4, seq, 8]") for n in "qkv")
    return b.build(y=b.attention(q, k, v, **attrs))


@pytest.mark.parametrize("causal, masked", [(True, False), (False, True), (False, False)])
def test_decomposed_attention_is_imported_as_one_op(causal, masked):
    b = Builder("attention")
    q, k, v = (b.input(n, "f32[2, 3, t, 8]") for n in "qkv")
    mask = b.input("mask", "f32[t, t]") if masked else None
    graph = b.build(y=b.attention(q, k, v, mask, causal=causal))
    loaded = run_passes(load(export_onnx(graph, opset=17)), INFERENCE)
    found = [node for node in loaded.nodes if not node.is_boundary]
    assert [node.op for node in found] == ["attention"]
    assert found[0].attrs["causal"] == causal


def test_attention_is_one_node_from_23_on():
    graph = attention(causal=True)
    feeds = {n: np.random.default_rng(i).normal(size=(2, 4, 5, 8)) for i, n in enumerate("qkv")}
    feeds = {n: x.astype(np.float32) for n, x in feeds.items()}
    expected = run(graph, feeds)
    for asked in (None, 22, 23, 25):
        model = checked(graph, opset=asked)
        assert ("Attention" in ops(model)) == (asked in (23, 25))
        assert_same(run_ort(model, feeds), expected, 2e-5)
    assert "Attention" not in ops(checked(attention(causal=True, window=2), opset=24))
    assert "Attention" in ops(checked(attention(causal=True, window=2), opset=25))


@pytest.mark.parametrize("asked", [0, 12, 29, 100])
def test_opsets_outside_the_range_are_refused(asked):
    with pytest.raises(ExportError, match=f"opset {asked} cannot be written; expected 13 to"):
        export_onnx(attention(), opset=asked)


def test_a_requested_opset_that_is_too_low_names_node_and_reason():
    b = Builder("mask")
    graph = b.build(y=b.trilu(b.input("x", "f32[3, 3]"), upper=True, name="upper"))
    with pytest.raises(ExportError, match=r"trilu %upper: opset 13 .* Trilu .* opset 14"):
        export_onnx(graph, opset=13)
    assert opset(checked(graph)) == 14


def test_a_type_no_runtime_reads_is_computed_wider():
    b = Builder("sum")
    x = b.constant(np.ones((3, 4)), "bf16")
    model = checked(b.build(y=b.einsum(x, equation="ij->i")))
    assert ops(model) == ["Cast", "Einsum", "Cast"]
    assert opset(model) == 13


def test_every_opset_from_13_on_supports_plain_models():
    b = Builder("mlp")
    x = b.input("x", "f32[batch, 8]")
    y = b.relu(b.add(b.matmul(x, b.parameter("w", np.ones((8, 4), np.float32))), 1.0))
    graph = b.build(y=b.softmax(y), z=b.reduce_max(y, axes=[1]))
    feeds = {"x": np.ones((2, 8), np.float32)}
    expected = run(graph, feeds)
    for version in range(13, onnx.defs.onnx_opset_version() + 1):
        model = checked(graph, opset=version)
        assert opset(model) == version
        if version <= 26:
            assert_same(run_ort(model, feeds), expected)


def test_layer_norms_of_quantized_models_are_one_node_by_default():
    """ONNX Runtime moves a transpose into a decomposed norm, and then does not fuse it."""
    made = {}
    for is_quantized in (False, True):
        b = Builder("channels")
        x = b.transpose(b.input("x", "f32[2, 48, 6]"), perm=(0, 2, 1))
        y = b.layer_norm(x, *np.random.default_rng(0).normal(size=(2, 48)).astype(np.float32))
        qvalues = b.dynamic_quantize(y, per_token=True) if is_quantized else ()
        made[is_quantized] = b.build(y=y, **{f"q{i}": value for i, value in enumerate(qvalues)})
    assert opset(checked(made[False])) == 13
    assert "LayerNormalization" not in ops(checked(made[True], opset=13))
    model = checked(made[True])
    assert opset(model) == 17 and "LayerNormalization" in ops(model)
