"""A decoder's step on the GPU: rotations and cache writes, kernels that start early, timing."""

import numpy as np
import pytest
from on_gpu import check_graph

import bitwright as bw
from bitwright.backends.gpu.codegen.source import WAIT, Config, KernelSource
from bitwright.errors import RunError
from bitwright.ir.dtype import f32


def cached(rotary_dim=0, interleaved=False, has_ids=True, element="f32", features=16, read=False):
    """A new key, rotated and written into a cache."""
    b = bw.Builder("cached")
    new = b.input("new", f"{element}[2, 3, 4, {features}]")
    past, at = b.input("past", f"{element}[2, 3, 9, {features}]"), b.input("at", "i64[2]")
    half = (rotary_dim or features) // 2
    if has_ids:
        tables = [b.input(name, f"{element}[20, {half}]") for name in ("cos", "sin")]
        tables.append(b.input("ids", "i64[2, 4]"))
    else:
        tables = [b.input(name, f"{element}[2, 4, {half}]") for name in ("cos", "sin")]
    turned = b.rotary(new, *tables, rotary_dim=rotary_dim, interleaved=interleaved)
    results = {"turned": turned} if read else {}
    return b.build(y=b.tensor_scatter(past, turned, at, axis=2), **results)


def feeds_of(graph):
    rng = np.random.default_rng(3)
    found = {}
    for value in graph.inputs:
        if value.dtype.is_integer:
            found[value.name] = rng.integers(0, 5, value.shape)
        else:
            found[value.name] = rng.standard_normal(value.shape).astype(value.dtype.numpy)
    return found


def families(exe):
    return [step.family for step in exe.engine.schedule.steps]


@pytest.mark.parametrize("options", [
    {}, {"interleaved": True}, {"rotary_dim": 8}, {"has_ids": False},
    {"rotary_dim": 6, "interleaved": True, "element": "bf16", "has_ids": False},
    {"element": "f16", "features": 24},
], ids=str)  # fmt: skip
def test_a_rotated_key_goes_into_the_cache_in_one_kernel(options):
    graph = cached(**options)
    tolerance = 1e-6 if options.get("element", "f32") == "f32" else 2e-2
    exe = check_graph(graph, feeds_of(graph), rtol=tolerance, atol=tolerance)
    assert not any("rotary" in name for name in families(exe))
    assert any("rotated" in name for name in families(exe))


def test_a_rotated_key_that_is_read_elsewhere_has_a_kernel():
    graph = cached(read=True)
    exe = check_graph(graph, feeds_of(graph), rtol=1e-6, atol=1e-6)
    assert any("rotary" in name for name in families(exe))


def test_positions_outside_the_table_are_named():
    graph = cached()
    feeds = feeds_of(graph)
    exe = bw.compile(graph, target="cuda")
    feeds["ids"][1, 2] = 20
    with pytest.raises(RunError, match="index 20 is outside"):
        exe.run(feeds)
    feeds["ids"][1, 2] = 19
    exe.run(feeds)


def copying(body):
    return KernelSource("copy", body, {"x": f32, "y": f32}, ("n",), (Config({}),), lambda _: (1,))


def test_a_kernel_that_starts_early_waits_before_it_reads():
    text = copying("tl.store(y, tl.load(x))").module(native=True, chained=True)
    text = text.split("def kernel(")[1]
    assert text.index("gdc_launch") < text.index("gdc_wait") < text.index("tl.load")
    later = copying(f"v = tl.load(x)\n{WAIT}\ntl.store(y, v)")
    assert "gdc" not in later.module(native=True)
    text = later.module(native=True, chained=True).split("def kernel(")[1]
    assert text.index("gdc_launch") < text.index("tl.load") < text.index("gdc_wait")
    assert text.count("gdc_wait") == 1


def test_bench_takes_a_target():
    b = bw.Builder("small")
    graph = b.build(y=b.relu(b.input("x", "f32[3, 5]")))
    (row,) = bw.bench(graph, against=(), rounds=1, threads=[1], target="cuda").rows
    assert not row.error and row.milliseconds > 0
