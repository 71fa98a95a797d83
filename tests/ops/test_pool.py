"""Pools and regions of interest against PyTorch, and at their edges."""

import math

import numpy as np
import pytest
from single_op import assert_close, evaluate, f64, infer, torch_of
from torch.nn import functional

from bitwright.errors import InferenceError, RunError
from bitwright.ir import parse_type

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(
    "kernel, stride, pad, dilation", [(2, 1, 0, 1), (3, 2, 1, 1), (3, 3, 1, 2)]
)
def test_max_pool_as_torch(rank, ceil, kernel, stride, pad, dilation):
    x = f64(2, 3, *(9, 8, 10)[:rank])
    function = getattr(functional, f"max_pool{rank}d")
    expected, places = torch_of(
        function, x, kernel, stride, pad, dilation, ceil_mode=ceil, return_indices=True
    )
    attrs = {
        "kernel": (kernel,) * rank,
        "strides": (stride,) * rank,
        "pads": (pad,) * 2 * rank,
        "dilations": (dilation,) * rank,
        "ceil": ceil,
    }
    assert_close(evaluate("max_pool", x, **attrs), expected)
    values, indices = evaluate("max_pool_indices", x, **attrs)
    assert_close(values, expected)
    planes = np.arange(6).reshape(2, 3, *(1,) * rank) * math.prod(x.shape[2:])
    np.testing.assert_array_equal(indices, places + planes)


def test_max_pool_prefers_the_first_of_equals_and_the_last_nan():
    x = np.array([[[1.0, 1, NAN, 0, NAN, 2, -INF, -INF]]])
    values, indices = evaluate("max_pool_indices", x, kernel=(2,), strides=(2,))
    np.testing.assert_array_equal(values, [[[1, NAN, NAN, -INF]]])
    np.testing.assert_array_equal(indices, [[[0, 2, 4, 6]]])
    _, indices = evaluate("max_pool_indices", x, kernel=(8,))
    assert indices.item() == 4
    np.testing.assert_array_equal(
        evaluate("max_pool", x, kernel=(2,), strides=(2,)), [[[1, NAN, NAN, -INF]]]
    )


def test_padding_never_wins():
    x = np.full((1, 1, 3), -100, np.int8)
    assert evaluate("max_pool", x, kernel=(3,), pads=(1, 1)).tolist() == [[[-100] * 3]]
    assert evaluate("max_pool", np.full((1, 1, 3), -5.0), kernel=(3,), pads=(1, 1)).max() == -5


def test_max_pool_indices_can_count_columns_first():
    x = np.arange(12.0).reshape(1, 1, 3, 4)
    _, indices = evaluate("max_pool_indices", x, kernel=(3, 2), strides=(1, 2), storage_order=1)
    assert indices.tolist() == [[[[5, 11]]]]


def test_max_unpool_undoes_max_pool():
    x = f64(2, 3, 6, 8)
    values, indices = evaluate("max_pool_indices", x, kernel=(2, 2), strides=(2, 2))
    expected = np.where(np.isin(np.arange(x.size), indices).reshape(x.shape), x, 0)
    assert_close(evaluate("max_unpool", values, indices, shape=x.shape), expected)
    with pytest.raises(RunError, match="index is outside the result; expected 0 to 3, found 4"):
        evaluate("max_unpool", np.ones((1, 1, 1)), np.array([[[4]]]), shape=(1, 1, 4))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kernel, stride, pad", [(2, 1, 0), (3, 2, 1), (4, 3, 2)])
def test_avg_pool_as_torch(rank, ceil, include, kernel, stride, pad):
    x = f64(2, 3, *(9, 8, 10)[:rank])
    function = getattr(functional, f"avg_pool{rank}d")
    expected = torch_of(function, x, kernel, stride, pad, ceil_mode=ceil, count_include_pad=include)
    found = evaluate(
        "avg_pool",
        x,
        kernel=(kernel,) * rank,
        strides=(stride,) * rank,
        pads=(pad,) * 2 * rank,
        ceil=ceil,
        count_include_pad=include,
    )
    assert_close(found, expected)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_lp_pool_as_torch(p):
    x = np.abs(f64(2, 3, 8, 9))
    expected = torch_of(functional.lp_pool2d, x, norm_type=p, kernel_size=(3, 2), stride=2)
    assert_close(evaluate("lp_pool", x, kernel=(3, 2), strides=(2, 2), p=p), expected)


def test_pools_infer_symbols():
    half = {"kernel": (3,), "strides": (2,), "pads": (1, 1)}
    assert infer("max_pool", "f32[n, c, w]", **half) == parse_type("f32[n, c, 1+(w-1)//2]")
    assert infer("max_pool", "f32[n, c, w]", ceil=True, **half) == parse_type("f32[n, c, 1+(w)//2]")


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("kernel, stride, pads", [(2, 3, (0, 1)), (3, 5, (1, 1)), (2, 2, (1, 0))])
def test_no_pooling_window_starts_after_the_input(size, kernel, stride, pads):
    x = np.ones((1, 1, size))
    y = evaluate("max_pool", x, kernel=(kernel,), strides=(stride,), pads=pads, ceil=True)
    assert (y.shape[2] - 1) * stride < size + pads[0]
    np.testing.assert_array_equal(y, 1)


def test_pools_refuse():
    with pytest.raises(InferenceError, match="kernel has the wrong number of entries; expected 2"):
        infer("max_pool", "f32[1, 3, 8, 8]", kernel=(2,))
    with pytest.raises(InferenceError, match="window does not fit spatial axis 1"):
        infer("avg_pool", "f32[1, 3, 8, 2]", kernel=(3, 3))
    with pytest.raises(InferenceError, match="x has the wrong element type; expected a floating"):
        infer("avg_pool", "i8[1, 3, 8]", kernel=(3,))
    with pytest.raises(InferenceError, match="p is too small"):
        infer("lp_pool", "f32[1, 3, 8]", kernel=(3,), p=0)
    with pytest.raises(InferenceError, match="storage_order is unknown"):
        infer("max_pool_indices", "f32[1, 3, 8]", kernel=(3,), storage_order=2)


# regions of interest


def test_roi_align_of_a_linear_map_reads_bin_centres():
    rows, columns = np.mgrid[:10, :12].astype(np.float64)
    x = np.stack([rows, columns])[None]
    rois = np.array([[2.0, 1, 8, 5]])
    y = evaluate("roi_align", x, rois, np.array([0]), output_height=2, output_width=3)
    np.testing.assert_allclose(y[0, 0], [[1.5, 1.5, 1.5], [3.5, 3.5, 3.5]])
    np.testing.assert_allclose(y[0, 1], [[2.5, 4.5, 6.5], [2.5, 4.5, 6.5]])


def test_max_roi_pool_covers_whole_cells():
    x = np.arange(36.0).reshape(1, 1, 6, 6)
    rois = np.array([[0, 1.0, 1, 3, 4], [0, 10, 10, 12, 12]])
    y = evaluate("max_roi_pool", x, rois, pooled_shape=(2, 2))
    assert y.tolist() == [[[[14, 15], [26, 27]]], [[[0, 0], [0, 0]]]]


def test_regions_refuse():
    with pytest.raises(RunError, match="names no image of the batch; expected 0 to 0, found 3"):
        evaluate("roi_align", f64(1, 1, 4, 4), f64(1, 4), np.array([3]))
    with pytest.raises(InferenceError, match="axis 1 of rois has the wrong size; expected 5"):
        infer("max_roi_pool", "f32[1, 1, 4, 4]", "f32[2, 4]", pooled_shape=(2, 2))
