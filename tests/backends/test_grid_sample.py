"""grid_sample: the kernel against the interpreter and PyTorch."""

from itertools import product

import numpy as np
import pytest
from run_kernel import TARGETS, Run, assert_near, feeds_of, graph_of, reference, run_op

from bitwright.target import named

MODES = ("nearest", "linear", "cubic")
PADDINGS = ("zeros", "border", "reflection")
CASES = list(product(MODES, PADDINGS))
RNG = np.random.default_rng(0)


def draw(*shape, low=-1.0, high=1.0):
    return RNG.uniform(low, high, shape).astype(np.float32)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode, padding", CASES)
def test_against_the_interpreter(target, mode, padding):
    attrs = {"mode": mode, "padding_mode": padding}
    for align, threads, shape in ((True, 1, (1, 1, 1)), (False, 3, (2, 9, 17))):
        x, grid = draw(shape[0], 3, 5, 1 + shape[2] // 2), draw(*shape, 2, low=-2.5, high=2.5)
        grid[0, 0, 0] = [np.nan, 1.0]
        graph = graph_of("grid_sample", x, grid, align_corners=align, **attrs)
        feeds = feeds_of(graph, [x, grid])
        found = Run(graph, feeds, named(target), threads).outputs["out0"]
        assert_near(found, reference(graph, feeds)["out0"], 1e-6)


@pytest.mark.parametrize("element", [np.float16, np.float64])
def test_other_types_and_axes(element):
    for spatial in ((6,), (3, 4, 5)):
        x = draw(2, 2, *spatial).astype(element)
        grid = draw(2, *(4,) * len(spatial), len(spatial))
        graph = graph_of("grid_sample", x, grid)
        feeds = feeds_of(graph, [x, grid])
        expected = reference(graph, feeds)["out0"]
        assert_near(Run(graph, feeds, threads=2).outputs["out0"], expected, 1e-3)


def test_an_image_without_pixels_is_a_fault():
    x, grid = draw(1, 2, 0, 3), draw(1, 2, 2, 2)
    graph = graph_of("grid_sample", x, grid)
    assert Run(graph, feeds_of(graph, [x, grid])).fault is not None


@pytest.mark.parametrize("align", [False, True])
# cubic: ONNX pads the position first, PyTorch only the taps
@pytest.mark.parametrize("mode, padding", [c for c in CASES if c[0] != "cubic" or c[1] == "zeros"])
def test_like_pytorch(mode, padding, align):
    torch = pytest.importorskip("torch")
    x, grid = draw(2, 3, 11, 7), draw(2, 8, 9, 2, low=-1.6, high=1.6)
    attrs = {"padding_mode": padding, "align_corners": align}
    found = run_op("grid_sample", x, grid, threads=2, mode=mode, **attrs)
    named = {"nearest": "nearest", "linear": "bilinear", "cubic": "bicubic"}[mode]
    wanted = torch.nn.functional.grid_sample(
        torch.from_numpy(x), torch.from_numpy(grid), mode=named, **attrs
    )
    if mode == "nearest":  # a position halfway between two pixels may round either way
        assert (np.abs(found - wanted.numpy()) < 1e-5).mean() > 0.99
    else:
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-3, atol=2e-4)
