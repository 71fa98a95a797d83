"""Block formats of floats: stored and rounded as ml_dtypes rounds, in casts and in recipes."""

import ml_dtypes
import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import BitwrightError, QuantizationError
from bitwright.ir.dtype import dtype
from bitwright.lir.buffer import Place
from bitwright.ops.core.builder import Builder
from bitwright.quant.model.weights.grids import Grid
from bitwright.quant.tensor.cast_configuration import CastConfiguration

rng = np.random.default_rng(0)
FLOATS = ["f4e2m1", "f8e4m3fn", "f8e5m2"]


@pytest.mark.parametrize("kind", FLOATS)
def test_rounding_is_that_of_ml_dtypes(kind):
    """Every number of the type, every tie between two, and their neighbours."""
    element = dtype(kind)
    every = np.arange(1 << element.bits, dtype=np.uint8).view(element.numpy).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    ties = ((every[1:].astype(np.float64) + every[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    wild = rng.normal(size=999).astype(np.float32) * np.float32(element.max)
    x = np.concatenate([every, ties, *near, wild, wild * np.float32(1e-4)])
    found = x.copy()
    Grid(element).nearest(found)
    limit = np.float32(element.max)
    expected = np.clip(x, -limit, limit).astype(element.numpy).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


def mx_by_hand(x, element, block):
    """Quantized values and e8m0 scales of rows, by ml_dtypes alone."""
    cut = x.reshape(-1, block)
    peak = np.abs(cut).max(axis=1, keepdims=True)
    largest = float(ml_dtypes.finfo(element).max)
    scale = 2.0 ** np.ceil(np.log2(np.where(peak > 0, peak, largest) / largest))
    qvalues = (cut / scale).astype(element)
    return qvalues.reshape(x.shape), scale.astype(ml_dtypes.float8_e8m0fnu)


@pytest.mark.parametrize(
    "format, element",
    [
        ("mxfp4", ml_dtypes.float4_e2m1fn),
        ("mxfp8", ml_dtypes.float8_e4m3fn),
        ("mxfp8e5m2", ml_dtypes.float8_e5m2),
    ],
)
def test_mx_formats_to_the_bit(format, element):
    x = (rng.normal(size=(6, 64)) * 10.0 ** rng.integers(-6, 6, (6, 1))).astype(np.float32)
    x[2, :32] = 0
    qvalues, scales = mx_by_hand(x, element, 32)
    cast = bw.CastConfiguration.named(format).cast(x)
    for made in (cast, bw.quantize_tensor(x, format, "minmax")):
        found = made.qvalues if isinstance(made.qvalues, np.ndarray) else made.qvalues()
        held = made.scales if hasattr(made, "scales") else made.parameters.scale
        live = np.abs(x).reshape(-1, 32).max(axis=1) > 0
        assert held.dtype == ml_dtypes.float8_e8m0fnu
        np.testing.assert_array_equal(
            held.reshape(-1)[live].view(np.uint8), scales.reshape(-1)[live].view(np.uint8)
        )
        np.testing.assert_array_equal(found.view(np.uint8), qvalues.view(np.uint8))
    assert cast.nbytes == x.size * dtype(element).bits // 8 + x.size // 32
    factors = cast.scales.astype(np.float32).reshape(-1, 1)
    expected = qvalues.astype(np.float32).reshape(-1, 32) * factors
    np.testing.assert_array_equal(cast.values(), expected.reshape(x.shape))
    again = bw.CastConfiguration.named(format).round_trip(cast.values())
    np.testing.assert_array_equal(again, cast.values())


def test_nv_format_by_hand():
    x = rng.normal(size=(4, 48)).astype(np.float32)
    cast = CastConfiguration.named("nvfp4").cast(x)
    peaks = np.abs(x).reshape(4, 3, 16).max(axis=2)
    second = np.float32(peaks.max() / 6 / 448)
    scales = (peaks / 6 / np.float64(second)).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(cast.scales.view(np.uint8), scales.view(np.uint8))
    each = np.repeat(scales.astype(np.float32) * second, 16, axis=1)
    qvalues = np.clip(x / each, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(cast.qvalues.view(np.uint8), qvalues.view(np.uint8))
    assert cast.nbytes == 4 * 48 // 2 + 4 * 3 + 4


def test_squares_short_edges_and_plain_casts():
    x = rng.normal(size=(2, 5, 7)).astype(np.float32)
    square = CastConfiguration("f8e4m3fn", (2, 3))
    cast = square.cast(x)
    assert cast.scales.shape == (2, 3, 3)
    corner = np.abs(x[1, 4:, 6:]).max() / np.float32(448)
    assert cast.scales[1, 2, 2] == np.float32(corner)
    assert square.quality(x).sqnr > 25
    plain = CastConfiguration.plain("bf16")
    np.testing.assert_array_equal(plain.cast(x).qvalues, x.astype(ml_dtypes.bfloat16))
    assert plain.is_noop("bf16") and not plain.is_noop("f32")
    assert not CastConfiguration("f32", (1, 4)).is_noop("f32")
    assert CastConfiguration("f8e4m3fn", (1, 32), power_of_two=True) == CastConfiguration.named(
        "mxfp8"
    )
    for shape in ((0, 3), (7,), ()):
        assert square.round_trip(np.ones(shape, np.float32)).shape == shape


def test_what_a_cast_refuses():
    with pytest.raises(QuantizationError, match="goes to a floating type"):
        CastConfiguration("i8")
    with pytest.raises(QuantizationError, match="block does not fit"):
        CastConfiguration("f8e4m3fn", (0, 4))
    with pytest.raises(QuantizationError, match="no block format is named 'mxfp3'"):
        CastConfiguration.named("mxfp3")
    with pytest.raises(QuantizationError, match="NaN has no code"):
        CastConfiguration.named("mxfp4").cast(np.array([np.nan], np.float32))
    with pytest.raises(BitwrightError, match="weight format"):
        bw.quantize(Builder("g").build(), [], {"base": "mxfp4", "weight_format": "mxfp3"})


def two_layers():
    b = Builder("layers")
    x = b.input("x", "f32[n, 96]")
    h = b.relu(b.matmul(x, b.constant(rng.normal(size=(96, 64)).astype(np.float32) / 10)))
    return b.build(y=b.matmul(h, b.constant(rng.normal(size=(64, 50)).astype(np.float32) / 8)))


@pytest.mark.parametrize("recipe, least", [("f8", 28), ("mxfp8", 28), ("mxfp4", 14), ("nvfp4", 16)])
def test_recipes_run_from_their_files(recipe, least, tmp_path):
    graph = two_layers()
    data = [{"x": rng.normal(size=(32, 96)).astype(np.float32)} for _ in range(4)]
    found = bw.quantize(graph, data, recipe)
    kinds = {str(n.inputs[0].dtype) for n in found.graph.nodes if n.op == "dequantize"}
    assert kinds & {"f8e4m3fn", "f4e2m1"}
    found.save(tmp_path / "model.onnx")
    exe = bw.compile(tmp_path / "model.onnx")
    y, exact = exe.run(data[0])["y"], bw.compile(graph).run(data[0])["y"]
    kept = 10 * np.log10((exact**2).sum() / ((y - exact) ** 2).sum())
    assert kept > least
    reference = bw.compile(found.graph, target="reference").run(data[0])["y"]
    np.testing.assert_allclose(y, reference, atol=1e-5 * np.abs(reference).max())
    buffers = exe.engine.schedule.buffers
    held = sum(buffer.array.nbytes for buffer in buffers if buffer.place is Place.CONSTANT)
    weights = 96 * 64 + 64 * 50
    assert held < weights * (1.2 if "8" in recipe else 0.9)
