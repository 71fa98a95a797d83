"""Attention and rotary embeddings against the interpreter, on every target."""

import numpy as np
import pytest
from run_kernel import (
    TARGETS,
    THREADS,
    Run,
    assert_near,
    assert_same,
    feeds_of,
    graph_of,
    lower,
    named,
    reference,
    run_op,
)

from bitwright.backends.cpu.codegen import jit
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.registry import get
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite.trace import Trace
from bitwright.target import host


def draw(*shape, seed=0, element=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(element)


def operands(queries, keys, features=16, values=16, batches=2, heads=4, shared=None, past=0):
    shared = shared or heads
    arrays = [
        draw(batches, heads, queries, features),
        draw(batches, shared, keys, features, seed=1),
        draw(batches, shared, keys, values, seed=2),
    ]
    if past:
        arrays += [None, draw(batches, shared, past, features, seed=3)]
        arrays += [draw(batches, shared, past, values, seed=4)]
    return arrays


def check(arrays, target="host", threads=2, symbolic=False, tolerance=2e-5, **attrs):
    shapes = None
    if symbolic:
        batches, heads, _, features = arrays[0].shape
        shapes = {0: f"[{batches}, {heads}, S, {features}]"}
    graph = graph_of("attention", *arrays, shapes=shapes, **attrs)
    expected = reference(graph, feeds_of(graph, arrays))["out0"]
    how = {"target": named(target), "threads": threads, "shapes": shapes}
    found = run_op("attention", *arrays, **how, **attrs)
    assert_near(found, expected, tolerance)


@pytest.mark.parametrize("target", TARGETS)
def test_any_size(target):
    for queries, keys in ((33, 127), (17, 16), (48, 130), (64, 64), (7, 200), (5, 1)):
        for threads in THREADS:
            check(operands(queries, keys), target, threads)
    for features, values in ((1, 1), (7, 5), (17, 33), (64, 64), (80, 128)):
        check(operands(35, 70, features, values, heads=2), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("queries", (1, 2, 4, 5, 33))
def test_single_query_and_query_block(target, queries):
    """The number of queries is a constant or symbolic."""
    for symbolic in (False, True):
        check(operands(queries, 300, 20, 24, heads=2), target, symbolic=symbolic)
        check(operands(queries, 3, 7, 9), target, symbolic=symbolic)


FORMS = [
    {"causal": True},
    {"causal": True, "window": 9},
    {"window": 5, "window_right": 3},
    {"window": 0},
    {"causal": True, "causal_offset": "end"},
    {"softcap": 2.0, "scale": 0.3},
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("queries", (1, 50))
@pytest.mark.parametrize("attrs", FORMS, ids=str)
def test_visible_keys(target, queries, attrs):
    check(operands(queries, 77, shared=2), target, threads=3, **attrs)
    check(operands(queries, 30, shared=2, past=40), target, **attrs)
    lengths = [None, None, None, np.array([min(60, 33 + queries), 77])]
    check([*operands(queries, 77), *lengths], target, **attrs)


MASKS = [(50, 77), (77,), (1, 1), (2, 1, 1, 77), (2, 4, 50, 77), (1, 1, 50, 1), (2, 1, 50, 70)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks(target, shape):
    keep = np.random.default_rng(0).random(shape) > 0.3
    check([*operands(50, 77), keep], target)
    check([*operands(50, 77), draw(*shape)], target, causal=True)
    one = shape if len(shape) < 2 or shape[-2] == 1 else (*shape[:-2], 1, shape[-1])
    check([*operands(1, 77), keep.reshape(-1)[: np.prod(one)].reshape(one)], target)


def test_fully_masked_rows_are_zero():
    for queries in (2, 40):
        mask = np.ones((queries, 30), np.bool_)
        mask[1] = False
        found = run_op("attention", *operands(queries, 30), mask)
        assert (found[:, :, 1] == 0).all() and np.isfinite(found).all()
        check([*operands(queries, 30), mask])
        check([*operands(queries, 30), np.where(mask, 0, -3.4e38).astype(np.float32)])


@pytest.mark.parametrize("element, tolerance", (("float16", 2e-3), ("float64", 1e-12)))
@pytest.mark.parametrize("target", TARGETS)
def test_other_elements(element, tolerance, target):
    for queries in (1, 40):
        arrays = [x.astype(element) for x in operands(queries, 70, 20, 24)]
        check(arrays, target, tolerance=tolerance)


def test_samples():
    for op in ("attention", "rotary", "axial_rotary"):
        for case in get(op).samples():
            graph = graph_of(op, *case.inputs, **case.attrs)
            feeds = feeds_of(graph, case.inputs)
            expected = reference(graph, feeds)["out0"]
            for target in TARGETS:
                found = Run(graph, feeds, named(target), 2).outputs["out0"]
                assert_near(found, expected, max(2e-5, case.tolerance))


def test_results_do_not_depend_on_threads():
    for queries in (1, 70):
        arrays = operands(queries, 70)
        one, *more = (run_op("attention", *arrays, causal=True, threads=n) for n in (1, 2, 7))
        for other in more:
            assert_same(other, one)


def block(heads, features, epilogue=False):
    """Projections of [B, S, 3*H*D] split into heads, attention, heads merged again."""
    b = Builder("block")
    x = b.input("x", f"f32[B, S, {3 * heads * features}]")
    parts = b.split(x, axis=2, sizes=(heads * features,) * 3)
    batch, length = x.shape[:2]
    q, k, v = (
        b.transpose(b.reshape(part, shape=(batch, length, heads, features)), perm=(0, 2, 1, 3))
        for part in parts
    )
    y = b.attention(q, k, v, causal=True)
    if epilogue:
        y = b.mul(y, b.input("gate", f"f32[B, {heads}, 1, {features}]"))
    y = b.transpose(y, perm=(0, 2, 1, 3))
    return fuse_regions(b.build(b.reshape(y, shape=(batch, length, heads * features))), Trace())


@pytest.mark.parametrize("epilogue", (False, True))
@pytest.mark.parametrize("target", TARGETS)
def test_surrounding_reshapes_and_transposes_are_views(target, epilogue):
    graph = block(3, 20, epilogue)
    ctx = lower(graph, named(target))
    kernels = [step.kernel.split("_")[0] for step in ctx.schedule.steps]
    assert kernels == ["attention", "copy"][: len(kernels)] and len(kernels) <= 2
    for length in (1, 37):
        feeds = {"x": draw(2, length, 180)}
        if epilogue:
            feeds["gate"] = draw(2, 3, 1, 20)
        (expected,) = reference(graph, feeds).values()
        (found,) = Run(graph, feeds, threads=3, ctx=ctx).outputs.values()
        assert_near(found, expected, 2e-5)


@pytest.mark.skipif(not (host().is_x86 and host().has_fma), reason="looks at x86 instructions")
def test_tiles_stay_in_registers():
    graph = graph_of("attention", *operands(64, 64, 64, 64))
    ctx = lower(graph)
    (kernel,) = ctx.kernels.values()
    inner = loops_with(jit.assembly(ctx.text(kernel), ctx.target), "fma")
    tile = max(inner, key=lambda lines: sum("fma" in line for line in lines))
    assert not any("(%rsp)" in line and "mov" in line for line in tile)


def loops_with(text, word):
    """Innermost loops that contain an instruction: from a label to the jump back to it."""
    found, start, label = [], 0, ""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.endswith(":"):
            start, label = number, line[:-1]
        elif label and line.strip().startswith("j") and line.endswith(label):
            body = lines[start:number]
            if any(word in one for one in body):
                found.append(body)
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("interleaved", (False, True))
def test_rotary_at_odd_sizes(target, interleaved):
    for features, rotated in ((2, 2), (14, 6), (32, 32), (66, 34), (130, 128)):
        x = draw(2, 3, 5, features)
        cos, sin = draw(9, rotated // 2), draw(9, rotated // 2, seed=1)
        ids = np.array([[0, 1, 2, 3, 4], [8, 7, 7, 0, 2]])
        attrs = {"interleaved": interleaved, "rotary_dim": 0 if rotated == features else rotated}
        graph = graph_of("rotary", x, cos, sin, ids, **attrs)
        expected = reference(graph, feeds_of(graph, (x, cos, sin, ids)))["out0"]
        found = run_op("rotary", x, cos, sin, ids, target=named(target), threads=3, **attrs)
        assert_near(found, expected)


def test_rotary_records_a_fault_for_a_position_outside_the_table():
    x, table = draw(1, 1, 2, 8), draw(4, 4)
    for wrong in (4, -1):
        ids = np.array([[0, wrong]])
        graph = graph_of("rotary", x, table, table, ids)
        assert Run(graph, feeds_of(graph, (x, table, table, ids))).fault[1] == wrong
