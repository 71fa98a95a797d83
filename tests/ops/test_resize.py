"""Resize and grid_sample against ONNX's evaluator, and at the edges."""

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from single_op import evaluate

from bitwright.errors import InferenceError, RunError
from bitwright.ir import symbol
from bitwright.ir.dim import UNKNOWN
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import draw
from bitwright.ops.vision.resize import COORDINATES, CROP, NEAREST, scaled_size

n = symbol("n")
REGION = (0.0, 0.1, 1.0, 1.2)


def onnx_result(op, *arrays, **attrs):
    """What ONNX's evaluator answers; None is an operand left out."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(arrays)]
    node = helper.make_node(op, names, ["y"], **attrs)
    graph = helper.make_graph(
        [node],
        op,
        [
            helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None)
            for name in names
            if name
        ],
        [helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)])
    feeds = {name: x for name, x in zip(names, arrays, strict=True) if name}
    return ReferenceEvaluator(model).run(None, feeds)[0]


CASES = [
    (mode, coordinates, sizes)
    for mode in ("nearest", "linear", "cubic")
    for coordinates in COORDINATES
    for sizes in ((8, 10), (3, 2), (5, 7), (7, 1))
    # the text of the standard puts a single pixel at 0, its evaluator at -0.5
    if (mode, coordinates, sizes) != ("cubic", "pytorch_half_pixel", (7, 1))
]


@pytest.mark.parametrize("mode, coordinate_mode, sizes", CASES)
def test_sizes_agree_with_onnx(mode, coordinate_mode, sizes):
    x = draw(4, 5, dtype="f64")
    found = evaluate(
        "resize", x, sizes=sizes, mode=mode, coordinate_mode=coordinate_mode, roi=REGION
    )
    expected = onnx_result(
        "Resize",
        x,
        np.array(REGION, np.float32),
        None,
        np.array(sizes),
        mode=mode,
        coordinate_transformation_mode=coordinate_mode,
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("attrs", [{}, {"exclude_outside": 1}, {"antialias": 1}])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("scales", [(0.6, 1.7), (2.0, 0.3), (1.0, 0.5)])
def test_scales_agree_with_onnx(mode, scales, attrs):
    x = draw(6, 9, dtype="f64")
    scales = np.array(scales, np.float32)
    given = tuple(map(float, scales))
    sizes = [scaled_size(size, scale) for size, scale in zip(x.shape, given, strict=True)]
    found = evaluate("resize", x, sizes=sizes, scales=given, mode=mode, **attrs)
    expected = onnx_result("Resize", x, None, scales, mode=mode, **attrs)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_array_equal(evaluate("resize", x, None, scales, mode=mode, **attrs), found)


@pytest.mark.parametrize("rule", NEAREST)
def test_nearest_rounds_as_told(rule):
    x = np.arange(4.0)
    found = evaluate("resize", x, sizes=(8,), coordinate_mode="asymmetric", nearest_mode=rule)
    halves = np.arange(8) / 2
    rounded = {
        "floor": np.floor(halves),
        "ceil": np.ceil(halves),
        "round_prefer_floor": np.ceil(halves - 0.5),
        "round_prefer_ceil": np.floor(halves + 0.5),
    }
    np.testing.assert_array_equal(found, np.minimum(rounded[rule], 3))


def test_exact_ratios_do_not_lose_a_pixel():
    """1 / (1 / 3) and the like stay whole, so that floor does not fall below."""
    for size, count in ((9, 3), (49, 7), (10, 6), (7, 1)):
        for scales in (None, (float(np.float32(count / size)),)):
            attrs = {"sizes": (count,), "scales": scales, "nearest_mode": "floor"}
            found = evaluate("resize", np.arange(size), coordinate_mode="asymmetric", **attrs)
            assert found.tolist() == [i * size // count for i in range(count)]


def test_any_element_type_resizes_to_its_nearest():
    x = np.array(["a", "b"], object)
    assert evaluate("resize", x, sizes=(4,)).tolist() == ["a", "a", "b", "b"]
    big = np.array([2**60 + 1, 2**60 + 3])
    assert evaluate("resize", big, sizes=(4,)).tolist() == big.repeat(2).tolist()


def test_integers_round_and_saturate():
    x = np.array([0, 255, 0, 255, 255], "u1")
    found = evaluate("resize", x, sizes=(10,), mode="cubic")
    assert found.min() == 0 and found.max() == 255


def test_infinities_stay_where_they_are():
    x = np.array([1, np.inf, 2, 3])
    assert evaluate("resize", x, sizes=(7,), mode="linear", coordinate_mode="align_corners")[
        [0, 2, 4, 6]
    ].tolist() == [1, np.inf, 2, 3]


def test_a_single_pixel_of_pytorch_is_the_first():
    x = np.arange(5.0)
    for mode in ("nearest", "linear", "cubic"):
        attrs = {"mode": mode, "coordinate_mode": "pytorch_half_pixel"}
        assert evaluate("resize", x, sizes=(1,), **attrs).tolist() == [0]


def test_a_crop_shows_the_extrapolation_value_outside():
    attrs = {"mode": "linear", "coordinate_mode": CROP, "extrapolation_value": 9.0}
    found = evaluate("resize", np.arange(4.0), sizes=(3,), roi=(-1.0, 1.0), **attrs)
    assert found.tolist() == [9, 0, 3]


def test_empty_axes():
    assert evaluate("resize", np.zeros((0, 2)), sizes=(0, 4), mode="linear").shape == (0, 4)
    assert evaluate("resize", np.zeros((3, 2)), sizes=(0, 4), mode="cubic").shape == (0, 4)
    with pytest.raises(RunError, match="axis 0 is empty"):
        evaluate("resize", np.zeros((0, 2)), sizes=(3, 4))


def test_sizes_may_be_symbolic():
    b = Builder()
    x = b.input("x", "f32[n, 3]")
    y = b.resize(x, sizes=(2 * n, 3), mode="linear")
    assert y.shape == (2 * n, 3)
    assert run(b.build(y=y), {"x": np.ones((5, 3), "f4")})["y"].shape == (10, 3)


@pytest.mark.parametrize(
    "size, scale, expected",
    [
        (n, 2.0, 2 * n),
        (n, 0.5, n // 2),
        (n, float(np.float32(0.6)), 3 * n // 5),
        (n, 0.2718281828, UNKNOWN),
        (10, float(np.float32(0.7)), 7),
        (5, 1.5, 7),
        (0, 3.0, 0),
    ],
)
def test_scaled_sizes(size, scale, expected):
    assert scaled_size(size, scale) == expected


@pytest.mark.parametrize(
    "attrs, message",
    [
        ({}, "no size, or two"),
        ({"sizes": (2,)}, "expected 2, found 1"),
        ({"sizes": (2, 2), "antialias": True}, "nearest has no antialiasing"),
        ({"sizes": (2, 2), "coordinate_mode": CROP}, "no region"),
        ({"sizes": (2, 2), "roi": (0.0, 1.0)}, "expected 4, found 2"),
        ({"sizes": (2, 2), "mode": "area"}, "nearest or linear or cubic"),
        ({"scales": (2.0, 2.0)}, "no size, or two"),
    ],
)
def test_what_does_not_fit_is_refused(attrs, message):
    with pytest.raises(InferenceError, match=message):
        evaluate("resize", np.zeros((3, 3)), **attrs)


# grid_sample


@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_grid_sample_agrees_with_onnx(mode, padding, align):
    x = draw(1, 2, 3, 4, dtype="f64")
    grid = draw(1, 3, 3, 2, dtype="f64", seed=1, low=-2.5, high=2.5)
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": align}
    expected = onnx_result("GridSample", x, grid, **attrs)
    np.testing.assert_allclose(evaluate("grid_sample", x, grid, **attrs), expected, atol=1e-5)


def test_grid_sample_in_three_dimensions_finds_the_pixels():
    x = draw(2, 3, 2, 3, 4, dtype="f64")
    axes = [np.linspace(-1, 1, size) for size in x.shape[2:]]
    grid = np.stack(np.meshgrid(*axes, indexing="ij")[::-1], axis=-1)
    grid = np.broadcast_to(grid, (2, *grid.shape))
    for mode in ("nearest", "linear", "cubic"):
        found = evaluate("grid_sample", x, grid, mode=mode, align_corners=True)
        np.testing.assert_allclose(found, x, atol=1e-12)


def test_grid_positions_that_are_not_numbers():
    x, grid = np.ones((1, 1, 2, 2)), np.full((1, 1, 1, 2), np.nan)
    for padding in ("zeros", "border", "reflection"):
        found = evaluate("grid_sample", x, grid, padding_mode=padding)
        assert found.shape == (1, 1, 1, 1)
