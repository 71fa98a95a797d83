"""Compiled graphs: threads, repeated runs, sizes, outputs in place, state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from bitwright.backends.cpu.codegen import jit
from bitwright.errors import BitwrightError, RunError
from bitwright.ir.graph import Graph
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.pipeline import compile_graph

Array = np.ndarray[Any, Any]


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def block() -> Graph:
    """A small transformer block: norms, products, a softmax, a residual."""
    b = Builder("block")
    x = b.input("x", "f32[batch, seq, 24]")
    weights = iter([draw(24, 24, seed=i) / 5 for i in range(4)])
    h = b.layer_norm(x, draw(24, seed=5), draw(24, seed=6))
    q, k, v = (b.matmul(h, b.constant(next(weights))) for _ in range(3))
    scores = b.softmax(b.mul(b.matmul(q, b.transpose(k, perm=[0, 2, 1])), 0.2))
    y = b.add(x, b.matmul(b.matmul(scores, v), b.constant(next(weights))))
    pooled = b.reduce_mean(b.gelu(y), axes=[1], keepdims=False)
    return b.build(y=y, pooled=pooled)


def image() -> Graph:
    """Dense and depthwise convolutions, a pool and a reduction."""
    b = Builder("image")
    x = b.input("x", "f32[batch, 3, h, w]")
    y = b.relu(b.conv(x, draw(10, 3, 3, 3) / 5, draw(10), strides=[2, 2], pads=[1, 1, 1, 1]))
    y = b.relu(b.conv(y, draw(10, 1, 3, 3), pads=[1, 1, 1, 1], groups=10))
    y = b.max_pool(y, kernel=[2, 2], strides=[1, 1])
    return b.build(y=b.reduce_mean(y, axes=[2, 3]))


MODELS = {"block": (block, (2, 33, 24)), "image": (image, (2, 3, 19, 23))}


@pytest.mark.parametrize("name", MODELS)
def test_bits_do_not_depend_on_threads_or_runs(name: str) -> None:
    make, shape = MODELS[name]
    x = draw(*shape)
    expected = compile_graph(make(), threads=1).run({"x": x})
    for threads in (1, 2, 3, 7):
        executable = compile_graph(make(), threads=threads)
        for _ in range(5):
            for result, found in executable.run({"x": x}).items():
                assert found.tobytes() == expected[result].tobytes(), (threads, result)


@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_the_interpreter(name: str) -> None:
    make, shape = MODELS[name]
    x = draw(*shape)
    found = compile_graph(make(), threads=2).run({"x": x})
    for result, want in run(make(), {"x": x}).items():
        assert np.abs(found[result] - want).max() <= 2e-5 * np.abs(want).max()


def test_executables_and_python_threads_at_once() -> None:
    models = [compile_graph(make(), threads=n) for make in (block, image) for n in (1, 2, 3)]
    shapes = [MODELS[m.graph.name][1] for m in models]
    expected = [m.run({"x": draw(*s, seed=3)}) for m, s in zip(models, shapes, strict=True)]

    def work(number: int) -> None:
        for turn in range(10):
            at = (number + turn) % len(models)
            found = models[at].run({"x": draw(*shapes[at], seed=3)})
            for result, want in expected[at].items():
                assert found[result].tobytes() == want.tobytes()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(12)))


def test_new_sizes_compile_nothing() -> None:
    executable = compile_graph(block(), threads=2)
    executable.run({"x": draw(1, 1, 24)})
    before = jit.compilations()
    for batch, length in zip((1, 2, 3, 1, 5, 2, 1, 7, 1, 4), range(1, 40, 4), strict=True):
        x = draw(batch, length, 24)
        found = executable.run({"x": x})
        want = run(block(), {"x": x})
        assert np.abs(found["y"] - want["y"]).max() < 1e-4
    assert jit.compilations() == before


def test_results_belong_to_the_caller() -> None:
    executable = compile_graph(block())
    first = executable.run({"x": draw(1, 4, 24)})
    kept = {name: array.copy() for name, array in first.items()}
    executable.run({"x": draw(1, 4, 24, seed=9)})
    executable.run({"x": draw(3, 9, 24, seed=9)})
    assert all((first[name] == kept[name]).all() for name in first)


def test_out_arrays_are_written_in_place() -> None:
    executable = compile_graph(block(), threads=2)
    x = draw(2, 5, 24)
    expected = executable.run({"x": x})
    out = {"y": np.full((2, 5, 24), np.nan, np.float32)}
    found = executable.run({"x": x}, out=out)
    assert found["y"] is out["y"]
    assert (out["y"] == expected["y"]).all()
    assert (found["pooled"] == expected["pooled"]).all()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 4, 24), np.float32),
        np.zeros((2, 5, 24)),
        np.zeros((24, 5, 2), np.float32).T,
    ],
)
def test_out_arrays_that_do_not_fit_are_refused(array: Array) -> None:
    with pytest.raises(RunError, match="array given for output 'y' does not fit"):
        compile_graph(block()).run({"x": draw(2, 5, 24)}, out={"y": array})


def test_an_output_over_its_own_input() -> None:
    b = Builder("transpose")
    square = b.input("x", "f32[n, n]")
    executable = compile_graph(b.build(y=b.add(b.transpose(square, perm=[1, 0]), 1.0)), threads=2)
    x = draw(20, 20)
    expected = executable.run({"x": x})["y"]
    assert (executable.run({"x": x}, out={"y": x})["y"] == expected).all()
    assert (x == expected).all()


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("part", [slice(0, 1), slice(1, 2)])
def test_outputs_over_each_other_are_refused(target: str, part: slice) -> None:
    b = Builder("both")
    x = b.input("x", "f32[3]")
    executable = compile_graph(b.build(y=b.add(x, 1.0), z=b.mul(x, 2.0)), target=target)
    room = np.zeros((2, 3), np.float32)
    with pytest.raises(RunError, match="given for outputs 'y' and 'z' share memory"):
        executable.run({"x": draw(3)}, out={"y": room[part][0], "z": room[part][0]})
    found = executable.run({"x": draw(3)}, out={"y": room[0], "z": room[1]})
    np.testing.assert_allclose(room, [draw(3) + 1, draw(3) * 2], rtol=1e-6)
    assert found["z"].base is room


@pytest.mark.parametrize("array", [np.zeros((1, 3), np.float32), np.zeros(3), [0.0, 0.0, 0.0]])
def test_the_interpreter_refuses_out_arrays_that_do_not_fit(array: Any) -> None:
    b = Builder("one")
    executable = compile_graph(b.build(y=b.add(b.input("x", "f32[3]"), 1.0)), target="reference")
    with pytest.raises(RunError, match="array given for output 'y' does not fit"):
        executable.run({"x": draw(3)}, out={"y": array})


def counter() -> Graph:
    b = Builder("counter")
    x = b.input("x", "f32[3]")
    total = b.state("total", np.zeros(3, np.float32))
    steps = b.state("steps", np.array(0, np.int64))
    after = b.add(total, x)
    b.update(total, after)
    b.update(steps, b.add(steps, 1))
    return b.build(before=total, after=after, steps=steps)


def test_state_lasts_until_it_is_reset() -> None:
    executable = compile_graph(counter(), threads=2)
    one = np.ones(3, np.float32)
    for turn in range(4):
        found = executable.run({"x": one})
        assert (found["before"] == turn).all()
        assert (found["after"] == turn + 1).all()
        assert found["steps"] == turn
    executable.reset()
    assert (executable.run({"x": one})["before"] == 0).all()


def test_executables_do_not_share_state() -> None:
    first, second = compile_graph(counter()), compile_graph(counter())
    one = np.ones(3, np.float32)
    first.run({"x": one})
    assert (second.run({"x": one})["before"] == 0).all()


def test_states_that_are_swapped() -> None:
    b = Builder("swap")
    x = b.input("x", "f32[2, 2]")
    one = b.state("one", np.array([[1, 2], [3, 4]], np.float32))
    other = b.state("other", np.array([[5, 6], [7, 8]], np.float32))
    b.update(one, other)
    b.update(other, b.transpose(one, perm=[1, 0]))
    graph = b.build(y=b.add(b.add(x, one), b.mul(other, 10.0)))
    executable, states = compile_graph(graph), {}
    for _ in range(5):
        feeds = {"x": np.zeros((2, 2), np.float32)}
        want = run(graph, feeds, states=states)
        assert (executable.run(feeds)["y"] == want["y"]).all()


@pytest.mark.parametrize("shape", [(0, 5, 24), (2, 0, 24), (0, 0, 24)])
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    found = compile_graph(block(), threads=3).run({"x": np.zeros(shape, np.float32)})
    want = run(block(), {"x": np.zeros(shape, np.float32)})
    for name in want:
        assert found[name].shape == want[name].shape
        assert np.array_equal(found[name], want[name], equal_nan=True)


def test_sizes_that_do_not_fit_together_are_refused() -> None:
    b = Builder("sizes")
    x, y = b.input("x", "f32[n, 4]"), b.input("y", "f32[7, 4]")
    executable = compile_graph(b.build(z=b.add(x, y)), threads=2)
    other = draw(7, 4)
    assert executable.run({"x": draw(1, 4), "y": other})["z"].shape == (7, 4)
    assert executable.run({"x": draw(7, 4), "y": other})["z"].shape == (7, 4)
    for wrong in (0, 2, 8):
        with pytest.raises(RunError, match="do not broadcast"):
            executable.run({"x": draw(wrong, 4), "y": other})


def test_an_index_error_does_not_affect_the_next_run() -> None:
    b = Builder("lookup")
    table, at = b.input("table", "f32[n, 3]"), b.input("at", "i64[k]")
    executable = compile_graph(b.build(y=b.gather(table, at, axis=0)), threads=2)
    with pytest.raises(RunError, match="index 5 is outside"):
        executable.run({"table": draw(4, 3), "at": np.array([1, 5])})
    found = executable.run({"table": draw(4, 3), "at": np.array([1, -1])})["y"]
    assert (found == draw(4, 3)[[1, 3]]).all()


def test_data_dependent_sizes() -> None:
    b = Builder("nonzero")
    x = b.input("x", "f32[n]")
    found = b.nonzero(b.cast(b.gt(x, 0.0), to="i32"))
    at = b.reshape(found, shape=[found.shape[1]])
    graph = b.build(y=b.mul(b.gather(x, at, axis=0), 2.0), at=at)
    executable = compile_graph(graph, threads=2)
    for size, seed in ((9, 0), (0, 1), (33, 2), (1, 3)):
        x_ = draw(size, seed=seed)
        result = executable.run({"x": x_})
        assert (result["at"] == np.nonzero(x_ > 0)[0]).all()
        assert (result["y"] == 2 * x_[x_ > 0]).all()


def test_one_value_as_several_outputs() -> None:
    b = Builder("twice")
    x = b.input("x", "f32[2, 3]")
    y = b.relu(x)
    flat = b.reshape(y, shape=[6])
    graph = b.build(y=y, again=y, flat=flat, transposed=b.transpose(y, perm=[1, 0]), x=x)
    found = compile_graph(graph).run({"x": draw(2, 3)})
    for name, want in run(graph, {"x": draw(2, 3)}).items():
        assert (found[name] == want).all()
    arrays = list(found.values())
    assert not any(np.may_share_memory(a, b) for i, a in enumerate(arrays) for b in arrays[i + 1 :])


def test_changed_inputs_are_checked_and_planned_again() -> None:
    """Known types and shapes skip the checks; others are checked, in any order."""
    executable = compile_graph(block(), threads=2)
    sizes = [
        *range(1, 20),
        300,
        *range(19, 0, -1),
    ]  # more plans than the cache holds; the arena grows
    for seq in sizes:
        x = draw(1, seq, 24)
        found = executable.run({"x": x})["y"]
        assert found.tobytes() == executable.run({"x": x.copy("F")})["y"].tobytes()
        np.testing.assert_allclose(found, run(block(), {"x": x})["y"], rtol=1e-4, atol=1e-4)
    with pytest.raises(RunError, match="wrong element type"):
        executable.run({"x": x.astype(np.float64)})
    with pytest.raises(BitwrightError, match=">f4"):
        executable.run({"x": x.astype(">f4")})
    with pytest.raises(RunError, match="wrong rank"):
        executable.run({"x": x[0]})
    with pytest.raises(RunError, match="wrong size on axis 2"):
        executable.run({"x": x[..., :23]})
    with pytest.raises(RunError, match="no input 'z'"):
        executable.run({"x": x, "z": x})
    assert executable.run({"x": x})["y"].tobytes() == found.tobytes()
