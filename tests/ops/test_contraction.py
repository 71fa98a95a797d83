"""Products, convolutions and transforms against PyTorch and numpy, and at their edges."""

import math

import numpy as np
import pytest
import torch
from single_op import assert_close, evaluate, f64, infer, torch_of
from torch.nn import functional

from bitwright.errors import InferenceError, RunError
from bitwright.ir import parse_type
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import draw

# matmul


@pytest.mark.parametrize(
    "x, w",
    [
        ((3, 4), (4, 5)),
        ((4,), (4,)),
        ((4,), (2, 4, 5)),
        ((2, 3, 4), (4,)),
        ((2, 1, 3, 4), (6, 4, 5)),
        ((0, 4), (4, 5)),
        ((3, 0), (0, 5)),
    ],
)
def test_matmul_as_numpy(x, w):
    assert_close(evaluate("matmul", f64(*x), f64(*w, seed=1)), f64(*x) @ f64(*w, seed=1))


def test_matmul_of_bytes_is_exact_in_i32():
    x, w = np.full((1, 1000), 255, np.uint8), np.full((1000, 1), -128, np.int8)
    y = evaluate("matmul", x, w)
    assert y.dtype == np.int32 and y.item() == -255 * 128 * 1000


def test_matmul_of_i32_wraps_like_i32():
    x = np.full((1, 4), 2**30, np.int32)
    assert evaluate("matmul", x, np.full((4, 1), 3, np.int32)).item() == 3 * 2**32 % 2**32


def test_matmul_of_large_integers_does_not_lose_bits():
    x = np.array([[2**60 + 1, 1]])
    assert evaluate("matmul", x, np.array([[1], [2]])).item() == 2**60 + 3
    wide = np.array([[2**63 + 1, 1]], np.uint64)
    assert evaluate("matmul", wide, np.array([[1], [2]], np.uint64)).item() == 2**63 + 3


def test_matmul_infers_symbols():
    assert infer("matmul", "f32[b, s, 8]", "f32[8, 4]") == parse_type("f32[b, s, 4]")
    assert infer("matmul", "f32[b, 1, s, k]", "f32[h, k, t]") == parse_type("f32[b, h, s, t]")
    assert infer("matmul", "i16[2, 3]", "i16[3, 4]") == parse_type("i64[2, 4]")


@pytest.mark.parametrize(
    "x, w, message",
    [
        ("f32[3, 4]", "f32[5, 6]", "contracted axis of w has the wrong size; expected 4, found 5"),
        ("f32[]", "f32[5]", "a scalar has no matrix product"),
        ("f32[2, 3]", "f16[3, 2]", "different element types"),
        ("bool[2, 3]", "bool[3, 2]", "x has the wrong element type; expected a number type"),
        ("f32[2, 3, 4]", "f32[5, 4, 2]", "do not broadcast"),
    ],
)
def test_matmul_refuses(x, w, message):
    with pytest.raises(InferenceError, match=message):
        infer("matmul", x, w)


def test_lora_matmul():
    x, w, a, b, bias = (
        f64(*shape, seed=i) for i, shape in enumerate([(2, 3, 5), (5, 4), (5, 2), (2, 4), (4,)])
    )
    y = evaluate("lora_matmul", x, w, a, b, bias, scale=0.5)
    assert_close(y, x @ (w + 0.5 * a @ b) + bias)
    with pytest.raises(InferenceError, match="last axis of b"):
        infer("lora_matmul", "f32[2, 5]", "f32[5, 4]", "f32[5, 2]", "f32[2, 3]")


def test_grouped_matmul():
    x, w = f64(6, 5), f64(3, 5, 4, seed=1)
    y = evaluate("grouped_matmul", x, w, np.array([2, 0, 4]))
    assert_close(y, np.concatenate([x[:2] @ w[0], x[2:] @ w[2]]))
    for counts in ([2, 0, 3], [7, -1, 0]):
        with pytest.raises(RunError, match="counts of at least 0 that sum to 6"):
            evaluate("grouped_matmul", x, w, np.array(counts))


@pytest.mark.parametrize("qvalues", ["i4", "u4", "i8", "u8", "i2", "u2"])
@pytest.mark.parametrize("block", [3, 4, 10])
def test_dequant_matmul(qvalues, block):
    element = draw(1, dtype=qvalues).dtype
    q = draw(6, 10, dtype=qvalues, low=-100, high=100)
    blocks = -(-10 // block)
    scale, zero = f64(6, blocks, seed=1), draw(6, blocks, dtype=qvalues, low=0, high=1)
    x, bias = f64(2, 3, 10, seed=2), f64(6, seed=3)
    spread = [np.repeat(p.astype(np.float64), block, 1)[:, :10] for p in (zero, scale)]
    w = (q.astype(np.float64) - spread[0]) * spread[1]
    assert q.dtype == element
    assert_close(evaluate("dequant_matmul", x, q, scale, zero, bias, block=block), x @ w.T + bias)
    unbiased = q.astype(np.float64) * spread[1]
    assert_close(evaluate("dequant_matmul", x, q, scale, block=block), x @ unbiased.T)


def test_dequant_grouped_matmul():
    q = draw(2, 6, 8, dtype="i4", low=-8, high=7)
    scale, x = f64(2, 6, 2, seed=1), f64(5, 8, seed=2)
    w = q.astype(np.float64) * np.repeat(scale, 4, 2)
    y = evaluate("dequant_grouped_matmul", x, q, scale, np.array([2, 3]), block=4)
    assert_close(y, np.concatenate([x[:2] @ w[0].T, x[2:] @ w[1].T]))


def test_dequant_matmul_refuses():
    with pytest.raises(InferenceError, match="axis 1 of scale has the wrong size; expected 3"):
        infer("dequant_matmul", "f32[2, 10]", "i4[6, 10]", "f32[6, 2]", block=4)
    with pytest.raises(InferenceError, match="block is too small"):
        infer("dequant_matmul", "f32[2, 10]", "i4[6, 10]", "f32[6, 2]", block=0)
    with pytest.raises(InferenceError, match="a quantized type of at most 8 bits"):
        infer("dequant_matmul", "f32[2, 10]", "i32[6, 10]", "f32[6, 2]", block=5)


# einsum


@pytest.mark.parametrize(
    "equation, shapes",
    [
        ("ij,jk->ik", [(3, 4), (4, 5)]),
        (" b i j , b j k -> b k i ", [(2, 3, 4), (2, 4, 5)]),
        ("ij,ij->", [(3, 4), (3, 4)]),
        ("ii", [(4, 4)]),
        ("ii->i", [(4, 4)]),
        ("ba", [(3, 4)]),
        ("...ij,...jk", [(2, 1, 3, 4), (6, 4, 5)]),
        ("i...->...", [(3, 2, 4)]),
        ("ab,bc,cd->ad", [(2, 3), (3, 4), (4, 5)]),
        ("Bq,qA->AB", [(2, 3), (3, 4)]),
        (",i->i", [(), (3,)]),
    ],
)
def test_einsum_as_numpy(equation, shapes):
    arrays = [f64(*shape, seed=i) for i, shape in enumerate(shapes)]
    expected = np.einsum(equation.replace(" ", ""), *arrays)
    assert_close(evaluate("einsum", *arrays, equation=equation), np.asarray(expected))


def test_einsum_sums_what_the_dots_stand_for():
    assert_close(evaluate("einsum", f64(2, 3, 4), equation="...j->j"), f64(2, 3, 4).sum((0, 1)))


def test_einsum_infers_symbols():
    assert infer("einsum", "f32[b, s, d]", "f32[b, t, d]", equation="bid,bjd->bij") == parse_type(
        "f32[b, s, t]"
    )
    assert infer("einsum", "f32[b, h, n, n]", equation="...ii->...i") == parse_type("f32[b, h, n]")


@pytest.mark.parametrize(
    "equation, message",
    [
        ("ij->ij", "names another number of operands; expected 2, found 1"),
        ("ij,j->i", "part 'j' of equation 'ij,j->i' does not fit its operand; expected rank 1"),
        ("ij,jk->iz", "bad axis 'z'"),
        ("ij,jk->ii", "bad axis 'i'"),
        ("i1,jk->i", "is not understood"),
        ("ij,ik->jk", "axes of one name have different sizes"),
        ("......,jk", "is not understood"),
    ],
)
def test_einsum_refuses(equation, message):
    with pytest.raises(InferenceError, match=message):
        infer("einsum", "f32[3, 4]", "f32[4, 5]", equation=equation)


# convolution


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stride, pad, dilation", [(1, 0, 1), (2, 1, 1), (1, 2, 2), (3, 1, 2)])
def test_conv_as_torch(rank, groups, stride, pad, dilation):
    x, bias = f64(2, 4, *(8, 7, 6)[:rank]), f64(8, seed=2)
    w = f64(8, 4 // groups, *(3, 2, 1)[:rank], seed=1)
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    expected = torch_of(
        function, x, w, bias, stride=stride, padding=pad, dilation=dilation, groups=groups
    )
    found = evaluate(
        "conv",
        x,
        w,
        bias,
        strides=(stride,) * rank,
        pads=(pad,) * 2 * rank,
        dilations=(dilation,) * rank,
        groups=groups,
    )
    assert_close(found, expected)


def test_conv_gathers_windows_in_parts(monkeypatch):
    x, w = f64(2, 3, 9, 8), f64(4, 3, 3, 3, seed=1)
    whole = evaluate("conv", x, w, pads=(1, 1, 1, 1))
    monkeypatch.setattr("bitwright.ops.nn.conv.COLUMN_ELEMENTS", 500)
    assert_close(evaluate("conv", x, w, pads=(1, 1, 1, 1)), whole)


def test_conv_of_bytes_is_exact():
    x = draw(1, 64, 5, 5, dtype="u8", low=0, high=255)
    w = draw(2, 64, 3, 3, dtype="i8", low=-128, high=127)
    y = evaluate("conv", x, w, pads=(1, 1, 1, 1))
    exact = evaluate("conv", x.astype(np.int64), w.astype(np.int64), pads=(1, 1, 1, 1))
    assert y.dtype == np.int32
    np.testing.assert_array_equal(y, exact)


def test_conv_infers_symbols():
    conv = {"strides": (2, 2), "pads": (1, 1, 1, 1)}
    assert infer("conv", "f32[n, 3, h, w]", "f32[8, 3, 3, 3]", **conv) == parse_type(
        "f32[n, 8, 1+(h-1)//2, 1+(w-1)//2]"
    )
    assert infer("conv", "f32[n, c, t]", "f32[m, c, k]") == parse_type("f32[n, m, 1-k+t]")
    assert infer("conv", "f32[1, c, 9]", "f32[m, d, 3]", groups=4) == parse_type("f32[1, m, 7]")


@pytest.mark.parametrize(
    "x, w, attrs, message",
    [
        ("f32[1, 3]", "f32[4, 3]", {}, "expected batch, channels and spatial axes"),
        ("f32[1, 3, 8]", "f32[4, 3, 3, 3]", {}, "w has the wrong rank; expected rank 3"),
        ("f32[1, 3, 8]", "f32[4, 2, 3]", {}, "axis 1 of w.*expected 3, found 2"),
        ("f32[1, 3, 8]", "f32[4, 3, 3]", {"groups": 2}, "x cannot be divided into 2 groups"),
        ("f32[1, 4, 8]", "f32[3, 2, 3]", {"groups": 2}, "w cannot be divided into 2 groups"),
        ("f32[1, 3, 8]", "f32[4, 3, 9]", {}, "does not fit spatial axis 0.*at least 9, found 8"),
        ("f32[1, 3, 8]", "f32[4, 3, 3]", {"strides": (1, 1)}, "strides.*expected 1"),
        ("f32[1, 3, 8]", "f32[4, 3, 3]", {"strides": (0,)}, "strides has an entry.*at least 1"),
        ("f32[1, 3, 8]", "f32[4, 3, 3]", {"pads": (0, -1)}, "pads has an entry.*at least 0"),
        ("f32[1, 3, 8]", "i8[4, 3, 3]", {}, "different element types"),
    ],
)
def test_conv_refuses(x, w, attrs, message):
    with pytest.raises(InferenceError, match=message):
        infer("conv", x, w, **attrs)


def test_conv_refuses_an_input_that_turns_out_too_small():
    b = Builder("small")
    y = b.conv(b.input("x", "f64[1, 1, t]"), f64(1, 1, 4))
    with pytest.raises(RunError, match=r"conv.*window does not fit spatial axis 0.*at least 4"):
        run(b.build(y), {"x": f64(1, 1, 2)})


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "stride, pad, dilation, extra", [(1, 0, 1, 0), (2, 1, 1, 1), (3, 0, 2, 2), (2, 2, 3, 0)]
)
def test_conv_transpose_as_torch(rank, groups, stride, pad, dilation, extra):
    x, bias = f64(2, 4, *(5, 4, 3)[:rank]), f64(3 * groups, seed=2)
    w = f64(4, 3, *(3, 2, 2)[:rank], seed=1)
    function = getattr(functional, f"conv_transpose{rank}d")
    options = {"stride": stride, "padding": pad, "dilation": dilation, "output_padding": extra}
    expected = torch_of(function, x, w, bias, groups=groups, **options)
    found = evaluate(
        "conv_transpose",
        x,
        w,
        bias,
        strides=(stride,) * rank,
        pads=(pad,) * 2 * rank,
        dilations=(dilation,) * rank,
        output_padding=(extra,) * rank,
        groups=groups,
    )
    assert_close(found, expected)


def test_conv_transpose_infers_symbols_and_refuses():
    attrs = {"strides": (2, 2), "pads": (1, 1, 1, 1)}
    assert infer("conv_transpose", "f32[n, 3, h, w]", "f32[3, 8, 4, 4]", **attrs) == parse_type(
        "f32[n, 8, 2*h, 2*w]"
    )
    with pytest.raises(InferenceError, match="pads are larger than the result"):
        infer("conv_transpose", "f32[1, 3, 2]", "f32[3, 8, 2]", pads=(2, 2))
    with pytest.raises(InferenceError, match="axis 0 of w has the wrong size; expected 3"):
        infer("conv_transpose", "f32[1, 3, 2]", "f32[4, 8, 2]")


@pytest.mark.parametrize("stride, pad, dilation", [(1, 0, 1), (2, 1, 2)])
def test_col2im_as_torch(stride, pad, dilation):
    options = {"stride": stride, "padding": pad, "dilation": dilation}
    columns = torch_of(functional.unfold, f64(2, 3, 8, 7), kernel_size=(3, 2), **options)
    expected = torch_of(functional.fold, columns, output_size=(8, 7), kernel_size=(3, 2), **options)
    found = evaluate(
        "col2im",
        columns,
        image_shape=(8, 7),
        block_shape=(3, 2),
        strides=(stride,) * 2,
        pads=(pad,) * 4,
        dilations=(dilation,) * 2,
    )
    assert_close(found, expected)


def test_deform_conv_without_offsets_is_conv():
    x, w = f64(2, 4, 6, 7), f64(4, 2, 3, 2, seed=1)
    attrs = {"strides": (2, 1), "pads": (1, 0, 1, 1), "dilations": (1, 2), "groups": 2}
    expected = evaluate("conv", x, w, f64(4, seed=2), **attrs)
    rows, columns = expected.shape[2:]
    offset = np.zeros((2, 2 * 6 * 2, rows, columns))
    found = evaluate("deform_conv", x, w, offset, f64(4, seed=2), offset_groups=2, **attrs)
    assert_close(found, expected)


def test_deform_conv_interpolates_and_sees_zeros_outside():
    x, w = np.arange(9.0).reshape(1, 1, 3, 3), np.ones((1, 1, 1, 1))
    offset = np.zeros((1, 2, 3, 3))
    offset[:, 0], offset[:, 1] = 0.5, -0.25  # half a row down, a quarter of a column left
    expected = functional.grid_sample(
        torch.tensor(x),
        torch.tensor(
            [[[[j - 0.25 - 1, i + 0.5 - 1] for j in range(3)] for i in range(3)]],
            dtype=torch.float64,
        ),
        align_corners=True,
    ).numpy()
    assert_close(evaluate("deform_conv", x, w, offset), expected)
    halved = evaluate("deform_conv", x, w, offset, None, np.full((1, 1, 3, 3), 0.5))
    assert_close(halved, expected / 2)


def test_deform_conv_keeps_infinities_outside_its_windows():
    x = np.array([[[math.inf, 1, 2]]])
    offset = np.full((1, 1, 3), -0.5)
    y = evaluate("deform_conv", x, np.ones((1, 1, 1)), offset)
    assert y.tolist() == [[[math.inf, math.inf, 1.5]]]


def test_sizes_left_open_are_checked_when_run():
    b = Builder("open")
    x, bias = b.input("x", "f64[1, 2, 5]"), b.input("bias", "f64[m]")
    w = b.input("w", "f64[3, 2, 3]")
    graph = b.build(b.conv(x, w, bias))
    feeds = {"x": f64(1, 2, 5), "w": f64(3, 2, 3), "bias": f64(1)}
    with pytest.raises(RunError, match="bias has the wrong shape"):
        run(graph, feeds)


# linear algebra and transforms


def test_solve_and_det_as_numpy():
    a, b = f64(2, 3, 3) + 4 * np.eye(3), f64(5, 1, 3, 2, seed=1)
    assert_close(a @ evaluate("solve", a, b), np.broadcast_to(b, (5, 2, 3, 2)))
    assert_close(evaluate("det", a), np.linalg.det(a))
    assert evaluate("det", np.zeros((0, 0))) == 1
    with pytest.raises(RunError, match="a has no inverse"):
        evaluate("solve", np.zeros((2, 2)), np.ones((2, 1)))
    with pytest.raises(InferenceError, match="last axis of x has the wrong size; expected 2"):
        infer("det", "f32[4, 2, 3]")


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("length", [None, 5, 16])
def test_dft_as_numpy(inverse, length):
    signal = draw(3, 8, 2, dtype="c128")
    x = np.stack([signal.real, signal.imag], -1)
    expected = (np.fft.ifft if inverse else np.fft.fft)(signal, length, 1)
    y = evaluate("dft", x, axis=1, length=length, inverse=inverse)
    assert_close(y[..., 0] + 1j * y[..., 1], expected)
    if length is None:
        assert_close(evaluate("fft", signal, axis=1, inverse=inverse), expected)


@pytest.mark.parametrize("length", [8, 9])
def test_one_sided_transforms_are_inverse(length):
    x = f64(3, length, 1)
    terms = evaluate("dft", x, axis=-2, onesided=True)
    assert terms.shape == (3, length // 2 + 1, 2)
    assert_close(evaluate("dft", terms, axis=-2, onesided=True, inverse=True, length=length), x)


def test_dft_infers_symbols_and_refuses():
    assert infer("dft", "f32[b, n, 1]", axis=1, onesided=True) == parse_type("f32[b, 1+(n)//2, 2]")
    assert infer("dft", "f32[b, n, 2]", axis=1, onesided=True, inverse=True) == parse_type(
        "f32[b, 2*n-2, 1]"
    )
    with pytest.raises(InferenceError, match=r"a last axis of size 1 \(real\) or 2"):
        infer("dft", "f32[b, n, 3]", axis=1)
    with pytest.raises(InferenceError, match="axis 2 holds real and imaginary parts"):
        infer("dft", "f32[b, n, 2]", axis=2)
    with pytest.raises(InferenceError, match="expected a last axis of size 1"):
        infer("dft", "f32[b, n, 2]", axis=1, onesided=True)
    with pytest.raises(InferenceError, match="expected a complex type"):
        infer("fft", "f32[8]")
