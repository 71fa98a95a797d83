"""Products, convolutions, norms and attention read nothing outside their operands, which are placed
between protected pages. Kernels run in a forked process, whose exit status shows a violation."""

import ctypes
import mmap
import os
import sys

import ml_dtypes
import numpy as np
import pytest
from run_kernel import RUBBISH, TARGETS, Guarded, Run, lower

from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite import Trace
from bitwright.target import named

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs fork and mprotect"
)
ROWS = [*range(1, 15), 23, 24, 25, 33]


class Fenced(Guarded):
    """Every buffer ends at the end of a page, up to its alignment; inputs have the alignment of
    their elements."""

    def allocate(self, nbytes, align=64):
        page = mmap.PAGESIZE
        pages = -(-max(nbytes, 1) // page)
        room = np.frombuffer(mmap.mmap(-1, (pages + 2) * page), np.uint8)
        protect = ctypes.CDLL(None).mprotect
        for fence in (0, (pages + 1) * page):
            assert protect(ctypes.c_void_p(room.ctypes.data + fence), page, 0) == 0
        inner = room[page : (pages + 1) * page]
        inner[:] = RUBBISH
        start = (pages * page - nbytes) // align * align
        self.rooms.append((inner, start, start + nbytes))
        return inner[start : start + nbytes]

    def enter(self, buffer, array):
        made = self.allocate(array.nbytes, array.dtype.itemsize)
        made[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.give(buffer, made)


def check(graph, target, all_feeds, threads=(1, 3)):
    """Run the compiled kernels in a separate process."""
    ctx = lower(graph, named(target))
    expected = [Run(graph, feeds, named(target), 1, ctx=ctx).outputs for feeds in all_feeds]
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, "a kernel reads outside, or gives other results"
        return
    end = 1
    try:
        for feeds, wanted in zip(all_feeds, expected, strict=True):
            for count in threads:
                found = Run(graph, feeds, named(target), count, ctx=ctx, memory=Fenced).outputs
                assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)
        end = 0
    finally:
        os._exit(end)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns, depth", [(17, 9), (48, 1), (33, 5)])
@pytest.mark.parametrize("kind", ["f32", "bf16", "u8"])
@pytest.mark.parametrize("is_light", [True, False])
def test_products_of_few_rows(target, columns, depth, kind, is_light):
    rng = np.random.default_rng(columns)
    element = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "u8": np.uint8}[kind]
    b = Builder("product")
    x = b.input("x", f"{kind}[n, {depth}]")
    w = rng.integers(-9, 9, (depth, columns))
    if kind == "u8":
        y = b.integer_matmul(x, b.constant(w.astype(np.int8)), b.constant(np.uint8(3)))
    else:
        y = b.matmul(x, b.constant(w.astype(element)))
        y = b.relu(y) if is_light else b.gelu(y)
    graph = fuse_regions(b.build(y), Trace())
    feeds = [{"x": rng.integers(0, 9, (rows, depth)).astype(element)} for rows in ROWS]
    check(graph, target, feeds)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("taps, strides", [(1, (1, 1)), (3, (1, 1)), (3, (2, 2)), (2, (1, 3))])
def test_convolutions_of_small_images(target, groups, taps, strides):
    rng = np.random.default_rng(taps)
    b = Builder("conv")
    w = rng.normal(size=(8, 8 // groups, taps, taps)).astype(np.float32)
    x = b.input("x", "f32[n, 8, 5, 7]")
    y = b.relu(b.conv(x, b.constant(w), strides=strides, groups=groups))
    graph = fuse_regions(b.build(y), Trace())
    feeds = [{"x": rng.normal(size=(n, 8, 5, 7)).astype(np.float32)} for n in (1, 2, 3)]
    check(graph, target, feeds)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["f32", "f64", "bf16"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_norms_of_rows_in_groups(target, kind, norm):
    """Rows read from memory, and residual sums, with and without quantized results."""
    element = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16}[kind]
    rng = np.random.default_rng(0)
    for columns in (1, 8, 13, 33, 60):
        b = Builder("norms")
        x, r = (b.input(name, f"{kind}[n, {columns}]") for name in "xr")
        scale = b.input("scale", f"{kind}[{columns}]")
        found = [b.op(norm, x, scale), b.op(norm, b.add(x, r), scale)]
        if kind == "f32":
            found += b.dynamic_quantize(b.op(norm, b.mul(x, r)), per_token=True)
        graph = fuse_regions(b.build(*found), Trace())
        full = {name: rng.normal(size=(7, columns)).astype(element) for name in "xr"}
        weights = {"scale": full["x"][6]}
        feeds = [{name: a[:rows] for name, a in full.items()} | weights for rows in (1, 4, 7)]
        check(graph, target, feeds)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("features, values", [(16, 16), (7, 5)])
def test_int8_attention(target, features, values):
    rng = np.random.default_rng(0)
    b = Builder("attention")
    q = b.input("q", f"f32[1, 16, n, {features}]")
    k, v = b.input("k", f"f32[1, 16, t, {features}]"), b.input("v", f"f32[1, 16, t, {values}]")
    graph = b.build(b.attention(q, k, v, int8=True))

    def feeds(n, t):
        shapes = {"q": (1, 16, n, features), "k": (1, 16, t, features), "v": (1, 16, t, values)}
        return {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}

    check(graph, target, [feeds(n, t) for n in (1, 17) for t in (1, 2, 3, 4, 5, 257)])
