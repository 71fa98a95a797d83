"""Winograd convolutions: exact matrices, rounding, edges, choice."""

from fractions import Fraction

import numpy as np
import pytest
from run_kernel import TARGETS, THREADS, Run

from bitwright.backends.cpu.kernels.conv import lower_conv
from bitwright.backends.cpu.kernels.conv.lower_winograd import Choice, choose
from bitwright.backends.cpu.kernels.conv.toom_cook import linear_map, matrices
from bitwright.ir.dim import symbol
from bitwright.ir.dtype import f32
from bitwright.lir.buffer import Buffer, contiguous
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.passes.manager import run_passes
from bitwright.passes.simplify.separate_bias import separate_bias
from bitwright.target import named

torch = pytest.importorskip("torch")
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def times(matrix, vector):
    return [sum(c * x for c, x in zip(row, vector, strict=True)) for row in matrix]


@pytest.mark.parametrize("results, taps", [(2, 3), (4, 3), (3, 3), (4, 2), (2, 2), (1, 3)])
def test_the_matrices_are_exact(results, taps):
    found = matrices(results, taps)
    data = [Fraction(int(n)) for n in rng.integers(-9, 9, results + taps - 1)]
    filter_ = [Fraction(int(n)) for n in rng.integers(-9, 9, taps)]
    products = [
        a * b for a, b in zip(times(found.filter, filter_), times(found.data, data), strict=True)
    ]
    expected = [sum(data[i + k] * filter_[k] for k in range(taps)) for i in range(results)]
    assert times(found.back, products) == expected


@pytest.mark.parametrize("results", [2, 4])
def test_common_subexpressions_save_operations_and_change_no_result(results):
    for matrix in (matrices(results, 3).data, matrices(results, 3).back):
        made = linear_map(matrix)
        inputs = [Fraction(int(n)) for n in rng.integers(-9, 9, len(matrix[0]))]
        values = list(inputs)
        for row in made.shared:
            values.append(sum(c * values[k] for k, c in row.items()))
        assert [sum(c * values[k] for k, c in row.items()) for row in made.rows] == times(
            matrix, inputs
        )
        plain = sum(sum(c != 0 for c in row) - 1 for row in matrix)
        assert made.operations <= (plain if results == 2 else plain - 2)


@pytest.fixture(params=[2, 4])
def results(request, monkeypatch):
    """Every 3×3 convolution uses tiles of this size."""
    monkeypatch.setattr(lower_conv, "choose", lambda *_: Choice(request.param, "forced"))
    return request.param


def lowered(graph):
    return run_passes(graph, [separate_bias, fuse_regions])


SHAPES = [
    # images, channels, height, width; channels of the result; pads
    ((1, 16, 32, 32), 16, [1, 1, 1, 1]),
    ((2, 17, 7, 9), 33, [1, 1, 1, 1]),
    ((1, 3, 1, 1), 5, [1, 1, 1, 1]),
    ((3, 20, 13, 6), 48, [0, 0, 0, 0]),
    ((1, 40, 5, 33), 70, [2, 0, 1, 3]),
    ((2, 1, 3, 3), 1, [0, 0, 0, 0]),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape, columns, pads", SHAPES)
def test_results_are_close_to_f64(results, shape, columns, pads, target):
    x, w, bias = normal(*shape), normal(columns, shape[1], 3, 3), normal(columns)
    b = Builder("conv")
    image = b.input("x", f"f32[n, {shape[1]}, h, w]")
    graph = b.build(y=b.relu(b.conv(image, w, bias, pads=pads)))
    top, left, bottom, right = pads
    padded = torch.nn.functional.pad(torch.tensor(x).double(), (left, right, top, bottom))
    exact = torch.nn.functional.conv2d(
        padded, torch.tensor(w).double(), torch.tensor(bias).double()
    )
    expected = torch.relu(exact).numpy()
    scale = np.abs(exact.numpy()).max()
    found = [
        Run(lowered(graph), {"x": x}, named(target), threads).outputs["y"] for threads in (1, 3)
    ]
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("threads", THREADS)
def test_epilogues_read_by_pixel_and_channel(results, threads):
    b = Builder("conv")
    x = b.input("x", "f32[n, 24, 9, 7]")
    gate, skip = b.input("gate", "f32[n, 24, 1, 1]"), b.input("skip", "f32[n, 40, 9, 7]")
    y = b.conv(x, normal(40, 24, 3, 3) / 5, normal(40), pads=[1, 1, 1, 1])
    gated = b.mul(b.conv(x, normal(24, 24, 3, 3) / 5, pads=[1, 1, 1, 1]), gate)
    graph = b.build(y=b.gelu(b.add(y, skip)), z=b.sigmoid(gated))
    feeds = {"x": normal(2, 24, 9, 7), "gate": normal(2, 24, 1, 1), "skip": normal(2, 40, 9, 7)}
    done = Run(lowered(graph), feeds, threads=threads)
    for name, expected in run(graph, feeds).items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(done.outputs[name], expected, rtol=0, atol=2e-5 * scale)


def chosen(shape, channels, target="avx512", **window):
    geometry = {"strides": (1, 1), "dilations": (1, 1), "begins": (1, 1), "ends": (1, 1)}
    columns = shape[1]
    y = contiguous(Buffer("y", f32, 0), shape)
    weight = np.zeros((columns, channels, *window.pop("taps", (3, 3))), np.float32)
    return choose(named(target), weight, lower_conv.Window(**geometry | window), y)


def test_the_choice_says_why():
    assert chosen((1, 64, 56, 56), 64).results == 4
    assert chosen((1, 16, 32, 32), 16).results == 4
    assert chosen((1, 64, symbol("h"), symbol("w")), 64).results == 4
    assert chosen((1, 256, 14, 14), 256).results in (0, 2)
    assert "products for 4 × 4 results" in chosen((1, 64, 56, 56), 64).why
    assert "of the cost" in chosen((1, 64, 32, 32), 3).why
    assert "in the cache" in chosen((1, 2048, 14, 14), 512).why
    assert "stack" in chosen((1, 64, 14, 14), 4096).why
    assert "stride" in chosen((1, 64, 28, 28), 64, strides=(2, 2)).why
    assert chosen((1, 64, 28, 28), 64, taps=(5, 5)) == Choice(0, "")


def test_a_knob_disables_winograd(monkeypatch):
    monkeypatch.setenv("BITWRIGHT_WINOGRAD", "off")
    assert "BITWRIGHT_WINOGRAD" in chosen((1, 64, 56, 56), 64).why
