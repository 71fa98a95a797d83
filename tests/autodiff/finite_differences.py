"""Central differences in f64, and graphs of one op with a scalar loss."""

import numpy as np

from bitwright.ir import dtype
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.reverse import is_differentiable


def widened(array):
    """Floats as f64, everything else as it is."""
    if array is None or not dtype(array.dtype).is_float:
        return array
    return array.astype(np.float64)


def projected(op, inputs, attrs, seed=3):
    """A graph of one node whose loss is a random projection of its float results.

    Returns the graph, its inputs by name and the names of the differentiable ones.
    """
    b = Builder(op.name)
    feeds = {f"in{i}": x for i, x in enumerate(inputs) if x is not None}
    values = [
        None if x is None else b.input(f"in{i}", TensorType(dtype(x.dtype), x.shape))
        for i, x in enumerate(inputs)
    ]
    node = b.node(op.name, values, attrs, [])
    rng, total = np.random.default_rng(seed), b.constant(np.zeros(()), "f64")
    arrays = run(b.build(**{f"y{i}": y for i, y in enumerate(node.outputs)}), feeds)
    b.outputs.clear()
    for i, y in enumerate(node.outputs):
        if is_differentiable(y) and not y.dtype.is_complex:
            weights = rng.uniform(0.5, 1.5, np.shape(arrays[f"y{i}"])).astype(y.dtype.numpy)
            part = b.reduce_sum(b.mul(y, weights), axes=tuple(range(y.rank)), keepdims=False)
            total = b.add(total, b.cast(part, to="f64"))
    names = [v.name for v in values if is_differentiable(v) and not v.dtype.is_complex]
    return b.build(loss=total), feeds, names


def directional(graph, feeds, names, seed=5, steps=(1e-4, 5e-5)):
    """A random direction per input, and the loss's derivative along all of them together.

    Two step sizes are combined so that the error of third order cancels.
    """
    rng = np.random.default_rng(seed)
    direction = {n: rng.uniform(-1, 1, feeds[n].shape).astype(feeds[n].dtype) for n in names}

    def loss(step):
        moved = {n: feeds[n] + step * direction[n] for n in names}
        return float(run(graph, {**feeds, **moved})["loss"])

    coarse, fine = ((loss(h) - loss(-h)) / (2 * h) for h in steps)
    return direction, (4 * fine - coarse) / 3
