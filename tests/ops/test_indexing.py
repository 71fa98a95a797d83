"""Gather, scatter, index makers, detection and sampling: edges, errors, repeatability."""

import numpy as np
import pytest
from single_op import evaluate

from bitwright.errors import InferenceError, RunError
from bitwright.ir import symbol
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.core.interpret import run
from bitwright.ops.core.registry import get
from bitwright.ops.core.symbolic import SizeEvaluator

n, m = symbol("n"), symbol("m")


# gather


def test_negative_indices_count_from_the_end():
    x = np.arange(12).reshape(3, 4)
    assert evaluate("gather", x, [-1, 0]).tolist() == x[[-1, 0]].tolist()
    assert evaluate("gather", x, np.array(-4), axis=1).tolist() == x[:, 0].tolist()
    assert evaluate("gather_elements", x, [[-1], [-2], [-3]], axis=1).tolist() == [[3], [6], [9]]
    assert evaluate("gather_nd", x, [[-1, -1]]).tolist() == [11]


@pytest.mark.parametrize(
    "op, indices, attrs, message",
    [
        ("gather", [0, 3], {}, "index 3 is outside axis 0 of size 3; expected -3 to 2"),
        ("gather", [-5], {"axis": 1}, "index -5 is outside axis 1 of size 4"),
        ("gather_elements", [[0, 4, 0, 0]], {"axis": 1}, "index 4 is outside axis 1 of size 4"),
        ("gather_nd", [[0, 9]], {}, "index 9 is outside axis 1 of size 4"),
    ],
)
def test_an_index_outside_is_named(op, indices, attrs, message):
    with pytest.raises(RunError, match=message):
        evaluate(op, np.arange(12).reshape(3, 4), np.asarray(indices), **attrs)


def test_nothing_can_be_gathered_from_nothing():
    x = np.zeros((0, 2), "f4")
    assert evaluate("gather", x, np.zeros((0,), "i8")).shape == (0, 2)
    with pytest.raises(RunError, match="axis 0 of size 0; expected no index"):
        evaluate("gather", x, [0])


def test_batches_of_gather_nd_run_in_step():
    x = np.arange(24).reshape(2, 3, 4)
    found = evaluate("gather_nd", x, [[[2], [0]], [[1], [1]]], batch_dims=1)
    assert found.tolist() == [x[0][[2, 0]].tolist(), x[1][[1, 1]].tolist()]
    with pytest.raises(InferenceError, match="batch_dims"):
        evaluate("gather_nd", x, [[0]], batch_dims=2)
    b = Builder()
    y = b.gather_nd(b.input("x", "f32[n, 3]"), b.input("i", "i64[m, 1]"), batch_dims=1)
    with pytest.raises(RunError, match="the batch of the indices has the wrong shape"):
        run(b.build(y=y), {"x": np.ones((2, 3), "f4"), "i": np.zeros((1, 1), "i8")})


def test_reverse_sequence_turns_each_row_by_its_length():
    x = np.arange(12).reshape(3, 4)
    found = evaluate("reverse_sequence", x, [4, 0, 2], batch_axis=0, time_axis=1)
    assert found.tolist() == [[3, 2, 1, 0], [4, 5, 6, 7], [9, 8, 10, 11]]
    with pytest.raises(RunError, match="length 5 is outside axis 1 of size 4"):
        evaluate("reverse_sequence", x, [4, 0, 5], batch_axis=0, time_axis=1)


def test_compress_keeps_what_the_condition_names():
    x = np.arange(6).reshape(3, 2)
    assert evaluate("compress", x, np.array([False, True]), axis=0).tolist() == [[2, 3]]
    assert evaluate("compress", x, np.array([False, True, False, True])).tolist() == [1, 3]
    with pytest.raises(RunError, match="index 2 is outside axis 1 of size 2"):
        evaluate("compress", x, np.array([False, False, True]), axis=1)


# scatter


def test_scatter_combines_updates_on_one_place():
    x = np.zeros(3, "i4")
    twice, updates = [[1], [1], [-1]], np.array([5, 7, 2], "i4")
    assert evaluate("scatter_nd", x, twice, updates).tolist() == [0, 7, 2]
    assert evaluate("scatter_nd", x, twice, updates, reduction="add").tolist() == [0, 12, 2]
    assert evaluate("scatter_nd", x + 1, twice, updates, reduction="mul").tolist() == [1, 35, 2]
    assert evaluate("scatter_nd", x, twice, updates, reduction="max").tolist() == [0, 7, 2]
    assert evaluate("scatter_nd", x, twice, -updates, reduction="min").tolist() == [0, -7, -2]
    assert not x.any(), "the operand is not changed"


def test_scatter_sums_in_a_wide_type():
    x, ones = np.zeros(1, "f2"), np.full(4096, 0.5, "f2")
    places = np.zeros(4096, "i8")
    assert evaluate("scatter_elements", x, places, ones, reduction="add").tolist() == [2048]


def test_scatter_checks_indices_and_shapes():
    x = np.zeros((2, 3), "f4")
    with pytest.raises(RunError, match="index 3 is outside axis 1 of size 3"):
        evaluate("scatter_elements", x, [[3]], np.ones((1, 1), "f4"), axis=1)
    with pytest.raises(InferenceError, match="axis 0 of updates"):
        evaluate("scatter_nd", x, [[0]], np.ones((2, 3), "f4"))
    b = Builder()
    updates = b.input("u", "f32[m]")
    y = b.scatter_elements(b.input("x", "f32[4]"), b.input("i", "i64[n]"), updates)
    feeds = {"x": np.zeros(4, "f4"), "i": np.array([0, 1]), "u": np.ones(1, "f4")}
    with pytest.raises(RunError, match="updates has the wrong shape"):
        run(b.build(y=y), feeds)


def test_a_cache_is_written_linearly_or_round_the_end():
    past, update = np.zeros((2, 4, 1)), np.arange(1.0, 5).reshape(2, 2, 1)
    found = evaluate("tensor_scatter", past, update, [0, 2])
    assert found[..., 0].tolist() == [[1, 2, 0, 0], [0, 0, 3, 4]]
    found = evaluate("tensor_scatter", past, update, [3, 7], mode="circular")
    assert found[..., 0].tolist() == [[2, 0, 0, 1], [4, 0, 0, 3]]
    with pytest.raises(RunError, match="2 rows do not fit at index 3"):
        evaluate("tensor_scatter", past, update, [0, 3])
    with pytest.raises(InferenceError, match="axis 0 is the batch"):
        evaluate("tensor_scatter", past, update, axis=0)


# counters, shapes, one-hot vectors


def test_ranges():
    assert evaluate("range", np.array(10), np.array(4), np.array(-2)).tolist() == [10, 8, 6]
    assert evaluate("range", np.array(4), np.array(4), np.array(1)).tolist() == []
    found = evaluate("range", np.float32(0), np.float32(1), np.float32(0.3))
    np.testing.assert_allclose(found, [0, 0.3, 0.6, 0.9], rtol=1e-6)
    with pytest.raises(RunError, match="step 0"):
        evaluate("range", np.array(1), np.array(2), np.array(0))


def test_a_range_of_known_length_holds_sizes():
    def sizes(*values):
        found = get("range").sizes(*(np.array(v, object) for v in values))
        return None if found is None else found.tolist()

    assert sizes(n, n + 3, 1) == [n, n + 1, n + 2]
    assert sizes(6, 0, -2) == [6, 4, 2]
    assert sizes(0, n, 1) is None


def test_sizes_and_shapes_are_tensors():
    b = Builder()
    x = b.input("x", "f32[n, 3]")
    held = b.sizes(values=(n * 2, 7), shape=(2, 1))
    graph = verify(b.build(held=held, shape=b.shape_of(x), count=b.iota(length=n + 1)))
    found = run(graph, {"x": np.ones((4, 3), "f4")})
    assert found["held"].tolist() == [[8], [7]]
    assert found["shape"].tolist() == [4, 3] and found["count"].tolist() == [0, 1, 2, 3, 4]
    assert SizeEvaluator().sizes(held) == (2 * n, 7)
    assert SizeEvaluator().sizes(b.iota(length=3)) == (0, 1, 2)
    with pytest.raises(InferenceError, match="list of sizes"):
        b.sizes(values=(1, 2), shape=(3,))


def test_shape_of_a_shape_is_its_rank():
    b = Builder()
    shape = b.shape_of(b.input("x", "f32[n, 3]"))
    assert SizeEvaluator().sizes(b.shape_of(shape)) == (2,)


def test_one_hot_places():
    off_on = np.array([0, 1], "i4")
    assert evaluate("one_hot", [1, -1, 3, -4], off_on, depth=3).tolist() == [
        [0, 1, 0],
        [0, 0, 1],
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert evaluate("one_hot", [1, 0], off_on, np.array(2), axis=0).tolist() == [[0, 1], [1, 0]]
    with pytest.raises(RunError, match="depth of one_hot is negative"):
        evaluate("one_hot", [1], off_on, np.array(-1))


def test_nonzero_of_scalars_has_no_rows():
    assert evaluate("nonzero", np.array(3.0)).shape == (0, 1)
    assert evaluate("nonzero", np.array(0)).shape == (0, 0)
    assert evaluate("nonzero", np.eye(2, dtype="f4")).tolist() == [[0, 1], [0, 1]]


def test_unique_in_order_of_appearance():
    y, first, inverse, counts = evaluate("unique", np.array([3, 1, 3, 2, 1]), sorted=False)
    assert y.tolist() == [3, 1, 2] and first.tolist() == [0, 1, 3]
    assert inverse.tolist() == [0, 1, 0, 2, 1] and counts.tolist() == [2, 2, 1]


def test_unique_slices_and_strings():
    x = np.array([["b", "a", "b"], ["c", "a", "c"]], object)
    y, first, inverse, counts = evaluate("unique", x, axis=1)
    assert y.tolist() == [["a", "b"], ["a", "c"]] and first.tolist() == [1, 0]
    assert inverse.tolist() == [1, 0, 1] and counts.tolist() == [1, 2]


def test_unique_of_empty_slices():
    y, first, inverse, counts = evaluate("unique", np.zeros((3, 0)), axis=0)
    assert y.shape == (1, 0) and first.tolist() == [0]
    assert inverse.tolist() == [0, 0, 0] and counts.tolist() == [3]


# detection


def test_suppression_keeps_the_better_of_two_that_overlap():
    boxes = np.array([[[0, 0, 1, 1], [1, 1, 0, 0.1], [2, 2, 3, 3]]], "f4")
    scores = np.array([[[0.6, 0.9, 0.5]]], "f4")
    many, half = np.array([9]), np.array([0.5], "f4")
    assert evaluate("non_max_suppression", boxes, scores, many, half)[:, 2].tolist() == [1, 2]
    assert evaluate("non_max_suppression", boxes, scores, many, half, half)[:, 2].tolist() == [1]
    assert evaluate("non_max_suppression", boxes, scores, np.array([1]))[:, 2].tolist() == [1]
    assert evaluate("non_max_suppression", boxes, scores).shape == (0, 3)


def test_boxes_without_area_overlap_nothing():
    boxes, scores = np.zeros((1, 3, 4), "f4"), np.ones((1, 1, 3), "f4")
    assert evaluate("non_max_suppression", boxes, scores, np.array([9])).shape == (3, 3)


# sampling


@pytest.mark.parametrize("op", ["random_uniform", "random_normal"])
def test_draws_repeat_for_a_seed(op):
    first, again = (evaluate(op, shape=(50,), seed=1.5) for _ in range(2))
    other = evaluate(op, shape=(50,), seed=2.5)
    assert first.tolist() == again.tolist() != other.tolist()
    assert evaluate(op, shape=(50,)).tolist() != evaluate(op, shape=(50,)).tolist()


def test_draws_have_their_distribution():
    uniform = evaluate("random_uniform", shape=(4000,), low=2.0, high=4.0, seed=1.0)
    assert uniform.min() >= 2 and uniform.max() < 4 and abs(uniform.mean() - 3) < 0.1
    normal = evaluate("random_normal", np.zeros((4000,), "f4"), mean=-1.0, scale=3.0, seed=1.0)
    assert abs(normal.mean() + 1) < 0.2 and abs(normal.std() - 3) < 0.2
    coins = evaluate("bernoulli", np.full(4000, 0.25, "f4"), seed=3.0)
    assert abs(coins.mean() - 0.25) < 0.05
    classes = evaluate("multinomial", np.log([[0.2, 0.8]]), sample_size=4000, seed=3.0)
    assert abs(classes.mean() - 0.8) < 0.05


def test_probabilities_are_checked():
    with pytest.raises(RunError, match=r"expected 0 to 1, found 1\.5"):
        evaluate("bernoulli", np.array([0.5, 1.5]))


def test_temperature_zero_takes_the_best():
    logits = np.array([[1, 5, 5], [2, 0, -1]], "f4")
    assert evaluate("sample", logits, np.full(2, 0.99, "f4"), temperature=0.0).tolist() == [1, 0]


def test_draws_walk_down_the_sorted_chances():
    logits = np.log(np.array([[0.1, 0.6, 0.3]])).repeat(4, axis=0)
    draws = np.array([0.0, 0.59, 0.61, 0.95])
    assert evaluate("sample", logits, draws).tolist() == [1, 1, 2, 0]
    assert evaluate("sample", logits, draws, top_k=2).tolist() == [1, 1, 1, 2]
    assert evaluate("sample", logits, draws, top_p=0.5).tolist() == [1, 1, 1, 1]
    assert evaluate("sample", logits, draws, top_p=0.61).tolist() == [1, 1, 1, 2]


def test_what_has_no_chance_is_never_chosen():
    logits = np.array([[-np.inf, 0.0, -np.inf]])
    assert evaluate("sample", logits, np.array([1.0])).tolist() == [1]
    assert evaluate("multinomial", logits, sample_size=20, seed=1.0).tolist() == [[1] * 20]


def test_sampling_settings_are_checked():
    with pytest.raises(InferenceError, match="out of range"):
        evaluate("sample", np.ones((1, 2)), np.ones(1), top_p=0.0)
