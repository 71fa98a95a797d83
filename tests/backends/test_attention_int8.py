"""int8 attention: quantized values bit for bit, the rest against the interpreter."""

import numpy as np
import pytest
from run_kernel import (
    TARGETS,
    Run,
    assert_same,
    feeds_of,
    graph_of,
    lower,
    named,
    reference,
    run_op,
)
from test_attention_kernel import FORMS, MASKS, draw, operands

from bitwright.backends.cpu.codegen import jit
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite import Trace

THREADS = [1, 2, 3, 7]


def assert_few_steps(found, expected):
    """Equal up to rounding, except for weights that differ by one of 255 steps."""
    assert (np.isfinite(found) == np.isfinite(expected)).all()
    scale = max(float(np.abs(expected[np.isfinite(expected)]).max(initial=0)), 1e-30)
    error = np.abs(found.astype(np.float64) - expected)[np.isfinite(expected)] / scale
    assert error.max(initial=0) < 0.02 and (error > 1e-5).mean() <= 0.05


def check(arrays, target="host", threads=2, symbolic=False, **attrs):
    shapes = None
    if symbolic:
        batches, heads, _, features = arrays[0].shape
        shapes = {0: f"[{batches}, {heads}, S, {features}]"}
    graph = graph_of("attention", *arrays, shapes=shapes, int8=True, **attrs)
    expected = reference(graph, feeds_of(graph, arrays))["out0"]
    how = {"target": named(target), "threads": threads, "shapes": shapes}
    assert_few_steps(run_op("attention", *arrays, **how, int8=True, **attrs), expected)


@pytest.mark.parametrize("target", TARGETS)
def test_any_size(target):
    for queries, keys in ((1, 1), (33, 127), (17, 16), (7, 300), (64, 513), (5, 3)):
        check(operands(queries, keys), target, threads=3)
    for features, values in ((1, 1), (7, 5), (17, 33), (18, 31), (64, 64), (80, 128)):
        check(operands(35, 70, features, values, heads=2), target)
    check(operands(3, 0), target)
    check(operands(40, 70), target, symbolic=True)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("attrs", FORMS, ids=str)
def test_visible_keys(target, attrs):
    check(operands(50, 77, shared=2), target, threads=3, **attrs)
    check(operands(30, 290, shared=2, past=41), target, **attrs)
    check([*operands(20, 77), None, None, None, np.array([60, 77])], target, **attrs)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks(target, shape):
    keep = np.random.default_rng(0).random(shape) > 0.3
    check([*operands(50, 77), keep], target)
    check([*operands(50, 77), draw(*shape)], target, causal=True)


def test_fully_masked_rows_are_zero():
    mask = np.ones((40, 30), np.bool_)
    mask[1] = False
    found = run_op("attention", *operands(40, 30), mask, int8=True)
    assert (found[:, :, 1] == 0).all() and np.isfinite(found).all()
    check([*operands(40, 30), mask])


@pytest.mark.parametrize("target", TARGETS)
def test_special_values(target):
    """Rows of zeros, equal values, small and large numbers; non-finite values propagate."""
    q, k, v = operands(9, 33, 20, 12)
    for change in (q, k, v):
        kept = change.copy()
        change[0, 0, :3] = 0
        check([q, k, v], target)
        for factor in (1e-40, 1e-30, 1e20, 1e35):
            change[...] = kept * np.float32(factor)
            check([q, k, v], target, scale=min(1.0, 1 / factor) if change is not v else None)
        change[...] = kept
    check([q, k, np.ones_like(v)], target)
    for change in (q, k, v):
        kept = change.copy()
        change[1, 1, 2, 3] = np.nan
        found = run_op("attention", q, k, v, target=named(target), int8=True)
        bad = np.isnan(found[1, 1])
        assert bad[2].all() and (change is q or bad.all())
        assert np.isfinite(np.delete(found[1], 1, axis=0)).all() and np.isfinite(found[0]).all()
        change[...] = kept


def test_results_do_not_depend_on_threads():
    arrays = operands(70, 300)
    one, *more = (run_op("attention", *arrays, int8=True, threads=n) for n in THREADS)
    for other in more:
        assert_same(other, one)


def test_results_do_not_depend_on_the_target():
    """For any vector width and int8 dot product, on targets with fma."""
    arrays = [*operands(70, 300), draw(70, 300)]
    targets = [named(name) for name in TARGETS if named(name).has_fma]
    assert len(targets) > 1
    one, *more = (run_op("attention", *arrays, int8=True, target=t) for t in targets)
    for other in more:
        assert_same(other, one)


@pytest.mark.parametrize("added", [-1e5, -1e9, np.finfo(np.float32).min, 1e9])
def test_weights_do_not_overflow_with_a_large_bias(added):
    """The range of the weights must not depend on terms that a large bias absorbs."""
    q, k, v = operands(20, 33)
    mask = np.full((20, 33), added, np.float32)
    check([q, k, v, mask])
    targets = [named(name) for name in TARGETS if named(name).has_fma]
    one, *more = (run_op("attention", q, k, v, mask, int8=True, target=t) for t in targets)
    for other in more:
        assert_same(other, one)


@pytest.mark.parametrize("heavier", [1, 100, 1000, 3000, 10_000])
def test_many_keys_with_small_weights_count(heavier):
    """One key has the weight of some thousands of equal others."""
    keys = 2000
    q, k, v = operands(8, keys)
    mask = np.zeros((8, keys), np.float32)
    mask[:, 5] = np.log(heavier)
    exact = run_op("attention", np.float32(0.02) * q, k, v, mask)
    found = run_op("attention", np.float32(0.02) * q, k, v, mask, int8=True)
    assert np.abs(found - exact).max() < 0.02 * np.abs(v[:, :, 5]).max()


def quantize_rows(x, peak):
    return np.rint(x * (np.float32(127) / peak)).astype(np.int64)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("keys, past, features, values", [(33, 0, 17, 18), (7, 6, 32, 48)])
@pytest.mark.parametrize("causal", [False, True])
def test_quantized_keys_and_values_equal_numpy(target, keys, past, features, values, causal):
    """The formulas in numpy, in f32 where the kernel uses f32."""
    arrays = operands(5, keys, features, values, past=past)
    arrays[2][1, 2] *= np.float32(2) ** np.linspace(-12, 32, keys, dtype=np.float32)[:, None]
    graph = graph_of("attention", *arrays, int8=True, causal=causal)
    ctx = lower(graph, named(target))
    step = next(s for s in ctx.schedule.steps if s.node.endswith(".keys"))
    k, v = arrays[1:3]
    if past:
        k, v = np.concatenate([arrays[4], k], axis=2), np.concatenate([arrays[5], v], axis=2)
    total = keys + past
    for threads in THREADS:
        run = Run(graph, feeds_of(graph, arrays), named(target), threads, ctx=ctx)
        made = {name: run.memory.array(view).reshape(-1) for name, view in step.pointers.items()}
        peak = np.abs(k).max(-1, keepdims=True)
        np.testing.assert_array_equal(made["k_scales"], (peak / np.float32(127)).reshape(-1))
        rows = made["k_q"].reshape(2, 4, total, -1)[..., :features].astype(np.int64)
        rows = (rows & 255) - 128 if _has_dots(ctx) else rows
        np.testing.assert_array_equal(rows, quantize_rows(k, peak))
        mean = np.zeros_like(v[:, :, :1])
        for key in range(total):
            mean = mean + v[:, :, key : key + 1]
        mean = mean / np.float32(total)
        added = np.abs(mean).max(-1, keepdims=True) * np.float32(1.5 * 2**20)
        mean = mean * 0 if causal else (mean + added) - added
        far = v - mean
        peaks = np.abs(far).max(-1, keepdims=True)
        largest = peaks[:, :, :1] if causal else peaks.max(2, keepdims=True)
        halves = [m for power in range(-8, 8) for m in (1.5 * 2.0**power, 2.0 * 2.0**power)]
        steps = [*(2.0**power for power in range(-39, -7)), *halves] if causal else halves[16:]
        multipliers = np.full_like(peaks, 2.0**-40 if causal else 1)
        for m in steps:
            multipliers[peaks <= largest / np.float32(m)] = m
        np.testing.assert_array_equal(made["v_multipliers"], multipliers.reshape(-1))
        log_multipliers = np.log(multipliers.astype(np.float64)).astype(np.float32)
        np.testing.assert_array_equal(made["v_log_multipliers"], log_multipliers.reshape(-1))
        np.testing.assert_array_equal(
            made["v_inverse_scales"], (np.float32(127) / largest).reshape(-1)
        )
        found = made["v_q"].astype(np.int64)
        if _has_dots(ctx):
            groups = -(-total // 4)
            found = found.reshape(2, 4, groups, -1, 4).transpose(0, 1, 2, 4, 3)
            found = found.reshape(2, 4, groups * 4, -1)
            assert not found[:, :, total:].any()
        else:
            found = found.reshape(2, 4, total, -1)
        expected = np.rint(far * (multipliers * (np.float32(127) / largest))).astype(np.int64)
        expected = np.clip(expected, -127, 127)
        np.testing.assert_array_equal(found[:, :, :total, :values], expected)


def _has_dots(ctx):
    return any("vpdpbusd" in ctx.text(kernel) for kernel in ctx.kernels.values())


def test_uses_the_int8_dot_instruction():
    ctx = lower(graph_of("attention", *operands(64, 64), int8=True), named("avx512vnni"))
    texts = [jit.assembly(ctx.text(kernel), ctx.target) for kernel in ctx.kernels.values()]
    assert sum(text.count("vpdpbusd") for text in texts) >= 32


@pytest.mark.parametrize("target", TARGETS)
def test_heads_inside_positions_and_an_epilogue(target):
    b = Builder("block")
    x = b.input("x", "f32[2, S, 3, 4, 20]")
    parts = [
        b.reshape(p, shape=(2, x.shape[1], 4, 20)) for p in b.split(x, axis=2, sizes=(1, 1, 1))
    ]
    q, k, v = (b.transpose(part, perm=(0, 2, 1, 3)) for part in parts)
    y = b.attention(q, k, v, int8=True)
    y = b.transpose(b.mul(y, b.input("gate", "f32[2, 4, 1, 20]")), perm=(0, 2, 1, 3))
    graph = fuse_regions(b.build(y), Trace())
    feeds = {"x": draw(2, 37, 3, 4, 20), "gate": draw(2, 4, 1, 20, seed=1)}
    (expected,) = reference(graph, feeds).values()
    (found,) = Run(graph, feeds, named(target), threads=3).outputs.values()
    assert_few_steps(found, expected)
