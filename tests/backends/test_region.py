"""Prologues and epilogues, operands with broadcast strides, merged axes."""

import numpy as np
import pytest
from run_kernel import TARGETS, Run, assert_near, lower, named, reference

from bitwright.backends.cpu.lowering.context import region_of
from bitwright.backends.cpu.lowering.region import broadcast, collapse, collapse_rows, split
from bitwright.ir import dtype, symbol
from bitwright.lir.buffer import Buffer, contiguous
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite.trace import Trace


def view(*shape):
    return contiguous(Buffer("x", dtype("f32"), int(np.prod([1]))), shape)


def fused(b, *outputs):
    return fuse_regions(b.build(*outputs), Trace())


def test_prologue_and_epilogue():
    b = Builder("g")
    x, z, s = b.input("x", "f32[n, 8]"), b.input("z", "f32[n, 8]"), b.input("s", "f32[8]")
    graph = fused(b, b.mul(b.softmax(b.add(x, z)), b.add(b.mul(x, 2.0), s)))
    (node,) = [n for n in graph.nodes if n.op == "fused"]
    parts = split(region_of(node))
    assert [step.op for step in parts.before.expression.steps] == ["add"]
    assert [value.name for value in parts.before.inputs] == ["x", "z"]
    assert [step.op for step in parts.after.expression.steps] == ["mul", "add", "mul"]
    assert [value.name for value in parts.after.inputs] == ["x", "s"]


def test_a_plain_node_has_no_prologue_or_epilogue():
    b = Builder("g")
    y = b.softmax(b.input("x", "f32[3, 8]"))
    parts = split(region_of(y.node))
    assert parts.before.is_empty and parts.after.is_empty
    assert [value.name for value in parts.before.inputs] == ["x"] and not parts.after.inputs


def test_broadcast_strides():
    assert broadcast(view(5), (2, 3, 5)).strides == (0, 0, 1)
    assert broadcast(view(3, 1), (2, 3, 5)).strides == (0, 1, 0)
    n = symbol("n")
    (stride,) = broadcast(view(n), (7,)).strides
    assert str(stride) == "min(1, n-1)"  # 0 if n is 1


def test_collapse_merges_axes_with_compatible_strides():
    whole, row = view(2, 3, 5), broadcast(view(5), (2, 3, 5))
    assert collapse([whole])[0].shape == (30,)
    assert [v.strides for v in collapse_rows([whole, row])] == [(5, 1), (0, 1)]
    middle = broadcast(view(3, 1), (2, 3, 5))
    assert [v.shape for v in collapse_rows([whole, middle])] == [(2, 3, 5)] * 2
    assert collapse_rows([view(4)])[0].shape == (1, 4)


@pytest.mark.parametrize("target", TARGETS)
def test_operands_broadcast_on_every_axis(target):
    """Before and after the anchor: a scalar, a row, a column, a middle axis, a symbolic size."""
    b = Builder("g")
    x = b.input("x", "f32[2, 3, n]")
    shapes = {"row": "[n]", "column": "[2, 1, 1]", "middle": "[3, 1]", "late": "[m, 1, n]"}
    given = {name: b.input(name, f"f32{shape}") for name, shape in shapes.items()}
    before = b.add(b.mul(b.add(x, given["middle"]), given["row"]), 0.5)
    y = b.softmax(before)
    y = b.mul(b.add(b.mul(y, given["column"]), given["late"]), given["row"])
    graph = fused(b, y)
    for late in (1, 2):
        sizes = {"x": (2, 3, 21), "row": (21,), "column": (2, 1, 1), "middle": (3, 1)}
        sizes["late"] = (late, 1, 21)
        rng = np.random.default_rng(0)
        feeds = {name: rng.normal(size=s).astype(np.float32) for name, s in sizes.items()}
        (expected,) = reference(graph, feeds).values()
        (found,) = Run(graph, feeds, named(target), 2).outputs.values()
        assert_near(found, expected, 2e-5)


def test_equal_structures_share_a_kernel():
    """Names, sizes and strides do not affect the kernel."""
    b = Builder("g")
    for number, shape in enumerate(("[2, 3, 8]", "[n, 8]")):
        x, z = (b.input(f"{name}{number}", f"f32{shape}") for name in "xz")
        b.output(f"y{number}", b.layer_norm(b.add(x, z)))
    graph = fuse_regions(b.build(), Trace())
    assert len(lower(graph).kernels) == 1
