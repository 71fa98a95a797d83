"""Key-value caches: kernels against the reference, states in place, faults."""

import numpy as np
import pytest
from block_runs import TARGETS, kernel_runs, run_kernel

import bitwright as bw
from bitwright.errors import RunError
from bitwright.ops.core.registry import get
from bitwright.pipeline import compile_graph

CASES = [
    pytest.param(op, case, id=f"{op}-{number}")
    for op in ("kv_write", "cached_attention")
    for number, case in enumerate(get(op).samples())
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op, case", CASES)
def test_samples(op, case, target):
    found, expected = run_kernel(op, case.inputs, case.attrs, (), target, threads=3)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for one, other in pairs:
        kernel_runs.assert_near(one, other, case.tolerance)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("window", [None, 100])
def test_bits_of_a_row_depend_on_nothing_else(window, target):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((19, 6, 20)).astype(np.float32)
    k, v = (rng.standard_normal((2, 2, 400, 20)).astype(np.float16) for _ in range(2))
    slot, position = rng.integers(0, 2, 19), rng.integers(0, 400, 19)
    attrs = {} if window is None else {"window": window}
    inputs = (q, k, v, slot, position)
    whole, expected = run_kernel("cached_attention", inputs, attrs, (), target, threads=2)
    kernel_runs.assert_near(whole, expected)
    for rows in (1, 2, 7, 16, 17):
        part = (q[:rows], k, v, slot[:rows], position[:rows])
        for threads in (1, 3):
            found, _ = run_kernel("cached_attention", part, attrs, (), target, threads=threads)
            assert found.tobytes() == whole[:rows].tobytes(), (rows, threads)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("element", ["f16", "i8"])
def test_the_last_row_of_a_place_stays(element, target):
    rng = np.random.default_rng(0)
    new = rng.standard_normal((40, 2, 9)).astype(np.float32)
    slot, position = rng.integers(0, 2, 40), rng.integers(0, 3, 40)
    scale = (np.zeros((2, 2, 3), np.float32),) if element == "i8" else ()
    inputs = (np.zeros((2, 2, 3, 9), "i1" if scale else "f2"), new, slot, position, *scale)
    for threads in (1, 4):
        found, expected = run_kernel("kv_write", inputs, {}, (), target, threads=threads)
        pairs = zip(found, expected, strict=True) if scale else [(found, expected)]
        for one, other in pairs:
            np.testing.assert_array_equal(one, other)


def cached_model(element="f16", context=40):
    """A layer with a cache as state."""
    b = bw.Builder("cached")
    q, new = b.input("q", "f32[n, 4, 8]"), b.input("new", "f32[n, 2, 8]")
    slot, position = b.input("slot", "i32[n]"), b.input("position", "i32[n]")
    caches = [b.state(f"{x}.0", type_=f"{element}[3, 2, {context}, 8]") for x in "kv"]
    scales = []
    if element == "i8":
        scales = [b.state(f"{x}.0.scale", type_=f"f32[3, 2, {context}]") for x in "kv"]
    written, factors = [], []
    for number, cache in enumerate(caches):
        made = b.kv_write(cache, new, slot, position, *scales[number : number + 1])
        after = made if isinstance(made, tuple) else (made,)
        b.update(cache, after[0])
        written.append(after[0])
        if scales:
            b.update(scales[number], after[1])
            factors.append(after[1])
    return b.build(y=b.cached_attention(q, *written, slot, position, *factors))


@pytest.mark.parametrize("element, tolerance", [("f32", 1e-5), ("f16", 2e-3), ("i8", 2e-2)])
def test_states_are_updated_in_place(element, tolerance):
    rng = np.random.default_rng(0)
    q, new = (rng.standard_normal((6, n, 8)).astype(np.float32) for n in (4, 2))
    exe = compile_graph(cached_model(element), threads=2)
    assert not list(exe.engine.fallbacks)
    assert all("copy" not in step.kernel for step in exe.engine.schedule.steps)
    found, arrays = [], []
    for i in range(6):
        feeds = {"q": q[i : i + 1], "new": new[i : i + 1]}
        feeds |= {"slot": np.array([1], np.int32), "position": np.array([i], np.int32)}
        found.append(exe.run(feeds)["y"][0])
        arrays.append(exe.engine.states["k.0"])
    assert all(array is arrays[0] for array in arrays)
    keys = np.repeat(new, 2, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, keys) / np.sqrt(8)
    scores = np.where(np.tri(6, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("hij,jhd->ihd", weights, keys)
    np.testing.assert_allclose(np.array(found), expected, atol=tolerance)
    once = exe.run(
        {
            "q": q,
            "new": new,
            "slot": np.zeros(6, np.int32),
            "position": np.arange(6, dtype=np.int32),
        }
    )["y"]
    assert once.tobytes() == np.array(found).tobytes()


def test_places_outside_the_cache_are_errors():
    exe = compile_graph(cached_model(), threads=1)
    feeds = {"q": np.zeros((1, 4, 8), np.float32), "new": np.zeros((1, 2, 8), np.float32)}
    for slot, position in ((3, 0), (0, 40), (0, -1)):
        places = {"slot": np.array([slot], np.int32), "position": np.array([position], np.int32)}
        with pytest.raises(RunError, match="outside"):
            exe.run({**feeds, **places})


@pytest.mark.parametrize("element", ["f16", "i8"])
def test_a_place_outside_changes_no_other_token(element):
    exe = compile_graph(cached_model(element), threads=1)
    feeds = {"q": np.zeros((1, 4, 8), np.float32), "new": np.ones((1, 2, 8), np.float32)}
    first = {"slot": np.zeros(1, np.int32), "position": np.zeros(1, np.int32)}
    exe.run(feeds | first)
    before = {name: array.copy() for name, array in exe.engine.states.items()}
    feeds["new"] *= 9
    for slot, position in ((3, 0), (-1, 0), (0, 40), (0, -1)):
        places = {"slot": np.array([slot], np.int32), "position": np.array([position], np.int32)}
        with pytest.raises(RunError, match="outside"):
            exe.run(feeds | places)
    for name, array in exe.engine.states.items():
        np.testing.assert_array_equal(array, before[name])


def test_an_empty_cache_has_no_place():
    exe = compile_graph(cached_model(context=0), threads=1)
    feeds = {"q": np.zeros((1, 4, 8), np.float32), "new": np.ones((1, 2, 8), np.float32)}
    with pytest.raises(RunError, match="outside"):
        exe.run(feeds | {"slot": np.zeros(1, np.int32), "position": np.zeros(1, np.int32)})


@pytest.mark.parametrize("use", ["output", "update"])
def test_the_old_value_of_a_cache_stays_what_it_was(use):
    """An output, or the update of another state, shows the cache before the write."""
    b = bw.Builder("old")
    new, place = b.input("new", "f32[n, 1, 2]"), b.input("place", "i64[n]")
    cache, other = (b.state(name, type_="f32[1, 1, 4, 2]") for name in ("cache", "other"))
    written = b.kv_write(cache, new, place, place)
    b.update(cache, written)
    if use == "update":
        b.update(other, cache)
    exe = compile_graph(b.build(old=cache if use == "output" else other, now=written), threads=1)
    for n in (1, 2, 3):
        feeds = {"new": np.full((1, 1, 2), n, np.float32), "place": np.zeros(1, np.int64)}
        found = exe.run(feeds)
        assert found["now"].max() == n
        assert found["old"].max() == max(0, n - (1 if use == "output" else 2))
