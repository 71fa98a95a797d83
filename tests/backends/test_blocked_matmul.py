"""Products of two operands known at run time: either transposed, all float types, any sizes."""

import numpy as np
import pytest
from run_kernel import TARGETS, THREADS, Run, assert_near, lower, reference

from bitwright.backends.cpu.kernels.matmul.blocked import DEPTH
from bitwright.ir import dtype
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite.trace import Trace
from bitwright.target import named

KINDS = ("nn", "nt", "tn", "tt")
SIZES = [(1, 1, 1), (7, 16, 17), (16, 17, 33), (33, 127, 16), (127, 7, 127), (0, 5, 4), (5, 0, 7)]
DEEP = [(17, DEPTH, 33), (9, DEPTH + 1, 70), (40, 2 * DEPTH + 7, 100)]
TOLERANCE = {"f32": 2e-5, "bf16": 1e-2, "f16": 2e-3}


def draw(*shape, element="f32", seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype(element).numpy)


def graph_of(kind, element="f32", a="m, k", w="k, n", epilogue=None, **more):
    """A matmul of symbolic sizes; operands are stored transposed where `kind` has a t."""
    b, operands = Builder("g"), []
    for name, letter, shape in (("a", kind[0], a), ("w", kind[1], w)):
        *outer, rows, columns = shape.split(", ")
        last = [columns, rows] if letter == "t" else [rows, columns]
        value = b.input(name, f"{element}[{', '.join([*outer, *last])}]")
        n = len(outer)
        turned = (*range(n), n + 1, n)
        operands.append(b.transpose(value, perm=turned) if letter == "t" else value)
    y = b.matmul(*operands)
    others = [b.input(name, type_) for name, type_ in more.items()]
    return b.build(y=epilogue(b, y, *others) if epilogue else y)


def stored(kind, a, w):
    turned = (
        x.swapaxes(-1, -2).copy() if k == "t" else x for k, x in zip(kind, (a, w), strict=True)
    )
    return dict(zip("aw", turned, strict=True))


def check(graph, cases, target, tolerance=2e-5, threads=THREADS):
    whole = fuse_regions(graph, Trace())
    ctx = lower(whole, named(target))
    families = {step.family.rpartition("_")[0] for step in ctx.schedule.steps}
    assert families == {"blocked_matmul"}
    for feeds in cases:
        expected = reference(graph, feeds)["y"]
        found = [Run(whole, feeds, threads=n, ctx=ctx).outputs["y"] for n in threads]
        assert_near(found[0], expected, tolerance)
        for other in found[1:]:
            assert np.array_equal(found[0].view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_size(kind, target):
    cases = [stored(kind, draw(m, k), draw(k, n, seed=1)) for m, k, n in (*SIZES, *DEEP)]
    check(graph_of(kind), cases, target)


@pytest.mark.parametrize("element", ["bf16", "f16"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_floats(kind, element):
    cases = [
        stored(kind, draw(m, k, element=element), draw(k, n, element=element, seed=1))
        for m, k, n in (*SIZES, *DEEP)
    ]
    check(graph_of(kind, element), cases, "host", TOLERANCE[element])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("a, w", [("3, m, k", "3, k, n"), ("2, 3, m, k", "3, k, n")])
def test_batches(kind, a, w):
    sizes = {"2": 2, "3": 3, "m": 17, "k": 33, "n": 20}
    shapes = [[sizes[s] for s in text.split(", ")] for text in (a, w)]
    feeds = stored(kind, draw(*shapes[0]), draw(*shapes[1], seed=1))
    check(graph_of(kind, a=a, w=w), [feeds], "host")


@pytest.mark.parametrize("target", TARGETS)
def test_epilogues(target):
    """The epilogue sees whole sums: bias, activation, a mask from another tensor, accumulation."""

    def finish(b, y, bias, other):
        y = b.gelu(b.add(y, bias))
        return b.add(b.where(b.gt(other, 0.0), y, 0.0), other)

    graph = graph_of("tn", epilogue=finish, bias="f32[n]", other="f32[m, n]")
    cases = [
        stored("tn", draw(m, k), draw(k, n, seed=1))
        | {"bias": draw(n, seed=2), "other": draw(m, n, seed=3)}
        for m, k, n in (SIZES[1], DEEP[2])
    ]
    check(graph, cases, target)


def test_result_of_another_type():
    """Sums over several blocks of k stay in f32 until the last one."""
    graph = graph_of("nt", epilogue=lambda b, y: b.cast(y, to="bf16"))
    m, k, n = DEEP[2]
    check(graph, [stored("nt", draw(m, k), draw(k, n, seed=1))], "host", TOLERANCE["bf16"])
