"""Int8 attention as a function of standard ops: in ONNX Runtime, and imported again."""

import numpy as np
import onnxruntime
import pytest

import bitwright as bw
from bitwright.export.onnx import export_onnx
from bitwright.frontend.onnx import load
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.target import host

FORMS = {
    "plain": (4, {}, None),
    "shared heads": (2, {"causal": True}, None),
    "window": (4, {"window": 5, "window_right": 2, "causal_offset": "end"}, "bool"),
    "softcap": (4, {"softcap": 2.0, "scale": 0.3}, "f32"),
}


@pytest.mark.parametrize("opset", [17, 21, 25])
@pytest.mark.parametrize("form", FORMS)
def test_other_runtimes_are_within_one_quantization_step(form, opset):
    heads, attrs, kind = FORMS[form]
    rng = np.random.default_rng(0)
    b = Builder("attention")
    q, k = b.input("q", "f32[B, 4, S, 24]"), b.input("k", f"f32[B, {heads}, T, 24]")
    v = b.input("v", f"f32[B, {heads}, T, 16]")
    mask = None if kind is None else b.input("mask", f"{kind}[B, 1, S, T]")
    graph = b.build(y=b.attention(q, k, v, mask, int8=True, **attrs))
    shapes = {"q": (2, 4, 9, 24), "k": (2, heads, 30, 24), "v": (2, heads, 30, 16)}
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    if kind is not None:
        feeds["mask"] = rng.normal(size=(2, 1, 9, 30)).astype(np.float32)
        feeds["mask"] = feeds["mask"] > -1 if kind == "bool" else feeds["mask"]
    model = export_onnx(graph, opset=opset, consumer="onnxruntime")
    (again,) = [node for node in load(model).nodes if node.op == "attention"]
    assert again.attrs["int8"]
    expected = run(graph, feeds)["y"]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    step = np.abs(feeds["v"]).max() / 127
    (theirs,), ours = session.run(None, feeds), bw.compile(model).run(feeds)["y"]
    assert np.abs(theirs - expected).max() < step
    assert np.abs(ours - expected).max() < step
    if host().has_fma and not attrs.get("softcap"):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.skipif(not host().has_fma, reason="e^x needs fma to have ONNX Runtime's bits")
@pytest.mark.parametrize("keys", [1, 6, 128, 300])
def test_other_runtimes_compute_the_same_values(keys):
    """Peaked and flat scores, keys whose values are small or far off, a mean that is not 0."""
    rng = np.random.default_rng(keys)
    b = Builder("attention")
    q, k, v = (b.input(name, "f32[1, 3, S, 32]") for name in "qkv")
    graph = b.build(y=b.attention(q, k, v, int8=True))
    model = export_onnx(graph, consumer="onnxruntime")
    session, exe = onnxruntime.InferenceSession(model.SerializeToString()), bw.compile(graph)
    for factor in (0.1, 1, 6):
        q, k, v = (rng.normal(size=(1, 3, keys, 32)).astype(np.float32) for _ in range(3))
        sizes = np.exp2(rng.uniform(-12, 2, size=(1, 3, keys, 1))).astype(np.float32)
        feeds = {"q": q * np.float32(factor), "k": k, "v": v * sizes + np.float32(0.3)}
        np.testing.assert_array_equal(exe.run(feeds)["y"], session.run(None, feeds)[0])
    for values in (np.zeros_like(v), np.ones_like(v), np.float32(1e34) * (v + 1)):
        (theirs,) = session.run(None, {**feeds, "v": values})
        assert np.isfinite(theirs).all()
        np.testing.assert_array_equal(exe.run({**feeds, "v": values})["y"], theirs)


def test_calls_of_other_shapes_share_the_function():
    b = Builder("two")
    x, z = b.input("x", "f32[1, 2, 8, 4]"), b.input("z", "f32[3, 2, 5, 4]")
    both = [b.attention(value, value, value, int8=True) for value in (x, z)]
    model = export_onnx(b.build(*both), consumer="onnxruntime")
    assert len(model.functions) == 1


def test_attention_with_a_cache_is_decomposed():
    b = Builder("cache")
    q, past = b.input("q", "f32[1, 2, 8, 4]"), b.input("past", "f32[1, 2, 5, 4]")
    graph = b.build(y=b.attention(q, q, q, None, past, past, causal=True, int8=True))
    rng = np.random.default_rng(1)
    feeds = {"q": rng.normal(size=(1, 2, 8, 4)), "past": rng.normal(size=(1, 2, 5, 4))}
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    model = export_onnx(graph, consumer="onnxruntime")
    assert not model.functions
    (found,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    np.testing.assert_allclose(found, run(graph, feeds)["y"], atol=0.02)
