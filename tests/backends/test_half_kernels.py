"""Half-precision matmuls, convolutions and attention: results and emitted instructions."""

import re
from dataclasses import replace

import numpy as np
import pytest
from run_kernel import TARGETS, THREADS, Run, assert_same, lower
from stand_ins import SlowTiles, StandIn, dot_u8s8_stand_in, wide_vectors

from bitwright import system
from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.codegen.emit import i32
from bitwright.backends.cpu.codegen.instr import dot_bf16, dot_u8s8
from bitwright.backends.cpu.kernels.matmul import filters
from bitwright.backends.cpu.kernels.matmul import lower_int8 as integer
from bitwright.backends.cpu.kernels.matmul.dot import amx as tiles
from bitwright.backends.cpu.kernels.matmul.dot import half_dot as halves
from bitwright.backends.cpu.kernels.matmul.upcast_product import (
    BUFFER_FLOATS,
    choose_upcast,
    tiles_in_buffer,
)
from bitwright.ir.dtype import dtype
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.passes.manager import run_passes
from bitwright.passes.simplify.separate_bias import separate_bias
from bitwright.target import host, named

rng = np.random.default_rng(0)
HALVES = ["bf16", "f16"]
LAST_PLACE = {"bf16": 2.0**-8, "f16": 2.0**-11}
SIZES = [(1, 1, 1), (7, 17, 33), (16, 127, 16), (13, 300, 49), (33, 513, 97), (0, 5, 7)]


def draw(half, *shape):
    return rng.normal(size=shape).astype(dtype(half).numpy)


def check(graph, feeds, half, target=None, threads=1):
    """Compares within three roundings: the interpreter rounds after each op, a kernel once."""
    fused = run_passes(graph, [separate_bias, fuse_regions])
    done = Run(fused, feeds, target or host(), threads)
    for name, expected in run(graph, feeds).items():
        found = done.outputs[name]
        assert found.dtype == expected.dtype
        wide = expected.astype(np.float64)
        tolerance = LAST_PLACE[half] * np.abs(wide).max(initial=0.1)  # terms may cancel
        assert np.abs(found.astype(np.float64) - wide).max(initial=0) <= 3 * tolerance


def product(half, rows, depth, columns):
    b = Builder("product")
    x = b.input("x", f"{half}[rows, {depth}]")
    y = b.matmul(x, b.constant(draw(half, depth, columns)))
    y = b.relu(b.add(y, b.constant(draw(half, columns))))
    return b.build(y=y), {"x": draw(half, rows, depth)}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_with_constant_weights(half, target, size):
    graph, feeds = product(half, *size)
    check(graph, feeds, half, named(target), threads=THREADS[size[0] % len(THREADS)])


@pytest.mark.parametrize("half", HALVES)
def test_products_are_the_same_for_every_number_of_threads(half):
    graph, feeds = product(half, 50, 600, 70)
    fused = run_passes(graph, [fuse_regions])
    found = [Run(fused, feeds, host(), threads).outputs["y"].tobytes() for threads in THREADS]
    assert len(set(found)) == 1


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", [(200, 600, 70), (150, 40, 30), (23, 96, 200)], ids=str)
def test_rows_and_panels_are_converted_once_for_many_tiles(half, target, size):
    """Several blocks of rows, one block that all threads share, and too few rows."""
    graph, feeds = product(half, *size)
    check(graph, feeds, half, named(target), threads=3)


def test_blocks_of_many_rows_fit_their_buffer():
    for columns in (1, 48, 384):
        for depth in (1, 64, 600, 2000):
            choice = choose_upcast(host(), halves.UpcastDot(dtype("f16")), depth, columns, None)
            if choice is not None:
                rows = tiles_in_buffer(choice[1], depth) * choice[1].rows
                assert rows >= 12 * choice[1].rows
                assert depth * (rows + choice[1].columns) <= BUFFER_FLOATS
    assert choose_upcast(host(), halves.UpcastDot(dtype("f16")), 64, 48, 1) is None


GEOMETRY = [
    ((1, 3, 7, 9), (5, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 5, 8, 8), (17, 5, 1, 1), {}),
    ((1, 16, 12, 12), (16, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((1, 5, 11, 9), (4, 5, 3, 3), {"dilations": [2, 2], "strides": [2, 1]}),
    ((3, 6, 5), (4, 6, 3), {"pads": [1, 1]}),
    ((1, 8, 6, 6), (12, 2, 3, 3), {"groups": 4, "pads": [1, 1, 1, 1]}),
    ((2, 33, 9, 9), (33, 1, 3, 3), {"groups": 33, "strides": [2, 2], "pads": [0, 1, 1, 0]}),
]


def convolution(half, x, w, attrs):
    b = Builder("conv")
    image = b.input("x", f"{half}[n, {', '.join(map(str, x[1:]))}]")
    y = b.conv(image, b.constant(draw(half, *w)), b.constant(draw(half, w[0])), **attrs)
    return b.build(y=b.relu(y)), {"x": draw(half, *x)}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("target", TARGETS[:2])
@pytest.mark.parametrize("case", GEOMETRY, ids=str)
def test_convolutions(half, target, case):
    graph, feeds = convolution(half, *case)
    check(graph, feeds, half, named(target), threads=2)


@pytest.mark.parametrize("half", HALVES)
def test_transposed_convolutions(half):
    b = Builder("up")
    x = b.input("x", f"{half}[1, 5, 4, 6]")
    y = b.conv_transpose(x, b.constant(draw(half, 5, 7, 3, 3)), strides=[2, 2])
    check(b.build(y=y), {"x": draw(half, 1, 5, 4, 6)}, half)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("queries", [1, 9, 40])
def test_half_precision_attention(half, queries):
    b = Builder("attention")
    shape = f"{half}[2, 3, {queries}, 24]"
    q, k, v = (b.input(name, shape) for name in "qkv")
    graph = b.build(y=b.attention(q, k, v))
    feeds = {name: draw(half, 2, 3, queries, 24) for name in "qkv"}
    check(graph, feeds, half)


ROWS = {
    "softmax": {"axis": -1},
    "log_softmax": {"axis": -1},
    "layer_norm": {},
    "rms_norm": {},
    "reduce_sum": {"axes": [1], "keepdims": True},
    "reduce_mean": {"axes": [1], "keepdims": True},
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("op", ROWS)
def test_rows_are_summed_in_f32(half, op):
    """4,096 equal terms: a half-precision sum would stop growing after 256 (2,048) of them."""
    b = Builder("rows")
    x = b.input("x", f"{half}[3, 4096]")
    more = [b.constant(np.ones(4096, dtype(half).numpy))] if op.endswith("_norm") else []
    graph = b.build(y=b.op(op, x, *more, **ROWS[op]))
    check(graph, {"x": (1 + draw(half, 3, 4096) * 0.01).astype(dtype(half).numpy)}, half)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matmuls_by_vdpbf16ps(size, monkeypatch):
    monkeypatch.setattr(halves, "dot_bf16", lambda target: StandIn())
    graph, feeds = product("bf16", *size)
    check(graph, feeds, "bf16", threads=2)


@pytest.mark.parametrize("case", GEOMETRY[:6], ids=str)
def test_convolutions_by_vdpbf16ps(case, monkeypatch):
    monkeypatch.setattr(halves, "dot_bf16", lambda target: StandIn())
    graph, feeds = convolution("bf16", *case)
    check(graph, feeds, "bf16", threads=2)


def inner_loop(graph, target):
    """The assembly of a graph's matmuls and convolutions."""
    ctx = lower(run_passes(graph, [separate_bias, fuse_regions]), target)
    texts = [ctx.text(k) for k in ctx.kernels.values() if re.match("matmul|conv", k.name)]
    return "\n".join(jit.assembly(text, target) for text in texts)


@pytest.mark.parametrize(
    "graph",
    [product("bf16", 64, 256, 96)[0], convolution("bf16", *GEOMETRY[2])[0]],
    ids=["matmul", "conv"],
)
def test_the_dot_product_instruction_is_emitted(graph):
    target = named("avx512bf16")
    assert dot_bf16(target) is not None
    text = inner_loop(graph, target)
    assert len(re.findall("vdpbf16ps", text)) > 24
    assert re.search(r"vbroadcastss\s+\S*\(%r", text), "rows are broadcast as they are loaded"
    assert "vcvtneps2bf16" in text
    assert "vdpbf16ps" not in inner_loop(graph, named("avx512vnni"))


def test_the_dot_product_instruction_is_not_used_where_it_is_slow():
    quick = named("avx512bf16")
    slow = replace(quick, cpu="sapphirerapids")
    assert isinstance(halves.choose_half_dot(quick, dtype("bf16"), 8), halves.Bf16Dot2)
    assert isinstance(halves.choose_half_dot(slow, dtype("bf16"), 8), halves.UpcastDot)


def test_packed_weights_stay_in_half_precision():
    weight = draw("bf16", 64, 96)[None]
    for target in ("avx512bf16", "avx512", "avx2"):
        dot = halves.choose_half_dot(named(target), dtype("bf16"), 64)
        tile = halves.half_tiles(named(target), 96, dot)[0]
        packed = halves.pack_half(weight, tile, dot)
        assert packed.dtype == weight.dtype
        assert sorted(packed.reshape(-1).tolist()) == sorted(weight.reshape(-1).tolist())


@wide_vectors
@pytest.mark.parametrize("size", [(33, 65, 33), (70, 96, 20)], ids=str)
def test_matmuls_in_amx_tiles(size, monkeypatch):
    monkeypatch.setattr(
        filters, "amx_bf16_dot", lambda target: tiles.AmxBf16Dot(SlowTiles(StandIn()))
    )
    graph, feeds = product("bf16", *size)
    check(graph, feeds, "bf16", threads=2)


@wide_vectors
@pytest.mark.parametrize("case", [GEOMETRY[1], GEOMETRY[3]], ids=str)
def test_convolutions_in_amx_tiles(case, monkeypatch):
    monkeypatch.setattr(
        filters, "amx_bf16_dot", lambda target: tiles.AmxBf16Dot(SlowTiles(StandIn()))
    )
    graph, feeds = convolution("bf16", *case)
    check(graph, feeds, "bf16", threads=2)


@pytest.fixture
def split(monkeypatch):
    monkeypatch.setattr(filters, "MANY_COLUMNS", 1)
    monkeypatch.setattr(filters, "MANY_ROWS", 1)
    monkeypatch.setattr(
        filters, "amx_split_f16_dot", lambda target: tiles.AmxSplitF16Dot(SlowTiles(StandIn()))
    )


@wide_vectors
@pytest.mark.parametrize("size", [(33, 65, 33), (70, 96, 20), (200, 600, 70)], ids=str)
def test_f16_matmuls_in_amx_tiles(size, split):
    """The last size takes several blocks of rows."""
    graph, feeds = product("f16", *size)
    check(graph, feeds, "f16", threads=3)


@wide_vectors
def test_f16_in_amx_tiles_is_as_precise_as_in_f32(split):
    """Values of all magnitudes: the error is K · 2^-24 of Σ |x w|, and the omitted low · low."""
    x = (draw("f16", 32, 300) * 2.0 ** rng.integers(-20, 12, (32, 300))).astype(np.float16)
    w = (draw("f16", 300, 33) * 2.0 ** rng.integers(-20, 2, (300, 33))).astype(np.float16)
    b = Builder("wide")
    y = b.cast(b.matmul(b.input("x", "f16[32, 300]"), b.constant(w)), to="f32")
    graph = run_passes(b.build(y=y), [fuse_regions])
    found = Run(graph, {"x": x}, host(), 2).outputs["y"]
    exact, size = (
        x.astype(float) @ w.astype(float),
        np.abs(x.astype(float)) @ np.abs(w.astype(float)),
    )
    assert (np.abs(found - exact) <= (300 * 2.0**-24 + 2.0**-16) * size).all()


@wide_vectors
def test_f16_in_amx_tiles_propagates_inf_and_nan(split):
    graph, feeds = product("f16", 20, 40, 40)
    feeds["x"][3, 7], feeds["x"][5, 1], feeds["x"][7, 2] = np.inf, -np.inf, np.nan
    fused = run_passes(graph, [fuse_regions])
    found = Run(fused, feeds, host(), 1).outputs["y"].astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(run(graph, feeds)["y"]))
    np.testing.assert_array_equal(found[3:8:2], run(graph, feeds)["y"][3:8:2].astype(np.float64))


def test_amx_is_not_used_where_it_is_slow():
    target, finite = named("amx"), np.ones((4, 128), np.float16)

    def dot_type(half, *how):
        return type(filters.filter_of(target, dtype(half), *how).dot(target, 4))

    assert dot_type("f16", finite, 32) is dot_type("f16", finite) is tiles.AmxSplitF16Dot
    assert dot_type("f16", finite, 1) is dot_type("f16", finite * np.inf, 32) is halves.UpcastDot
    assert dot_type("f16", finite[:, :64], 32) is dot_type("f16") is halves.UpcastDot
    assert dot_type("bf16", finite, 16) is dot_type("bf16") is tiles.AmxBf16Dot
    assert dot_type("bf16", finite, 1) is halves.Bf16Dot2


@pytest.mark.parametrize(
    "graph",
    [
        product("bf16", 64, 256, 96)[0],
        convolution("bf16", *GEOMETRY[2])[0],
        product("f16", 64, 256, 130)[0],
    ],
    ids=["matmul", "conv", "f16"],
)
def test_amx_instructions_are_emitted(graph):
    text = inner_loop(graph, named("amx"))
    assert len(re.findall("tdpbf16ps", text)) >= 8
    assert "ldtilecfg" in text and "tilestored" in text


@pytest.fixture
def emulated_int8_tiles(monkeypatch):
    if dot_u8s8(host()) is None:
        pytest.skip("this machine has no int8 dot product")
    emulated = SlowTiles(dot_u8s8_stand_in, i32)
    monkeypatch.setattr(
        integer,
        "amx_int8_dot",
        lambda target, signed, offset: tiles.AmxInt8Dot(signed, False, 0, offset, emulated),
    )
    monkeypatch.setattr(integer.Int8Filter, "amx_is_faster", lambda *_: True)


INT8 = [
    ((1, 32, 20, 33), (40, 32, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 64, 9, 16), (33, 64, 1, 1), {"strides": [2, 1]}),
    ((1, 16, 12, 48), (20, 16, 3, 3), {"dilations": [1, 2]}),
    ((1, 3, 17, 40), (16, 3, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
]


def int8_convolution(kind, x, w, attrs):
    b = Builder("int8")
    image = b.input("x", f"{kind}[{', '.join(map(str, x))}]")
    filters = b.constant(rng.integers(-128, 128, w, dtype=np.int8))
    zero = b.constant(np.asarray(3, dtype(kind).numpy))
    bias = b.constant(rng.integers(-999, 999, w[0], dtype=np.int32))
    info = np.iinfo(dtype(kind).numpy)
    feeds = {"x": rng.integers(info.min, info.max, x, dtype=dtype(kind).numpy, endpoint=True)}
    return b.build(y=b.integer_conv(image, filters, zero, None, bias, **attrs)), feeds


@wide_vectors
@pytest.mark.parametrize("case", INT8, ids=str)
def test_int8_convolutions_in_amx_tiles(case, emulated_int8_tiles):
    graph, feeds = int8_convolution("u8", *case)
    done = Run(graph, feeds, host(), 2)
    np.testing.assert_array_equal(done.outputs["y"], run(graph, feeds)["y"])


@pytest.mark.parametrize(("kind", "name"), [("u8", "tdpbusd"), ("i8", "tdpbssd")])
def test_int8_convolutions_use_amx_where_blocks_are_filled(kind, name):
    wide = (1, 64, 20, 33), (64, 64, 3, 3), {}
    assert name in inner_loop(int8_convolution(kind, *wide)[0], named("amx"))
    assert "vpdpbusd" in inner_loop(int8_convolution(kind, *INT8[3])[0], named("amx"))


@pytest.mark.skipif(not host().has("amx-int8"), reason="this machine has no AMX")
@pytest.mark.parametrize("kind", ["u8", "i8"])
@pytest.mark.parametrize("case", INT8, ids=str)
def test_int8_convolutions_with_amx_on_this_machine(kind, case, monkeypatch):
    monkeypatch.setattr(integer.Int8Filter, "amx_is_faster", lambda *_: True)
    graph, feeds = int8_convolution(kind, *case)
    done = Run(graph, feeds, host(), 3)
    np.testing.assert_array_equal(done.outputs["y"], run(graph, feeds)["y"])


@wide_vectors
def test_int8_matmuls_in_amx_tiles(emulated_int8_tiles):
    graph, qvalues = int8_product("u8")
    done = Run(graph, {"x": qvalues}, host(), 2)
    np.testing.assert_array_equal(done.outputs["y"], run(graph, {"x": qvalues})["y"])


def int8_product(kind):
    info = np.iinfo(dtype(kind).numpy)
    b = Builder("int8")
    x, w = b.input("x", f"{kind}[37, 70]"), rng.integers(-128, 128, (70, 40), dtype=np.int8)
    zero = b.constant(np.asarray(3, dtype(kind).numpy))
    bias = b.constant(rng.integers(-999, 999, 40, dtype=np.int32))
    graph = b.build(y=b.integer_matmul(x, b.constant(w), zero, None, bias))
    qvalues = rng.integers(info.min, info.max, (37, 70), dtype=dtype(kind).numpy, endpoint=True)
    return graph, qvalues


@pytest.mark.parametrize(("kind", "name"), [("u8", "tdpbusd"), ("i8", "tdpbssd")])
def test_int8_amx_instructions_are_emitted(kind, name):
    assert name in inner_loop(int8_product(kind)[0], named("amx"))


@pytest.mark.skipif(not host().has("amx-bf16"), reason="this machine has no AMX")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_amx_on_this_machine(size, half):
    graph, feeds = product(half, *size)
    assert filters.filter_of(host(), dtype("bf16")).dot(host(), 4).tiles is not None
    check(graph, feeds, half, threads=2)


def test_amx_is_used_only_where_the_system_permits_it():
    assert system.allow_tiles() in (True, False)
    assert not (host().has("amx-tile") and not system.allow_tiles())


def elementwise(build):
    b = Builder("elementwise")
    x, y = (b.input(name, "f16[n, 70]") for name in "xy")
    return run_passes(b.build(y=build(b, x, y)), [fuse_regions])


ONCE_ROUNDED = [
    lambda b, x, y: b.relu(b.add(x, y)),
    lambda b, x, y: b.minimum(b.mul(b.neg(x), b.abs(y)), b.constant(np.float16(6))),
    lambda b, x, y: b.maximum(b.div(x, y), x),
    lambda b, x, y: b.sub(x, y),
]
TWICE_ROUNDED = [lambda b, x, y: b.mul(b.add(x, y), x), lambda b, x, y: b.tanh(b.add(x, y))]


def assembly(graph, target):
    ctx = lower(graph, named(target))
    texts = [ctx.text(kernel) for kernel in ctx.kernels.values()]
    return "\n".join(jit.assembly(text, named(target)) for text in texts)


def test_f16_arithmetic_is_emitted_where_it_rounds_once():
    for build, name in zip(ONCE_ROUNDED, ("vaddph", "vmulph", "vdivph", "vsubph"), strict=True):
        text = assembly(elementwise(build), "avx512fp16")
        assert name in text and "vcvtph2psx" not in text
        assert name not in assembly(elementwise(build), "avx512bf16")
    for build in TWICE_ROUNDED:
        text = assembly(elementwise(build), "avx512fp16")
        assert "vcvtph2psx" in text and not re.search("v(add|mul)ph", text)
    assert re.search(r"fadd\s+v\d+\.8h", assembly(elementwise(ONCE_ROUNDED[0]), "aarch64"))


def test_f16_matmuls_convert_by_the_avx512fp16_instruction():
    assert "vcvtph2psx" in inner_loop(product("f16", 4, 64, 96)[0], named("avx512fp16"))


@pytest.mark.parametrize("build", [*ONCE_ROUNDED, *TWICE_ROUNDED])
def test_f16_arithmetic_gives_the_same_bits_as_f32_rounded_once(build):
    """Compares f16 arithmetic where the machine has it; elsewhere both sides convert to f32."""
    x, y = (rng.integers(0, 2**16, (64, 70), dtype=np.uint16).view(np.float16) for _ in "xy")
    graph, feeds = elementwise(build), {"x": x, "y": y}
    features = host().features - {"avx512fp16", "fullfp16"}
    enabled = [
        w for w in host().llvm_features.split(",") if w[1:] not in ("avx512fp16", "fullfp16")
    ]
    off = ["-avx512fp16"] if host().is_x86 else ["-fullfp16"]
    plain = replace(host(), features=features, llvm_features=",".join([*enabled, *off]))
    assert_same(Run(graph, feeds, host()).outputs["y"], Run(graph, feeds, plain).outputs["y"])
