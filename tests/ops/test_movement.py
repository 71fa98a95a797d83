"""Reshapes, slices, padding, joins: symbolic shapes, edges, and what is refused."""

import numpy as np
import pytest
from single_op import evaluate, infer

from bitwright.errors import GraphError, InferenceError, RunError
from bitwright.ir import symbol
from bitwright.ir.dim import evaluate as value_of
from bitwright.ir.dim import min_size
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.registry import get
from bitwright.ops.core.symbolic import SizeEvaluator
from bitwright.ops.shape.movement import resolve_reshape
from bitwright.ops.shape.slicing import normalize_slice, slice_size

n, m = symbol("n"), symbol("m")
END = 2**63 - 1


# reshape


@pytest.mark.parametrize(
    "shape, target, expected",
    [
        ((n, 784), (-1, 28, 28), (n, 28, 28)),
        ((n, m, 768), (0, 0, 12, -1), (n, m, 12, 64)),
        ((n, m, 768), (-1, 768), (n * m, 768)),
        ((n, n + m, 6), (n, -1, 3), (n, 2 * n + 2 * m, 3)),
        ((n * (n + m), 6), (n + m, -1), (n + m, 6 * n)),
        ((n, 3), (n, -1), (n, 3)),
        ((2, 0), (0, -1), (2, 0)),
        ((n,), (-1, 2), (n // 2, 2)),
        ((), (-1,), (1,)),
        ((1,), (), ()),
    ],
)
def test_reshape_targets_resolve(shape, target, expected):
    assert resolve_reshape(shape, target) == expected


def test_zero_in_a_target_is_a_size_with_allowzero():
    assert resolve_reshape((0, 3), (3, 0), allowzero=True) == (3, 0)
    assert resolve_reshape((4, 3), (0, 3), allowzero=False) == (4, 3)


@pytest.mark.parametrize(
    "shape, target, message",
    [
        ((4, 3), (-1, -1), "at most one -1"),
        ((4, 3), (-1, 5), "no whole size"),
        ((4, 3), (12, 0, 0), "copies axis 2"),
        ((4, 3), (5, 3), "expected 12 elements, found 15"),
        ((n, 4), (n, 5), "cannot reshape"),
        ((n, 4), (n, 4, 2), "cannot reshape"),
        ((4, 3), (4, -2), "at most one -1"),
    ],
)
def test_reshape_targets_are_refused(shape, target, message):
    with pytest.raises(InferenceError, match=message):
        resolve_reshape(shape, target)


def test_minus_one_beside_a_zero_is_refused():
    with pytest.raises(InferenceError, match="any size"):
        resolve_reshape((2, 3), (0, -1), allowzero=True)


def test_reshape_wants_exactly_one_form():
    b = Builder()
    x = b.input("x", "f32[2, 3]")
    with pytest.raises(InferenceError, match="nowhere"):
        b.reshape(x)
    with pytest.raises(InferenceError, match="twice"):
        b.reshape(x, b.constant([6]), shape=(6,))
    with pytest.raises(InferenceError, match="resolve_reshape"):
        b.reshape(x, shape=(-1,))


def test_reshape_by_an_operand_has_unknown_sizes_of_known_rank():
    b = Builder()
    x, target = b.input("x", "f32[n, 6]"), b.input("target", "i64[3]")
    y = b.reshape(x, target)
    assert y.rank == 3 and len({str(size) for size in y.shape}) == 3
    found = run(b.build(y=y), {"x": np.ones((2, 6), "f4"), "target": np.array([0, -1, 2])})
    assert found["y"].shape == (2, 3, 2)
    with pytest.raises(InferenceError, match="constant length"):
        b.reshape(x, b.input("dynamic", "i64[k]"))


def test_a_reshape_that_does_not_fit_at_run_time_is_an_error():
    b = Builder()
    y = b.reshape(b.input("x", "f32[n, 3]"), shape=(symbol("n") // 2, 6))
    assert run(b.build(y=y), {"x": np.ones((4, 3), "f4")})["y"].shape == (2, 6)
    with pytest.raises(RunError, match="cannot reshape"):
        run(b.build(z=y), {"x": np.ones((5, 3), "f4")})


# slices


@pytest.mark.parametrize(
    "size, start, stop, expected, length",
    [
        (n, 0, END, (0, n), n),
        (n, -1, END, (n - 1, n), 1),
        (n, 1, END, (1, n), n - 1),
        (n, 0, -1, (0, n - 1), n - 1),
        (n, 0, 1, (0, 1), 1),
        (n + m, n, END, (n, n + m), m),
        (n + m, 0, n, (0, n), n),
        (n + m, -m, END, (n, n + m), m),
        (n + 3, -3, END, (n, n + 3), 3),
        (512, n, n + m, (n, n + m), m),
        (n, 0, 5, (0, min_size(n, 5)), min_size(n, 5)),
        (512, 0, n, (0, min_size(n, 512)), min_size(n, 512)),
        (512, 0, symbol("k", 128), (0, symbol("k", 128)), symbol("k", 128)),
        (n, 2, 2, (min_size(n, 2), min_size(n, 2)), 0),
    ],
)
def test_slices_normalize_to_clean_sizes(size, start, stop, expected, length):
    found = normalize_slice(size, start, stop)
    assert found == expected
    assert slice_size(*found, 1) == length


def test_reversed_slices_normalize():
    assert normalize_slice(n, -1, -END - 1, -1) == (n - 1, -1)
    assert slice_size(n - 1, -1, -1) == n
    assert normalize_slice(5, END, -END - 1, -2) == (4, -1)
    with pytest.raises(InferenceError, match="step 0"):
        normalize_slice(n, 0, 1, 0)


@pytest.mark.parametrize("step", [-3, -2, -1, 1, 2, 3])
def test_normal_slices_take_what_python_takes(step):
    """A start before the first element is the first one with a negative step too, as in ONNX."""
    for size in range(1, 6):
        x = np.arange(size)
        for start in range(-7, 8):
            for stop in range(-7, 8):
                expected = x[max(start, -size) if step < 0 else start : stop : step].tolist()
                symbolic = normalize_slice(n, start, stop, step)
                bound = tuple(value_of(s, {"n": size}) for s in symbolic)
                assert value_of(slice_size(*symbolic, step), {"n": size}) == len(expected)
                for first, last in (bound, normalize_slice(size, start, stop, step)):
                    form = {"starts": (first,), "stops": (last,), "steps": (step,), "axes": (0,)}
                    found = get("slice").reference(x, None, None, None, None, **form)
                    assert found.tolist() == expected


def test_slices_of_nothing():
    for step in (1, -1):
        start, stop = normalize_slice(0, -1, END, step)
        x = np.zeros((0, 2), "f4")
        found = evaluate("slice", x, starts=[start], stops=[stop], steps=[step], axes=[0])
        assert found.shape == (0, 2)


def test_slice_by_operands_follows_python():
    x = np.arange(24).reshape(4, 6)
    found = evaluate("slice", x, [3, -2], [-99, 0], [0, 1], [-2, -1])
    assert found.tolist() == x[3::-2, -2:0:-1].tolist()
    assert evaluate("slice", x, [1], [END]).tolist() == x[1:].tolist()


def test_a_slice_outside_its_axis_is_an_error_not_a_wrong_answer():
    with pytest.raises(InferenceError, match="normalize_slice"):
        evaluate("slice", np.arange(4), starts=[-1], stops=[4], steps=[1], axes=[0])
    with pytest.raises(InferenceError, match="does not fit axis 0"):
        evaluate("slice", np.arange(4), starts=[3], stops=[2], steps=[1], axes=[0])
    b = Builder()
    x = b.input("x", "f32[n]")
    y = b.slice(x, starts=[n - 3], stops=[n], steps=[1], axes=[0])
    assert y.shape == (3,)
    with pytest.raises(RunError, match="slice -1:2:1 does not fit axis 0 of size 2"):
        run(b.build(y=y), {"x": np.ones(2, "f4")})


def test_slice_forms_do_not_mix():
    x = np.arange(4)
    with pytest.raises(InferenceError, match="half"):
        evaluate("slice", x, starts=[0], stops=[2])
    with pytest.raises(InferenceError, match="half"):
        evaluate("slice", x, [0], [2], steps=[1])
    with pytest.raises(InferenceError, match="twice"):
        evaluate("slice", x, [0], [2], starts=[1])
    with pytest.raises(GraphError, match="occurs twice"):
        evaluate("slice", x, starts=[0, 0], stops=[1, 1], steps=[1, 1], axes=[0, -1])


# pad


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
@pytest.mark.parametrize("around", [((0, 0), (3, 1)), ((2, 9), (0, 0)), ((7, 0), (1, 8))])
def test_pad_agrees_with_numpy(mode, around):
    x = np.arange(12.0).reshape(3, 4)
    pads = [*(pair[0] for pair in around), *(pair[1] for pair in around)]
    np.testing.assert_array_equal(evaluate("pad", x, pads=pads, mode=mode), np.pad(x, around, mode))


def test_negative_pads_take_away():
    x = np.arange(5)
    assert evaluate("pad", x, np.array(9), pads=[-2, 1]).tolist() == [2, 3, 4, 9]
    assert evaluate("pad", x, pads=[-1, 3], mode="reflect").tolist() == [1, 2, 3, 4, 3, 2, 1]
    assert evaluate("pad", x, pads=[-9, 6]).tolist() == [0, 0]
    with pytest.raises(GraphError, match="negative size"):
        evaluate("pad", x, pads=[-4, -4])
    with pytest.raises(RunError, match="take more than there is"):
        evaluate("pad", x, None, [-4, -4])


def test_pads_add_symbolically():
    assert infer("pad", "f32[n, 4]", pads=(1, m, 2, 0)).shape == (n + 3, m + 4)


def test_nothing_to_reflect_from():
    with pytest.raises(RunError, match="axis 0 is empty"):
        evaluate("pad", np.zeros(0), pads=[1, 0], mode="edge")


# the rest


def test_shapes_are_computed_symbolically():
    assert infer("transpose", "f32[n, m, 4]", perm=(2, 0, 1)).shape == (4, n, m)
    assert infer("concat", "f32[n, 4]", "f32[m, 4]", "f32[2, 4]", axis=0).shape == (n + m + 2, 4)
    assert infer("concat", "f32[n, 2]", "f32[3, 2]", axis=1).shape == (3, 4)
    assert infer("tile", "f32[n, 4]", repeats=(3, m)).shape == (3 * n, 4 * m)
    assert infer("expand", "f32[n, 1]", shape=(m, n, 7)).shape == (m, n, 7)
    assert infer("gather", "f32[n, 4]", "i64[m, 2]").shape == (m, 2, 4)
    parts = Builder()
    x = parts.input("x", "f32[k, 6]")
    k = symbol("k")
    first, rest = parts.split(x, axis=0, sizes=(1, k - 1))
    assert first.shape == (1, 6) and rest.shape == (k - 1, 6)


@pytest.mark.parametrize(
    "op, types, attrs, message",
    [
        ("transpose", ["f32[2, 3]"], {"perm": (0, 0)}, "no permutation"),
        ("concat", ["f32[2, 3]", "f32[2, 4]"], {"axis": 0}, "expected 3, found 4"),
        ("concat", ["f32[2]", "i32[2]"], {"axis": 0}, "different element types"),
        ("concat", [], {"axis": 0}, "nothing to join"),
        ("split", ["f32[6]"], {"axis": 0, "sizes": (2, 3)}, "add up to axis 0"),
        ("split", ["f32[n]"], {"axis": 0, "sizes": (symbol("n"), 1)}, "add up to axis 0"),
        ("expand", ["f32[3]"], {"shape": (4,)}, "cannot be broadcast"),
        ("expand", ["f32[3, 1]"], {"shape": (1,)}, "cannot be broadcast"),
        ("tile", ["f32[3, 1]"], {"repeats": (2,)}, "one repeat for each axis"),
        ("trilu", ["f32[3]"], {"upper": True}, "rank 2 or more"),
    ],
)
def test_what_does_not_fit_is_refused(op, types, attrs, message):
    with pytest.raises(InferenceError, match=message):
        infer(op, *types, **attrs)


def test_expand_by_an_operand_broadcasts_both_ways():
    assert evaluate("expand", np.ones((3, 1)), [2, 1, 4]).shape == (2, 3, 4)
    assert evaluate("expand", np.ones((3, 4)), [1]).shape == (3, 4)
    b = Builder()
    y = b.expand(b.input("x", "f32[3, 1, n]"), b.input("shape", "i64[3]"))
    assert y.shape[0] == 3 and len({str(size) for size in y.shape}) == 3


def test_split_and_concat_undo_each_other():
    x = np.arange(30).reshape(5, 6)
    parts = evaluate("split", x, axis=1, sizes=(1, 0, 5))
    assert [part.shape for part in parts] == [(5, 1), (5, 0), (5, 5)]
    assert evaluate("concat", *parts, axis=-1).tolist() == x.tolist()


def test_trilu_takes_its_diagonal_from_either_side():
    x = np.ones((3, 4), "i4")
    for k in (-4, -1, 0, 2, 9):
        assert evaluate("trilu", x, upper=True, k=k).tolist() == np.triu(x, k).tolist()
        assert evaluate("trilu", x, np.array(k), upper=False).tolist() == np.tril(x, k).tolist()


# shape arithmetic through tensors


def test_shape_arithmetic_is_evaluated():
    """The way exporters write x.reshape(batch * heads, seq, -1)."""
    b = Builder()
    x = b.input("x", "f32[n, 12, m, 64]")
    shape = b.shape_of(x)
    batch = b.gather(shape, b.constant([0]))
    seq = b.slice(shape, starts=[2], stops=[3], steps=[1], axes=[0])
    rows = b.mul(batch, b.constant([12]))
    rest = b.reshape(b.constant(np.int64(-1)), shape=(1,))
    target = b.concat(rows, seq, rest, axis=0)
    sizes = SizeEvaluator().sizes(target)
    assert sizes == (12 * n, m, -1)
    assert resolve_reshape(x.shape, sizes) == (12 * n, m, 64)


def test_sizes_pass_through_movement():
    b = Builder()
    x = b.input("x", "f32[n, 4, m]")
    evaluator = SizeEvaluator()
    shape = b.shape_of(x)
    back = b.slice(shape, starts=[2], stops=[-1], steps=[-1], axes=[0])
    assert evaluator.sizes(back) == (m, 4, n)
    assert evaluator.sizes(b.tile(shape, repeats=(2,))) == (n, 4, m, n, 4, m)
    assert evaluator.sizes(b.pad(shape, pads=(1, 1))) == (0, n, 4, m, 0)
    assert evaluator.sizes(b.identity(shape)) == (n, 4, m)
    grid = b.reshape(shape, shape=(3, 1))
    wide = b.expand(grid, shape=(3, 2))
    assert evaluator.sizes(b.transpose(wide, perm=(1, 0))) == (n, 4, m, n, 4, m)
    first, rest = b.split(shape, axis=0, sizes=(1, 2))
    assert evaluator.sizes(first) == (n,) and evaluator.sizes(rest) == (4, m)
    replaced = b.scatter_nd(shape, b.constant([[1]]), b.constant([7]))
    assert evaluator.sizes(replaced) == (n, 7, m)
    assert evaluator.sizes(b.scatter_elements(shape, b.constant([0]), first)) == (n, 4, m)
    picked = b.gather_elements(shape, b.constant([-1, 0]))
    assert evaluator.sizes(picked) == (m, n)
    assert evaluator.sizes(b.gather_nd(shape, b.constant([[2]]))) == (m,)


def test_sizes_that_the_data_decides_stay_unknown():
    b = Builder()
    target = b.concat(b.shape_of(b.input("x", "f32[n]")), b.input("y", "i64[1]"), axis=0)
    assert SizeEvaluator().sizes(target) is None
    again = b.gather(b.shape_of(b.input("z", "f32[n]")), b.input("i", "i64[1]"))
    assert SizeEvaluator().sizes(again) is None
