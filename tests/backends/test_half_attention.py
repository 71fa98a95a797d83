"""Attention of bf16 by dots and tiles: against the interpreter, and against attention of f32."""

import ml_dtypes
import numpy as np
import pytest
from run_kernel import Run, feeds_of, graph_of, lower, reference
from stand_ins import SlowTiles, StandIn

from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.kernels.attention import bf16 as attention_pairs
from bitwright.backends.cpu.kernels.matmul.dot.amx import AmxBf16Dot
from bitwright.backends.cpu.kernels.matmul.dot.half_dot import Bf16Dot2
from bitwright.ops.core.builder import Builder
from bitwright.target import host, named

WAYS = {"dots": Bf16Dot2(StandIn(), False), "tiles": AmxBf16Dot(SlowTiles(StandIn()))}
LAST_PLACE = 2.0**-8


@pytest.fixture(params=["own", *WAYS])
def way(request, monkeypatch):
    """This machine's own instructions, and each kind by stand-ins."""
    if request.param in WAYS:
        if host().lanes(32) != 16:
            pytest.skip("pairs are vectors of 16")
        found = WAYS[request.param]
        monkeypatch.setattr(attention_pairs, "amx_bf16_dot", lambda target: found)
    return request.param


def draw(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(ml_dtypes.bfloat16)


def operands(queries, keys, features, values, heads=2, shared=None, past=0):
    shared = shared or heads
    sizes = [(heads, queries, features), (shared, keys, features), (shared, keys, values)]
    if past:
        sizes += [None, (shared, past, features), (shared, past, values)]
    return [None if size is None else draw(2, *size, seed=n) for n, size in enumerate(sizes)]


def check(arrays, threads=2, **attrs):
    """Within three roundings of the largest result; the interpreter's scores and powers are f64."""
    graph = graph_of("attention", *arrays, **attrs)
    feeds = feeds_of(graph, arrays)
    expected = reference(graph, feeds)["out0"].astype(np.float64)
    found = Run(graph, feeds, threads=threads).outputs["out0"].astype(np.float64)
    assert np.abs(found - expected).max() <= 3 * LAST_PLACE * np.abs(expected).max()


def test_any_size(way):
    for queries, keys, features, values in ((40, 130, 32, 32), (17, 33, 7, 5), (5, 1, 33, 48)):
        check(operands(queries, keys, features, values))


def test_visible_keys(way):
    check(operands(50, 77, 16, 20, heads=4, shared=2), threads=3, causal=True, window=9)
    check(operands(50, 30, 16, 20, past=40), causal=True, causal_offset="end")
    lengths = [None, None, None, np.array([60, 77])]
    check([*operands(50, 77, 16, 20), *lengths], softcap=2.0, scale=0.3)


def test_masks(way):
    keep = np.random.default_rng(0).random((2, 2, 50, 77)) > 0.3
    keep[:, :, 1] = False
    check([*operands(50, 77, 16, 20), keep])
    check([*operands(50, 77, 16, 20), draw(77)])


def test_masked_values_may_be_any_bits(way):
    q, k, v = operands(20, 70, 16, 20)
    v[0, :, 41:], v[1, :, 66:] = np.nan, np.inf
    arrays = [q, k, v, None, None, None, np.array([41, 66])]
    graph = graph_of("attention", *arrays)
    found = Run(graph, feeds_of(graph, arrays)).outputs["out0"]
    assert np.isfinite(found.astype(np.float32)).all()


def test_infinite_values_stay_where_they_are(way):
    q, k, v = operands(20, 35, 16, 20)
    v[:, :, -1, 3] = np.inf
    graph = graph_of("attention", q, k, v)
    found = Run(graph, feeds_of(graph, (q, k, v))).outputs["out0"]
    assert np.isposinf(found[..., 3]).all()
    assert np.isfinite(np.delete(found, 3, axis=-1)).all()


def test_nothing_outside_keys_and_values_is_used(way):
    """Features are part of longer rows with NaN on both sides."""
    b = Builder("parts")
    around = [np.full((2, 2, 45, 40), np.nan, ml_dtypes.bfloat16) for _ in "qkv"]
    inner = operands(45, 45, 24, 24)
    for wide, part in zip(around, inner, strict=True):
        wide[..., 8:32] = part
    values = [b.input(name, "bf16[2, 2, S, 40]") for name in "qkv"]
    parts = [b.slice(x, starts=[8], stops=[32], steps=[1], axes=[3]) for x in values]
    graph = b.build(y=b.attention(*parts))
    found = Run(graph, dict(zip("qkv", around, strict=True))).outputs["y"]
    alone = graph_of("attention", *inner)
    wide = reference(alone, feeds_of(alone, inner))["out0"].astype(np.float64)
    assert np.abs(found.astype(np.float64) - wide).max() <= 3 * LAST_PLACE * np.abs(wide).max()


def test_results_do_not_depend_on_threads(way):
    arrays = operands(70, 70, 16, 16)
    graph = graph_of("attention", *arrays, causal=True)
    feeds = feeds_of(graph, arrays)
    found = {Run(graph, feeds, threads=n).outputs["out0"].tobytes() for n in (1, 2, 7)}
    assert len(found) == 1


@pytest.mark.parametrize(
    ("target", "name"), [("amx", "tdpbf16ps"), ("avx512bf16", "vdpbf16ps"), ("avx512", "vfmadd")]
)
def test_the_instruction_is_emitted(target, name):
    ctx = lower(graph_of("attention", *operands(64, 64, 64, 64)), named(target))
    (kernel,) = (k for k in ctx.kernels.values() if k.name.startswith("attention_bf16"))
    text = jit.assembly(ctx.text(kernel), named(target))
    assert text.count(name) >= 16
    if target == "amx":  # sums stay in tiles: none but scores and results goes to memory
        assert text.count("tilestored") == 4 + 8
    if target == "avx512bf16":
        assert "vcvtneps2bf16" in text
