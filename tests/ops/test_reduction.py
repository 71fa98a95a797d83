"""Reductions, running sums, top-k, softmax, norms, losses: against PyTorch and at their edges."""

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
from bitwright.ops.core.symbolic import SizeEvaluator

NAN, INF = math.nan, math.inf

REDUCTIONS = {
    "reduce_sum": torch.sum,
    "reduce_mean": torch.mean,
    "reduce_max": torch.amax,
    "reduce_min": torch.amin,
    "reduce_l1": lambda x, **options: torch.linalg.vector_norm(x, 1, **options),
    "reduce_l2": lambda x, **options: torch.linalg.vector_norm(x, 2, **options),
    "reduce_log_sum_exp": torch.logsumexp,
}


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axes", [(0,), (1, -1), (0, 1, 2)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_as_torch(name, axes, keepdims):
    x = f64(3, 4, 5)
    expected = torch_of(REDUCTIONS[name], x, dim=axes, keepdim=keepdims)
    assert_close(evaluate(name, x, axes=axes, keepdims=keepdims), expected)


def test_product():
    assert_close(evaluate("reduce_prod", f64(3, 4), axes=(1,)), f64(3, 4).prod(1, keepdims=True))


@pytest.mark.parametrize(
    "name, element, expected",
    [
        ("reduce_sum", "f32", 0),
        ("reduce_prod", "f32", 1),
        ("reduce_mean", "f32", NAN),
        ("reduce_max", "f32", -INF),
        ("reduce_min", "f16", INF),
        ("reduce_max", "i8", -128),
        ("reduce_min", "u64", 2**64 - 1),
        ("reduce_max", "bool", False),
        ("reduce_min", "bool", True),
        ("reduce_l1", "f32", 0),
        ("reduce_l2", "f32", 0),
        ("reduce_log_sum_exp", "f32", -INF),
    ],
)
def test_nothing_reduces_to_the_identity(name, element, expected):
    found = evaluate(name, draw(2, 0, dtype=element), axes=(1,), keepdims=False)
    np.testing.assert_array_equal(found, np.array([expected] * 2, found.dtype))


def test_the_mean_of_no_integers_is_an_error():
    with pytest.raises(RunError, match="mean of no integers"):
        evaluate("reduce_mean", np.zeros((2, 0), np.int32), axes=(1,))


def test_integers_stay_integers():
    x = np.array([[-7, 2], [100, 100]], np.int8)
    assert evaluate("reduce_mean", x, axes=(1,), keepdims=False).tolist() == [-2, 100]
    assert evaluate("reduce_sum", x, axes=(1,), keepdims=False).tolist() == [-5, 200 - 256]
    assert evaluate("reduce_l2", np.array([3, -4]), axes=(0,), keepdims=False) == 5


def test_nan_wins():
    x = np.array([[1.0, NAN, 3], [1, 2, 3]])
    for name in ("reduce_max", "reduce_min", "reduce_log_sum_exp"):
        assert np.isnan(evaluate(name, x, axes=(1,))).ravel().tolist() == [True, False]
    assert evaluate("argmax", x, axis=1).ravel().tolist() == [1, 2]
    assert evaluate("argmin", x, axis=1).ravel().tolist() == [1, 0]


def test_log_sum_exp_survives_extremes():
    x = np.array([[1000.0, 1000], [-INF, -INF], [INF, 0], [-1000, -1000]])
    found = evaluate("reduce_log_sum_exp", x, axes=(1,), keepdims=False)
    np.testing.assert_allclose(found, [1000 + math.log(2), -INF, INF, -1000 + math.log(2)])


def test_no_axes_reduce_nothing():
    x = f64(2, 3)
    for name in ("reduce_sum", "reduce_mean", "reduce_max", "reduce_prod"):
        np.testing.assert_array_equal(evaluate(name, x, axes=()), x)
    np.testing.assert_array_equal(evaluate("reduce_l1", x, axes=()), np.abs(x))


def test_reductions_infer_symbols_and_refuse():
    assert infer("reduce_sum", "f32[b, s, 4]", axes=(1,)) == parse_type("f32[b, 1, 4]")
    assert infer("reduce_max", "i8[b, s]", axes=(-1,), keepdims=False) == parse_type("i8[b]")
    for axes, message in (((2,), "axis 2 is outside"), ((0, -2), "an axis occurs twice")):
        with pytest.raises(InferenceError, match=message):
            infer("reduce_sum", "f32[3, 4]", axes=axes)
    with pytest.raises(InferenceError, match="expected a number type"):
        infer("reduce_sum", "bool[3]", axes=(0,))
    with pytest.raises(InferenceError, match="attribute 'axes' is missing"):
        infer("reduce_sum", "f32[3]")


def test_sizes_are_reduced_symbolically():
    b = Builder("sizes")
    x = b.input("x", "f32[n, 4, m]")
    shape = b.shape_of(x)
    n, m = x.shape[0], x.shape[2]
    find = SizeEvaluator().sizes
    assert find(b.reduce_prod(shape, axes=(0,), keepdims=False)) == (n * 4 * m,)
    assert find(b.reduce_sum(shape, axes=(0,))) == (n + 4 + m,)
    (largest,) = find(b.reduce_max(shape, axes=(0,)))
    assert str(largest).count("max") == 2


# indices


@pytest.mark.parametrize("last, expected", [(False, [0, 0]), (True, [2, 1])])
def test_argmax_ties(last, expected):
    x = np.array([[2, 1, 2], [0, 0, -1]])
    assert evaluate("argmax", x, axis=1, keepdims=False, select_last=last).tolist() == expected


def test_argmax_of_nothing_is_an_error():
    with pytest.raises(InferenceError, match="axis 1 is empty; expected at least one value"):
        infer("argmax", "f32[2, 0]", axis=1)
    b = Builder("empty")
    y = b.argmin(b.input("x", "f32[n]"), axis=0)
    with pytest.raises(RunError, match="argmin"):
        run(b.build(y), {"x": np.zeros(0, np.float32)})


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_top_k_as_torch(axis, largest):
    x = f64(4, 5, 6)
    values, indices = torch.topk(torch.tensor(x), 3, axis, largest)
    found = evaluate("top_k", x, k=3, axis=axis, largest=largest)
    np.testing.assert_array_equal(found[0], values.numpy())
    np.testing.assert_array_equal(found[1], indices.numpy())


def test_top_k_orders_ties_by_index_and_nan_above_all():
    _, indices = evaluate("top_k", np.array([1, 3, 3, 1, 3]), k=4)
    assert indices.tolist() == [1, 2, 4, 0]
    _, indices = evaluate("top_k", np.array([1, 3, 3, 1, 3]), k=3, largest=False)
    assert indices.tolist() == [0, 3, 1]
    x = np.array([INF, NAN, 1.0])
    assert evaluate("top_k", x, k=3)[1].tolist() == [1, 0, 2]
    assert evaluate("top_k", x, k=3, largest=False)[1].tolist() == [2, 0, 1]
    top = evaluate("top_k", np.array([2**64 - 1, 2**63, 0], np.uint64), k=1)[0]
    assert top.tolist() == [2**64 - 1]


def test_top_k_takes_k_from_data():
    values, _ = evaluate("top_k", np.array([1.0, 3, 2]), np.array([2]))
    assert values.tolist() == [3, 2]
    with pytest.raises(RunError, match="k does not fit the axis; expected 0 to 3, found 4"):
        evaluate("top_k", np.array([1.0, 3, 2]), np.array([4]))
    with pytest.raises(InferenceError, match="k must be given once"):
        infer("top_k", "f32[3]")
    with pytest.raises(InferenceError, match="k must be given once"):
        infer("top_k", "f32[3]", "i64[1]", k=2)
    with pytest.raises(InferenceError, match="k does not fit the axis; expected 0 to 3, found 4"):
        infer("top_k", "f32[3]", k=4)


# running sums


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_running_as_torch(name, axis):
    x = f64(3, 4, 5)
    assert_close(evaluate(name, x, axis=axis), torch_of(getattr(torch, name), x, dim=axis))


@pytest.mark.parametrize(
    "name, exclusive, reverse, expected",
    [
        ("cumsum", False, True, [9, 7, 4]),
        ("cumsum", True, False, [0, 2, 5]),
        ("cumsum", True, True, [7, 4, 0]),
        ("cumprod", False, True, [24, 12, 4]),
        ("cumprod", True, False, [1, 2, 6]),
        ("cumprod", True, True, [12, 4, 1]),
    ],
)
def test_running_variants(name, exclusive, reverse, expected):
    x = np.array([2, 3, 4], np.int32)
    found = evaluate(name, x, axis=0, exclusive=exclusive, reverse=reverse)
    assert found.tolist() == expected


# softmax


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_as_torch(name, axis):
    x = f64(3, 4, 5) * 500
    expected = torch_of(getattr(functional, name), x, dim=axis)
    assert_close(evaluate(name, x, axis=axis), expected)


def test_softmax_at_the_edges():
    x = np.array([[-INF, -INF], [INF, 0], [-INF, 3]])
    np.testing.assert_array_equal(evaluate("softmax", x), [[NAN, NAN], [NAN, NAN], [0, 1]])
    assert evaluate("softmax", np.zeros((2, 0))).shape == (2, 0)
    assert evaluate("hardmax", np.array([[1.0, 3, 3]])).tolist() == [[0, 1, 0]]
    with pytest.raises(InferenceError, match="axis 2 is outside a tensor of rank 2"):
        infer("softmax", "f32[2, 3]", axis=2)


# norms


@pytest.mark.parametrize("axis", [1, -1])
def test_layer_norm_and_rms_norm_as_torch(axis):
    x = f64(3, 4, 5)
    shape = x.shape[axis:]
    scale, bias = f64(*shape, seed=1), f64(*shape, seed=2)
    layer = torch_of(lambda x, *affine: functional.layer_norm(x, shape, *affine), x, scale, bias)
    assert_close(evaluate("layer_norm", x, scale, bias, axis=axis), layer)
    rms = functional.rms_norm(torch.tensor(x), shape, torch.tensor(scale), 1e-5).numpy()
    assert_close(evaluate("rms_norm", x, scale, axis=axis), rms)
    assert_close(evaluate("rms_norm", x, scale, bias, axis=axis), rms + bias)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("spatial", [(), (5,), (3, 4)])
def test_group_norm_as_torch(groups, spatial):
    x, scale, bias = f64(2, 6, *spatial), f64(6, seed=1), f64(6, seed=2)
    if not spatial and groups == 6:
        pytest.skip("PyTorch refuses to normalize single values")
    expected = torch_of(
        lambda x, *affine: functional.group_norm(x, groups, *affine), x, scale, bias
    )
    assert_close(evaluate("group_norm", x, scale, bias, groups=groups), expected)


def test_instance_norm_as_torch():
    x, scale, bias = f64(2, 3, 4, 5), f64(3, seed=1), f64(3, seed=2)
    expected = functional.instance_norm(
        torch.tensor(x), weight=torch.tensor(scale), bias=torch.tensor(bias)
    )
    assert_close(evaluate("instance_norm", x, scale, bias), expected.numpy())


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5)])
def test_batch_norm_as_torch(shape):
    x, scale, bias, mean = f64(*shape), *(f64(3, seed=seed) for seed in (1, 2, 3))
    var = np.abs(f64(3, seed=4))
    expected = torch_of(functional.batch_norm, x, mean, var, scale, bias, eps=1e-3)
    assert_close(evaluate("batch_norm", x, scale, bias, mean, var, eps=1e-3), expected)


def test_lrn_as_torch():
    x = f64(2, 7, 3, 4)
    expected = torch_of(functional.local_response_norm, x, size=5, alpha=0.3, beta=0.6, k=1.5)
    assert_close(evaluate("lrn", x, size=5, alpha=0.3, beta=0.6, bias=1.5), expected)


def test_lrn_of_even_size_looks_one_further_ahead():
    x = np.array([1.0, 2, 3]).reshape(1, 3, 1)
    y = evaluate("lrn", x, size=2, alpha=2.0, beta=1.0, bias=0.0)
    np.testing.assert_allclose(y.ravel(), [1 / 5, 2 / 13, 3 / 9])


@pytest.mark.parametrize("p", [1, 2])
def test_lp_norm_as_torch(p):
    x = f64(3, 4)
    x[1] = 0
    assert_close(evaluate("lp_norm", x, p=p), torch_of(functional.normalize, x, p=p, dim=-1))


@pytest.mark.parametrize(
    "op, types, attrs, message",
    [
        ("layer_norm", ["f32[2, 4]", "f32[3]"], {}, "scale does not broadcast to x"),
        ("layer_norm", ["f32[2, 4]", None, "f32[5, 2, 4]"], {}, "bias does not broadcast to x"),
        ("rms_norm", ["f32[2, 4]", "f16[4]"], {}, "different element types"),
        ("rms_norm", ["i32[2, 4]"], {}, "x has the wrong element type; expected a floating type"),
        ("group_norm", ["f32[2, 4, 3]"], {"groups": 3}, "x cannot be divided into 3 groups"),
        ("group_norm", ["f32[2, 4, 3]", "f32[2]"], {"groups": 2}, "scale.*expected 4, found 2"),
        ("instance_norm", ["f32[2, 4]"], {}, "expected rank 3 or more"),
        ("batch_norm", ["f32[2, 4]", *["f32[3]"] * 4], {}, "scale.*expected 4, found 3"),
        ("lrn", ["f32[2, 4, 3]"], {"size": 0}, "size is too small"),
        ("lp_norm", ["f32[2, 4]"], {"p": 0}, "p is too small"),
    ],
)
def test_norms_refuse(op, types, attrs, message):
    with pytest.raises(InferenceError, match=message):
        infer(op, *types, **attrs)


# losses


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore", [-100, 2])
@pytest.mark.parametrize("spatial", [(), (3, 2)])
def test_cross_entropy_as_torch(reduction, weighted, ignore, spatial):
    logits = f64(4, 5, *spatial)
    labels = draw(4, *spatial, dtype="i64", low=0, high=4)
    weights = np.abs(f64(5, seed=1)) if weighted else None
    options = {"ignore_index": ignore, "reduction": reduction}
    expected = torch_of(functional.cross_entropy, logits, labels, weights, **options)
    assert_close(evaluate("cross_entropy", logits, labels, weights, **options), expected)
    log_probs = evaluate("log_softmax", logits, axis=1)
    found = evaluate("cross_entropy", log_probs, labels, weights, from_log_probs=True, **options)
    assert_close(found, expected)


def test_cross_entropy_at_the_edges():
    logits = np.array([[0.0, -INF], [1, 2]])
    ignored = np.array([1, 0])
    options = {"ignore_index": 1, "from_log_probs": True}
    found = evaluate("cross_entropy", logits, ignored, reduction="none", **options)
    assert found.tolist() == [0, -1]
    assert np.isnan(evaluate("cross_entropy", logits, np.array([1, 1]), **options))
    with pytest.raises(RunError, match="a label is not a class; expected 0 to 1, found 7"):
        evaluate("cross_entropy", logits, np.array([0, 7]))
    with pytest.raises(InferenceError, match="labels has the wrong rank; expected rank 1"):
        infer("cross_entropy", "f32[2, 3]", "i64[2, 3]")
    with pytest.raises(InferenceError, match="expected mean or sum or none"):
        infer("cross_entropy", "f32[2, 3]", "i64[2]", reduction="max")
