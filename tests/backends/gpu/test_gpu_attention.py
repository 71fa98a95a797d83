"""Attention: blocks of queries, few queries with shared keys, masks and bounds, grouped heads."""

import numpy as np
import pytest
from on_gpu import check_graph, check_node, compiled

import bitwright as bw
from bitwright.backends.gpu.codegen.source import Config
from bitwright.backends.gpu.kernels.attention import flash
from bitwright.ops.core.registry import get

RNG = np.random.default_rng(0)
CASES = [case for case in get("attention").samples() if not case.attrs.get("int8")]


def floats(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_samples(number):
    case = CASES[number]
    atol = 2e-3 if case.inputs[0].dtype == np.float16 else 2e-5
    check_node("attention", *case.inputs, rtol=1e-5, atol=atol, **case.attrs)


@pytest.mark.parametrize("keys", [1, 16, 17, 33, 127])
def test_one_query(keys):
    """Programs share the keys of a head."""
    q, k, v = floats(2, 4, 1, 16), floats(2, 2, keys, 16), floats(2, 2, keys, 17)
    check_node("attention", q, k, v, atol=2e-5)
    lengths = np.array([max(keys // 2, 1), keys])
    check_node("attention", q, k, v, None, None, None, lengths, causal=True, atol=2e-5)


def test_blocks_of_queries():
    q, k, v = floats(1, 2, 70, 33), floats(1, 1, 127, 33), floats(1, 1, 127, 7)
    check_node("attention", q, k, v, causal=True, causal_offset="end", window=20, atol=2e-5)
    check_node("attention", q, k, v, floats(70, 127), softcap=3.0, atol=2e-5)


def test_symbolic_sizes_with_a_mask_and_an_epilogue():
    b = bw.Builder("g")
    q, k, v = (
        b.input(n, f"f32[batch, 2, {s}, 16]") for n, s in (("q", "s"), ("k", "t"), ("v", "t"))
    )
    mask = b.input("mask", "bool[batch, 1, 1, t]")
    y = b.transpose(b.mul(b.attention(q, k, v, mask), np.float32(2)), perm=(0, 2, 1, 3))
    graph = b.build(y=b.reshape(y, shape=(q.shape[0], q.shape[2], 32)))
    keep = RNG.random((2, 1, 1, 40)) > 0.3
    feeds = {"q": floats(2, 2, 9, 16), "k": floats(2, 2, 40, 16), "v": floats(2, 2, 40, 16)}
    check_graph(graph, feeds | {"mask": keep}, atol=2e-5)


def test_results_repeat():
    """No atomics: two runs give the same bits."""
    b = bw.Builder("g")
    q, k, v = (b.input(n, f"f32[1, 2, {s}, 16]") for n, s in (("q", 1), ("k", 127), ("v", 127)))
    exe = compiled(b.build(y=b.attention(q, k, v)))
    feeds = {"q": floats(1, 2, 1, 16), "k": floats(1, 2, 127, 16), "v": floats(1, 2, 127, 16)}
    assert exe.run(feeds)["y"].tobytes() == exe.run(feeds)["y"].tobytes()
    assert any("join" in step.node for step in exe.engine.artifact.schedule.steps)


def test_refuses_wide_heads():
    b = bw.Builder("g")
    x = b.input("x", "f32[1, 1, 3, 300]")
    exe = bw.compile(b.build(y=b.attention(x, x, x)), target="cuda")
    assert "300 features" in next(iter(exe.engine.fallbacks)).why


@pytest.mark.parametrize("queries", [1, 33])
@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_halves(queries, element):
    operands = [floats(1, 2, n, 16).astype(element) for n in (queries, 65, 65)]
    check_node("attention", *operands, rtol=2e-2, atol=2e-2)


def test_int8_attention_is_computed_in_tf32():
    operands = [floats(1, 2, n, 16) for n in (33, 65, 65)]
    check_node("attention", *operands, rtol=2e-2, atol=2e-2, int8=True)
    b = bw.Builder("g")
    q, k, v = (b.input(n, f"f32[1, 2, {s}, 16]") for n, s in (("q", 33), ("k", 65), ("v", 65)))
    exe = compiled(b.build(y=b.attention(q, k, v, int8=True)))
    assert "tf32 in place of int8" in exe.engine.artifact.schedule.steps[0].why


@pytest.mark.parametrize("keys", [64, 128, 192, 384])
@pytest.mark.parametrize("features, dtype", [(16, np.float32), (24, np.float16), (80, np.float16)])
def test_all_keys_without_masks(keys, features, dtype):
    """Numbers of keys that are a multiple of a block."""
    q, k, v = (floats(1, h, n, features, dtype=dtype) for h, n in ((4, 70), (2, keys), (2, keys)))
    wide = dtype == np.float32
    check_node("attention", q, k, v, rtol=1e-5 if wide else 2e-3, atol=2e-5 if wide else 2e-3)


def test_programs_that_loop_over_heads(monkeypatch):
    tile = Config({"BM": 16, "BN": 64, "PROGRAMS": 3}, 4, 2)
    monkeypatch.setattr(flash, "_single_configs", lambda *_: (tile,))
    q, k, v = floats(2, 4, 40, 24), floats(2, 2, 64, 24), floats(2, 2, 64, 24)
    check_node("attention", q, k, v, atol=2e-5)
