"""Convolutions and matmuls against the interpreter: geometry, epilogues, targets, threads."""

import re
from dataclasses import replace

import numpy as np
import pytest
from emitted import instructions
from run_kernel import TARGETS, THREADS, Run

from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.codegen.emit import Module
from bitwright.backends.cpu.kernels.conv.conv import Conv, emit_conv
from bitwright.backends.cpu.kernels.matmul.matmul import UNROLL, best_tile
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.passes.manager import run_passes
from bitwright.passes.simplify.separate_bias import separate_bias
from bitwright.target import host, named

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def check(graph, feeds, target="host", threads=1):
    fused = run_passes(graph, [separate_bias, fuse_regions])
    done = Run(fused, feeds, named(target), threads, host=False)
    for name, expected in run(graph, feeds).items():
        scale = np.abs(expected).max(initial=1e-30)
        np.testing.assert_allclose(done.outputs[name], expected, rtol=1e-5, atol=2e-5 * scale)


def convolution(x, w, bias=None, **attrs):
    b = Builder("conv")
    image = b.input("x", f"f32[n, {', '.join(map(str, x.shape[1:]))}]")
    y = b.conv(image, b.constant(w), None if bias is None else b.constant(bias), **attrs)
    return b, y, {"x": x}


GEOMETRY = [
    ((1, 3, 7, 9), (5, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 4, 8, 8), (17, 4, 1, 1), {}),
    ((1, 16, 5, 5), (33, 16, 1, 1), {"strides": [2, 2]}),
    ((1, 2, 9, 12), (3, 2, 3, 2), {"strides": [2, 3], "pads": [0, 1, 2, 0]}),
    ((1, 5, 11, 9), (4, 5, 3, 3), {"dilations": [2, 2], "pads": [2, 2, 2, 2]}),
    ((1, 1, 6, 6), (2, 1, 5, 5), {"pads": [2, 2, 2, 2]}),
    ((3, 6, 5), (4, 6, 3), {"pads": [1, 1]}),
    ((1, 8, 6, 6), (12, 2, 3, 3), {"groups": 4, "pads": [1, 1, 1, 1]}),
    ((1, 7, 6, 5), (7, 1, 3, 3), {"groups": 7, "pads": [1, 1, 1, 1]}),
    ((2, 33, 9, 9), (33, 1, 3, 3), {"groups": 33, "strides": [2, 2], "pads": [0, 1, 1, 0]}),
    ((1, 16, 8, 8), (16, 1, 5, 5), {"groups": 16, "dilations": [2, 1], "pads": [4, 2, 4, 2]}),
    ((1, 18, 12), (18, 1, 4), {"groups": 18, "pads": [2, 1]}),
    ((1, 4, 1, 1), (4, 1, 3, 3), {"groups": 4, "pads": [1, 1, 1, 1]}),
    ((2, 16, 9, 30), (16, 1, 3, 3), {"groups": 16, "pads": [1, 1, 1, 1]}),
    ((1, 19, 7, 24), (19, 1, 5, 5), {"groups": 19, "strides": [1, 2], "pads": [2, 2, 2, 2]}),
    ((2, 5, 90), (5, 1, 33), {"groups": 5, "pads": [16, 3]}),
    ((1, 20, 3, 40), (20, 1, 2, 64), {"groups": 20, "strides": [1, 2], "pads": [1, 32, 0, 40]}),
    ((1, 17, 150), (17, 1, 70), {"groups": 17, "dilations": [2], "pads": [9, 9]}),
    ((3, 32, 4, 28), (32, 1, 3, 2), {"groups": 32, "strides": [2, 3], "dilations": [1, 3]}),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape, filter_shape, attrs", GEOMETRY)
def test_geometry(shape, filter_shape, attrs, target):
    b, y, feeds = convolution(
        normal(*shape), normal(*filter_shape), normal(filter_shape[0]), **attrs
    )
    check(b.build(y=y), feeds, target)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("groups", [1, 24])
def test_epilogues_and_threads(threads, groups):
    x, w = normal(2, 24, 9, 7), normal(24, 24 // groups, 3, 3)
    b, y, feeds = convolution(x, w, normal(24), groups=groups, pads=[1, 1, 1, 1])
    gate = b.input("gate", "f32[n, 24, 1, 1]")
    skip = b.input("skip", "f32[n, 24, 9, 7]")
    y = b.relu(b.add(b.mul(y, gate), skip))
    feeds |= {"gate": normal(2, 24, 1, 1), "skip": normal(2, 24, 9, 7)}
    check(b.build(y=y), feeds, threads=threads)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_depthwise_image_larger_than_the_cache(threads):
    """Bands of lines, several images, and thread boundaries within a line."""
    x, w = normal(3, 16, 11, 27), normal(16, 1, 3, 3)
    b, y, feeds = convolution(x, w, groups=16, pads=[1, 1, 1, 1])
    graph = run_passes(b.build(y=b.gelu(y)), [fuse_regions])
    target = replace(host(), l2_bytes=2 * 4 * 16 * 27 * 4)
    found = Run(graph, feeds, target, threads).outputs["y"]
    np.testing.assert_allclose(found, run(graph, feeds)["y"], rtol=1e-5, atol=1e-5)


def test_a_chain_stays_channels_last():
    """Only the input and the output are copied."""
    b, y, feeds = convolution(normal(1, 3, 8, 8), normal(8, 3, 3, 3))
    for _ in range(3):
        y = b.relu(b.conv(y, b.constant(normal(8, 8, 1, 1))))
    graph = run_passes(b.build(y=y), [separate_bias, fuse_regions])
    done = Run(graph, feeds)
    kinds = [step.kernel.rsplit("_", 1)[0] for step in done.schedule.steps]
    assert kinds.count("conv_f32") == 4 and len(kinds) <= 6
    check(b.build(again=y), feeds)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [0, 1, 7, 9, 16, 17, 33, 127])
def test_products_of_any_height(rows, target):
    b = Builder("product")
    x = b.input("x", "f32[n, 37]")
    y = b.gelu(b.add(b.matmul(x, b.constant(normal(37, 50))), b.constant(normal(50))))
    check(b.build(y=y), {"x": normal(rows, 37)}, target)


@pytest.mark.parametrize("depth, columns", [(1, 1), (3, 47), (4, 48), (5, 49), (64, 96), (127, 7)])
@pytest.mark.parametrize("threads", THREADS)
def test_products_of_any_depth_and_width(depth, columns, threads):
    b = Builder("product")
    x = b.input("x", f"f32[2, n, {depth}]")
    check(
        b.build(y=b.matmul(x, b.constant(normal(depth, columns)))),
        {"x": normal(2, 11, depth)},
        threads=threads,
    )


def test_nan_propagates_but_not_through_padding():
    x = normal(1, 2, 5, 5)
    x[0, 0, 2, 2] = np.nan
    x[0, 1, 0, 0] = np.inf
    b, y, feeds = convolution(x, np.abs(normal(3, 2, 3, 3)) + 0.1, pads=[1, 1, 1, 1])
    graph = b.build(y=y)
    found = Run(run_passes(graph, [fuse_regions]), feeds).outputs["y"]
    expected = run(graph, feeds)["y"]
    assert (np.isnan(found) == np.isnan(expected)).all()
    assert (np.isinf(found) == np.isinf(expected)).all()


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 80])
def test_sums_of_a_tile_stay_in_registers(columns):
    """The inner loop has no register spills."""
    machine = named("avx512")
    module = Module(machine)
    emit_conv(module, "kernel", Conv(best_tile(machine, columns), is_flat=True))
    blocks = re.split(r"^\.L.*:", jit.assembly(module.text(), machine), flags=re.MULTILINE)
    least = UNROLL * machine.vector_registers // 3
    loops = [block for block in blocks if block.count("vfmadd") >= least]
    assert loops and not any(re.search(r"zmm\d+, .*\(%rsp\)", block) for block in loops)


@pytest.mark.parametrize("target", ["aarch64", "riscv64", "wasm32"])
def test_other_architectures(target):
    module = Module(named(target))
    emit_conv(module, "kernel", Conv(best_tile(module.target, 64), is_flat=True))
    assert instructions(module)


NARROW = {
    "depthwise": ((1, 18, 9, 11), (18, 1, 3, 3), {"groups": 18, "pads": [1, 1, 1, 1]}),
    "dense": ((1, 5, 7, 9), (17, 5, 2, 3), {"strides": [2, 1]}),
    "winograd": ((1, 32, 16, 16), (32, 32, 3, 3), {"pads": [1, 1, 1, 1]}),
    "line": ((2, 6, 15), (9, 6, 3), {"pads": [1, 1]}),
    "matmul": ((11, 37), (37, 41), {}),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("to", ["u8", "i8", "bool", "f16", "i64"])
@pytest.mark.parametrize("shapes", NARROW.values(), ids=NARROW)
def test_epilogues_store_results_of_other_types(shapes, to, target):
    shape, filter_shape, attrs = shapes
    if len(shape) == 2:
        b, feeds = Builder("rows"), {"x": normal(*shape)}
        y = b.matmul(b.input("x", "f32[m, 37]"), b.constant(normal(*filter_shape)))
    else:
        b, y, feeds = convolution(normal(*shape), normal(*filter_shape), **attrs)
    if to in ("u8", "i8"):
        y = b.requantize(b.mul(y, np.float32(7)), b.constant(np.array(5), to), to=to)
    else:
        y = b.gt(y, np.float32(0)) if to == "bool" else b.cast(y, to=to)
    graph = b.build(y=y)
    fused = run_passes(graph, [separate_bias, fuse_regions])
    done = Run(fused, feeds, named(target), 2, host=False)
    assert not any(name.startswith("batched_matmul") for name in done.kernels)
    expected = run(graph, feeds)["y"]
    off = np.abs(done.outputs["y"].astype(np.float64) - expected.astype(np.float64))
    assert off.max() <= (0.07 if to == "f16" else 1)  # a sum that rounds to the other neighbour
    assert (off > 0).mean() < 0.01


def test_sums_of_images_with_dynamic_sizes_stay_channels_last():
    """Either operand may be broadcast; both keep their layout."""
    b = Builder("pyramid")
    w = b.constant(normal(16, 4, 1, 1))
    first = b.conv(b.input("x", "f32[1, 4, h, w]"), w)
    second = b.conv(b.input("z", "f32[1, 4, p, q]"), w)
    total = b.relu(b.add(first, second))
    graph = run_passes(b.build(b.conv(total, b.constant(normal(8, 16, 1, 1)))), [fuse_regions])
    for sizes in ((5, 6), (1, 6), (1, 1)):
        feeds = {"x": normal(1, 4, 5, 6), "z": normal(1, 4, *sizes)}
        done = Run(graph, feeds, host())
        steps = [step.kernel for step in done.schedule.steps]
        assert sum(name.startswith(("transpose", "copy")) for name in steps) <= 3, steps
        (expected,) = run(graph, feeds).values()
        (found,) = done.outputs.values()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
