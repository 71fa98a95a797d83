"""The length of a kernel is bounded for any model: attributes and sizes that are a hundred times
larger do not make it longer, and more nodes make more kernels, not longer ones."""

from functools import reduce

import numpy as np
import pytest
from run_kernel import TARGETS, lower

from bitwright.backends.cpu.kernels.conv.lower_transposed import MOST_CALLS
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import MAX_NODES, fuse_regions
from bitwright.passes.manager import run_passes
from bitwright.passes.simplify.separate_bias import separate_bias
from bitwright.target import named

FEW, MANY = 70, 7000


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def image(b, *shape, dtype="f32"):
    return b.input("x", f"{dtype}[{', '.join(map(str, shape))}]")


def last(b, x):
    """The image in channels-last layout."""
    return b.relu(b.conv(x, b.constant(ones(x.shape[1], x.shape[1], *[1] * (x.rank - 2)))))


BY_SIZE = {
    "max pool": lambda b, s: b.max_pool(image(b, 1, 1, s + 8), kernel=[s]),
    "average pool": lambda b, s: b.avg_pool(image(b, 1, 2, 3, s), kernel=[2, s], pads=[0, 3, 0, 3]),
    "pool of channels last": lambda b, s: b.max_pool(last(b, image(b, 1, 8, s)), kernel=[s]),
    "power of a pool": lambda b, s: b.lp_pool(image(b, 1, 1, 9), kernel=[3], p=s),
    "power of a norm": lambda b, s: b.lp_norm(image(b, 4, 9), axis=-1, p=s),
    "depthwise line": lambda b, s: b.conv(
        image(b, 1, 8, s + 8), b.constant(ones(8, 1, s)), groups=8
    ),
    "depthwise column": lambda b, s: b.conv(
        image(b, 1, 8, s + 8, 3), b.constant(ones(8, 1, s, 1)), groups=8
    ),
    "depthwise integers": lambda b, s: b.integer_conv(
        image(b, 1, 8, s + 8, dtype="u8"), b.constant(ones(8, 1, s, dtype=np.int8)), groups=8
    ),
    "convolution": lambda b, s: b.conv(image(b, 1, 8, s + 8), b.constant(ones(8, 8, s))),
    "groups": lambda b, s: b.conv(image(b, 1, 2 * s, 9), b.constant(ones(2 * s, 2, 3)), groups=s),
    "transposed": lambda b, s: b.conv_transpose(
        image(b, 1, 2, 4), b.constant(ones(2, 2, s)), strides=[s]
    ),
    "response norm": lambda b, s: b.lrn(image(b, 1, s, 4, 4), size=s),
    "top k": lambda b, s: b.top_k(image(b, 2, s), k=s)[0],
    "softmax": lambda b, s: b.softmax(image(b, 2, s), axis=-1),
    "layer norm": lambda b, s: b.layer_norm(image(b, 2, s), b.constant(ones(s)), axis=-1),
    "product": lambda b, s: b.matmul(image(b, 2, s), b.constant(ones(s, 17))),
    "concat": lambda b, s: b.concat(*[b.input(f"x{i}", "f32[2]") for i in range(s)], axis=0),
    "split": lambda b, s: b.split(image(b, s, 3), axis=0, sizes=[1] * s)[-1],
    "attention": lambda b, s: b.attention(*[b.input(n, f"f32[1, 1, 3, {s}]") for n in "qkv"]),
}


def lowered(b, *results, target="host"):
    graph = run_passes(b.build(*results), [separate_bias, fuse_regions])
    return lower(graph, named(target))


def text_length(ctx):
    return max((len(ctx.text(kernel)) for kernel in ctx.kernels.values()), default=0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BY_SIZE)
def test_sizes_and_attributes(name, target):
    few, many = (Builder(name) for _ in range(2))
    short = text_length(lowered(few, BY_SIZE[name](few, FEW), target=target))
    long = text_length(lowered(many, BY_SIZE[name](many, MANY), target=target))
    assert long <= 1.5 * short  # a last iteration may be peeled, whole or in part


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_resized_axes(mode):
    few, many = (Builder(mode) for _ in range(2))
    short = lowered(few, few.resize(image(few, *[2] * 3), sizes=[3] * 3, mode=mode))
    long = lowered(many, many.resize(image(many, *[2] * 10), sizes=[3] * 10, mode=mode))
    assert text_length(long) <= text_length(short)


@pytest.mark.parametrize(
    "grow",
    [
        lambda b, x, i: b.tanh(b.mul(x, float(i + 2))),
        lambda b, x, i: b.add(x, b.input(f"x{i}", "f32[4, 8]")),
    ],
)
def test_elementwise_nodes(grow):
    """Also after a product and before a norm."""
    b = Builder("chain")
    start = b.matmul(image(b, 4, 8), b.constant(ones(8, 8)))
    end = reduce(lambda x, i: grow(b, x, i), range(1000), start)
    graph = run_passes(b.build(b.softmax(end, axis=-1)), [fuse_regions])
    held = [len(n.attrs["body"].nodes) for n in graph.nodes if n.op == "fused"]
    assert len(held) >= 1000 // MAX_NODES
    assert max(held) <= 2 * MAX_NODES + 1  # including inputs and constants


def test_transposed_convolutions_of_many_phases():
    side = 70
    b = Builder("phases")
    w = b.constant(ones(1, 1, side, side))
    ctx = lowered(b, b.conv_transpose(image(b, 1, 1, 2, 2), w, strides=[side, side]))
    assert side * side > MOST_CALLS
    assert len(ctx.schedule.steps) < 10
