"""Block formats of stored weights: the bits of the `gguf` package, and kernels for each format."""

import numpy as np
import pytest

from bitwright.errors import BitwrightError
from bitwright.ops.quant.block_formats import FORMATS, LEVEL, format_named, quantize_runs

SEED = 3


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_blocks_have_the_bits_of_gguf(name):
    gguf = pytest.importorskip("gguf")
    form = FORMATS[name]
    count = 60 if form.is_float else 5
    rng = np.random.default_rng(SEED)
    blocks = rng.integers(0, 256, (64, count * form.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    found = form.dequantize(blocks)
    assert found.shape == expected.shape == (64, count * form.elements)
    same = found.view(np.uint32) == expected.view(np.uint32)
    assert (same | (np.isnan(found) & np.isnan(expected))).all()


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(BitwrightError, match=r"'Q4_L'.*Q4_K"):
        format_named("Q4_L")
    with pytest.raises(BitwrightError, match="multiple of 18 bytes"):
        FORMATS["Q4_0"].dequantize(np.zeros((2, 19), np.uint8))
    with pytest.raises(BitwrightError, match="multiple of 256 elements"):
        FORMATS["Q4_K"].row_bytes(300)


def test_activations_are_quantized_per_32_elements():
    x = np.random.default_rng(SEED).standard_normal((3, 96)).astype(np.float32)
    x[1, 32:64], x[2, 5] = 0, np.inf
    q, rest, scale = quantize_runs(x)
    assert q.shape == rest.shape == (3, 3, 32) and scale.shape == (3, 3)
    error = np.abs(q * scale[..., None] - x.reshape(3, 3, 32))
    assert (error[:2] <= 0.5001 * scale[:2, :, None]).all()
    assert np.isnan(scale[2, 0]) and not q[1, 1].any() and not rest.any()


def test_runs_with_outliers_have_a_second_level():
    x = np.random.default_rng(SEED).standard_normal((2, 320)).astype(np.float32)
    x[0, 40] = 200
    q, rest, scale = quantize_runs(x)
    assert rest[0, 1].any() and not rest[0, [0, *range(2, 10)]].any() and not rest[1].any()
    errors = np.abs((q + rest / LEVEL) * scale[..., None] - x.reshape(2, 10, 32))
    assert errors[0, 1].max() < 0.51 * scale[0, 1] / LEVEL * 2
    for factor in (1.0, 1e25):  # squares beyond f32
        assert quantize_runs(x * np.float32(factor), 0.0)[1].any(axis=2).all()
    assert not quantize_runs(x, np.inf)[1].any()
