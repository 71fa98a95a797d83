"""Resize of axes whose sizes are known at run time: every mode, against the reference."""

import numpy as np
import pytest
from on_gpu import check_graph

import bitwright as bw

MODES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


def image(*shape, element=np.float32):
    return (np.random.default_rng(0).standard_normal(shape) * 20).astype(element)


def resized(sizes, element="f32", **attrs):
    b = bw.Builder("g")
    x, like = b.input("x", f"{element}[n, 3, h, w]"), b.input("like", f"{element}[n, 3, H, W]")
    h, w = (x.shape[axis] for axis in (2, 3))
    found = {"like": like.shape[2:], "twice": (2 * h, 2 * w), "fixed": (8, 5), "mixed": (2 * h, 7)}
    y = b.resize(x, sizes=(x.shape[0], 3, *found[sizes]), **attrs)
    return b.build(y=y, z=b.neg(like))


def feeds(*sizes, element=np.float32):
    """An image of the first two sizes, and one like the result."""
    shapes = {"x": sizes[:2], "like": sizes[2:]}
    return {name: image(2, 3, *shape, element=element) for name, shape in shapes.items()}


@pytest.mark.parametrize("coordinate_mode", MODES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_modes(mode, coordinate_mode):
    for sizes in ("like", "fixed", "twice"):
        graph = resized(sizes, mode=mode, coordinate_mode=coordinate_mode)
        check_graph(graph, feeds(4, 5, 7, 1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "nearest_mode", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
)
def test_nearest_takes_the_same_pixels(nearest_mode):
    graph = resized("like", "i8", nearest_mode=nearest_mode)
    for sizes in ((4, 5, 9, 3), (7, 6, 7, 12), (1, 3, 4, 3)):
        check_graph(graph, feeds(*sizes, element=np.int8))


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_pixels_outside_can_be_left_out(mode):
    graph = resized("like", mode=mode, exclude_outside=True, cubic_coeff_a=-0.5)
    check_graph(graph, feeds(4, 5, 7, 9), rtol=1e-5, atol=1e-4)


def test_scales_place_the_coordinates():
    for scale, mode in ((0.7, "nearest"), (1.3, "linear"), (2.0, "linear")):
        b = bw.Builder("g")
        x = b.input("x", "f32[1, 2, h]")
        size = x.shape[2] * round(scale * 10) // 10
        y = b.resize(x, sizes=(1, 2, size), scales=(1.0, 1.0, scale), mode=mode)
        check_graph(b.build(y=y), {"x": image(1, 2, 11)}, rtol=1e-5, atol=1e-4)


def test_one_known_axis_beside_an_unknown_one():
    check_graph(resized("mixed", mode="linear"), feeds(4, 5, 1, 1), rtol=1e-5, atol=1e-4)
    check_graph(
        resized("twice", "f16", mode="linear"), feeds(3, 5, 1, 1, element=np.float16), atol=2e-2
    )
