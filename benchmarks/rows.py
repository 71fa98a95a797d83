"""Microseconds of norms, softmax and reductions on one thread, vs. ONNX Runtime or numpy.

    python benchmarks/rows.py [--target avx2] [--seconds 0.5] [WORD ...]

Runs the cases whose name contains one of the words; the best of many interleaved calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
from movement import Case, graph_of, onnx_call, report


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def norms() -> Iterator[Case]:
    for shape in ((128, 384), (197, 768), (512, 768), (1536, 128), (6144, 64)):
        x, w = draw(*shape), draw(shape[-1])
        onnx = onnx_call("LayerNormalization", x, {"scale": w, "bias": w})
        graph, feeds = graph_of("layer_norm", x, False, w, w), {"x": x, "x0": w, "x1": w}
        yield Case(f"layer_norm {shape}", graph, feeds, onnx, 2 * x.nbytes)
        onnx = onnx_call("Softmax", x, {}, axis=-1)
        yield Case(f"softmax {shape}", graph_of("softmax", x), {"x": x}, onnx, 2 * x.nbytes)
    x = draw(8, 64, 100)
    onnx = onnx_call("Softmax", x, {}, axis=1)
    yield Case("softmax (8, 64, 100) axis 1", graph_of("softmax", x, axis=1), {"x": x}, onnx)
    x, w = draw(1, 256, 28, 28), draw(256)
    onnx = onnx_call("InstanceNormalization", x, {"scale": w, "bias": w})
    graph, feeds = graph_of("instance_norm", x, False, w, w), {"x": x, "x0": w, "x1": w}
    yield Case("instance_norm (1, 256, 28, 28)", graph, feeds, onnx, 2 * x.nbytes)


def reductions() -> Iterator[Case]:
    for shape, axes in (
        ((256, 1024), (1,)),
        ((256, 1024), (0,)),
        ((1, 256, 28, 28), (2, 3)),
        ((64, 64, 64), (0, 2)),
        ((65536, 3), (1,)),
    ):
        x = draw(*shape)
        for op, function in (("reduce_sum", np.sum), ("reduce_max", np.max)):
            call = lambda function=function, x=x, axes=axes: function(x, axis=axes)
            graph = graph_of(op, x, axes=axes)
            yield Case(f"{op} {shape} over {axes}", graph, {"x": x}, call, x.nbytes)
    x = draw(4, 32000)
    for op, attrs, function in (
        ("argmax", {"axis": 1}, lambda: np.argmax(x, axis=1)),
        ("argmax", {"axis": 0}, lambda: np.argmax(x, axis=0)),
        ("cumsum", {"axis": 1}, lambda: np.cumsum(x, axis=1)),
    ):
        yield Case(f"{op} (4, 32000) {attrs}", graph_of(op, x, **attrs), {"x": x}, function)


if __name__ == "__main__":
    report(chain(norms(), reductions()), __doc__, 45)
